"""Restore a checkpoint completely on one CPU device, and check every array.

`python -m nash_mhc.checkpoint restore-test` runs this file in a separate process.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.files import Folder, sizes, to_path
from nash_mhc.train.state import TrainState, abstract_state, saved_part

_BLOCK = 1 << 24  # numbers that are checked together; bounds the extra memory


def _blocks(array: Any) -> Iterator[np.ndarray]:
    flat = np.asarray(array).reshape(-1)  # no copy: the device is the host
    return (flat[start : start + _BLOCK] for start in range(0, len(flat), _BLOCK))


def wanted_state(checkpoint: Folder) -> TrainState:
    """Return the shapes and dtypes that the checkpoint's configuration needs, on one CPU device."""
    try:
        cfg = RunConfig.from_dict(manifest.read_values(checkpoint)["config"])
    except (KeyError, TypeError, ConfigError) as error:
        wrong = manifest.problem(checkpoint) or f"this version cannot read its configuration ({error})"
        raise ConfigError(f"{checkpoint}: {wrong}") from error
    device = SingleDeviceSharding(jax.devices("cpu")[0])
    on_device = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device)
    return jax.tree.map(on_device, saved_part(abstract_state(cfg), cfg.lora))


def _wrong_arrays(saved: dict[str, tuple[tuple[int, ...], str]], wanted: TrainState, state: TrainState) -> Iterator[str]:
    """Yield a line for every array with another shape or dtype than its configuration needs, or non-finite values.

    A restore casts another saved dtype silently, so both the saved and the restored array are compared.
    """
    restored = named_leaves(state)
    for name, like in named_leaves(wanted).items():
        if saved[name] != (like.shape, str(like.dtype)):
            yield f"{name} is saved as {saved[name][1]}{list(saved[name][0])}, expected {like.dtype}{list(like.shape)}"
        if (restored[name].shape, restored[name].dtype) != (like.shape, like.dtype):
            yield f"{name} was restored as {restored[name].dtype}{list(restored[name].shape)}"
        if bad := sum(int((~np.isfinite(block)).sum()) for block in _blocks(restored[name])):
            yield f"{name} has {bad:,} non-finite values of {restored[name].size:,}"


def restore_test(folder: Folder, step: int) -> bool:
    """Restore a checkpoint of a run, print the result, and return whether it is sound."""
    checkpoint = RunFolder(folder).checkpoints / str(step)
    size = sum(sizes(checkpoint).values())
    print(f"{checkpoint}: {size:,} bytes; verifying and restoring ...", flush=True)
    began = time.monotonic()
    try:
        wanted = wanted_state(checkpoint)
        with Store(folder) as store:
            state, values = store.restore(step, wanted)
    except Exception as error:  # any error here would also have stopped a run
        print(f"FAILED: {' '.join(str(error).split()) or type(error).__name__}")
        return False
    seconds = time.monotonic() - began
    wrong = list(_wrong_arrays(array_metadata(checkpoint), wanted, state))
    if not 0 <= int(state.step) <= int(values["step"]) == step:
        wrong.append(f"it records step {values['step']} and {int(state.step)} updates")
    for line in wrong:
        print(f"FAILED: {line}")
    parameters, size = jax.tree.leaves(state.model), sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    squares = sum(float(np.square(block, dtype=np.float64).sum()) for leaf in parameters for block in _blocks(leaf))
    device = next(iter(state.step.devices()))
    print(
        f"restored in {seconds:.1f} s on one {device.platform} device: {len(named_leaves(state))} arrays, {size:,} bytes; "
        f"the model has {sum(leaf.size for leaf in parameters):,} parameters with norm {math.sqrt(squares):.6g}; "
        f"{int(state.step)} updates"
    )
    if not wrong:
        print("every array has the shape and dtype of its configuration, and every number is finite")
    return not wrong


def main() -> int:
    folder, step = sys.argv[1:]
    return 0 if restore_test(to_path(folder), int(step)) else 1


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
