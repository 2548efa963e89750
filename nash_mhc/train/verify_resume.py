"""Check that a run resumes exactly (`train --verify-resume`) or that a checkpoint restores (`checkpoint restore-test`).

The first trains a few steps of the user's configuration in separate processes and a temporary directory. Its parent
process uses no accelerator, so all devices are free for them. The second uses one CPU device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ConfigError, MeshConfig, RunConfig
from nash_mhc.parallel.mesh import Fits, indivisible_sizes
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.processes import find_place
from nash_mhc.storage.files import Folder, sizes, to_path
from nash_mhc.train.callbacks import EachStep
from nash_mhc.train.state import TrainState, abstract_state, saved_part
from nash_mhc.train.trainer import run

STEPS, SAVED, KILLED = 8, 3, 5  # steps per run; the step that is resumed from; the last step of the killed run
# Relative tolerance of losses on another mesh, which adds numbers in a different order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}
_BLOCK = 1 << 24  # numbers that are checked together; bounds the extra memory


def short_run(cfg: RunConfig, folder: Path) -> RunConfig:
    """Return a few steps of the user's run in `folder`, with a row per step and without samples."""
    train = dataclasses.replace(
        cfg.train, total_steps=STEPS, checkpoint_interval=SAVED, checkpoint_dir=str(folder), log_interval=1, eval_interval=0,
        eval_batches=1, keep_last=STEPS, keep_every=0, resume="auto", resume_from=None,
    )  # fmt: skip
    optim = dataclasses.replace(cfg.optim, warmup_steps=min(cfg.optim.warmup_steps, STEPS))
    telemetry = dataclasses.replace(cfg.telemetry, sample_tokens=0)  # nothing compares the samples
    return dataclasses.replace(cfg, train=train, optim=optim, telemetry=telemetry)


def other_mesh(mesh: MeshConfig, fits: Fits, platform: str, device_count: int) -> MeshConfig | None:
    """Return another mesh that `fits`, if possible of as many devices and with several axes; else None.

    CPU devices are emulated, so any number of them is available.
    """
    axes, now = tuple(mesh.axes), tuple(mesh.axes.values())
    sizes = [4, 2, 8, 1] if platform == "cpu" else [math.prod(now), *range(device_count, 0, -1)]
    for size in sizes:
        shapes = [s for s in itertools.product(range(1, size + 1), repeat=len(axes)) if math.prod(s) == size and s != now]
        for shape in sorted(shapes, key=lambda s: (-sum(n > 1 for n in s), max(s), s)):
            other = dict(zip(axes, shape, strict=True))
            if fits(other):
                return dataclasses.replace(MeshConfig(num_devices=size, platform=platform), **other)  # type: ignore[arg-type]
    return None


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in RunFolder(folder).rows()}


def different_losses(unbroken: Path, resumed: Path, tolerance: float) -> Iterator[tuple[float, str]]:
    """Yield (relative difference, description) for every step after the checkpoint that differs."""
    rows = _rows(unbroken), _rows(resumed)
    for step in range(SAVED + 1, STEPS + 1):
        (a, b), (tokens_a, tokens_b) = ([each.get(step, {}).get(name) for each in rows] for name in ("loss", "tokens_seen"))
        if a is None or b is None:
            yield math.inf, f"step {step} has loss {a} in the uninterrupted run and {b} in the resumed one"
        elif (difference := abs(a - b) / max(abs(a), 1e-30)) > tolerance:
            yield difference, f"step {step} has loss {a!r} in the uninterrupted run and {b!r} in the resumed one"
        if tokens_a != tokens_b:
            yield (
                math.inf,
                f"step {step} read other data: {tokens_a} tokens in the uninterrupted run, {tokens_b} in the resumed one",
            )


def _contents(folder: Path) -> dict[str, str]:
    """Return the hash of every array of the last checkpoint and its other values, by name."""
    with Store(folder) as store:
        state, values = store.restore(STEPS, wanted_state(RunFolder(folder).checkpoints / str(STEPS)))
    hashes = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in named_leaves(state).items()}
    for name in ("config", "clock"):  # they contain the run directory, and times
        values.pop(name, None)
    return hashes | {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


def different_states(unbroken: Path, resumed: Path) -> list[str]:
    """Return the names of the arrays and values that differ between the last checkpoints of two runs."""
    a, b = _contents(unbroken), _contents(resumed)
    return [name for name in a | b if a.get(name) != b.get(name)]


# --- the processes ---------------------------------------------------------------------------------------------------


def kill_after(folder: Path, step: int) -> Callable[[int], None]:
    """Return a function for `EachStep` that kills this process while the step after `step` runs."""

    def finished(number: int) -> None:
        if number >= step:
            while not (RunFolder(folder).checkpoints / str(SAVED) / manifest.FILE).exists():
                time.sleep(0.01)  # the save runs in its own thread and must be complete
            os.kill(os.getpid(), signal.SIGKILL)

    return finished


class WrongExit(Exception):
    """A run ended with an unexpected exit code."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ended with exit code {code}; the check is inconclusive")
        self.code = code


def _train(cfg: RunConfig, folder: Path, what: str, *, killed: bool = False) -> None:
    """Train in a separate process, whose output is shown."""
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(short_run(cfg, folder).to_dict()))
    argv = [sys.executable, "-u", "-m", "nash_mhc.train.verify_resume", str(file), *(["killed"] if killed else [])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as child:
        try:
            code = child.wait()
        finally:
            child.kill()  # after an interrupt; otherwise it has ended
    if code != (-signal.SIGKILL if killed else 0):
        raise WrongExit(what, code)


def _end_with_parent(folder: Path) -> None:
    """Wait until the parent process ends, which closes our standard input; then delete the runs and exit."""
    os.read(0, 1)  # sys.stdin would hold a lock that the interpreter needs when it exits
    # Another process deletes the directory a little later, because this one writes to it until it ends.
    delete = "import shutil, sys, time; time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    subprocess.Popen([sys.executable, "-c", delete, str(folder)], stdin=subprocess.DEVNULL, start_new_session=True)
    os._exit(1)


def main() -> int:
    """Train a run: argv has its configuration file, then `killed` if it must kill itself. Or restore a checkpoint."""
    file, *killed = sys.argv[1:]
    if file == "restore-test":
        folder, step = killed
        return 0 if restore_test(to_path(folder), int(step)) else 1
    cfg = RunConfig.from_dict(json.loads(Path(file).read_text()))
    threading.Thread(target=_end_with_parent, args=(Path(file).parent,), daemon=True).start()
    kill = EachStep(kill_after(Path(str(cfg.train.checkpoint_dir)), KILLED))
    run(cfg, callbacks=[kill] if killed else [])
    return 0


def _print_result(differences: list[str], equal: str) -> bool:
    print("\n".join(f"NOT EQUAL: {line}" for line in differences) or f"equal: {equal}", flush=True)
    return not differences


def _resume_is_exact(cfg: RunConfig, folder: Path) -> bool:
    """Return whether the killed and resumed run equals the uninterrupted one; keep a copy of the killed one."""
    unbroken, resumed = folder / "unbroken", folder / "resumed"
    print(f"1/4 {STEPS} steps without interruption ...", flush=True)
    _train(cfg, unbroken, "the uninterrupted run")
    print(f"2/4 the same run, killed (SIGKILL) in step {KILLED + 1} with a checkpoint of step {SAVED} ...", flush=True)
    _train(cfg, resumed, "the run to be killed", killed=True)
    if RunFolder(resumed).steps() != [SAVED]:
        raise WrongExit("the run was killed from outside: it", -signal.SIGKILL)
    shutil.copytree(resumed, folder / "moved")
    print("3/4 the killed run, resumed ...", flush=True)
    _train(cfg, resumed, "the resumed run")
    wrong = [what for _, what in different_losses(unbroken, resumed, 0.0)]
    if names := different_states(unbroken, resumed):
        wrong.append(f"{len(names)} parts of the last checkpoint differ: {', '.join(names[:4])}{', ...' * (len(names) > 4)}")
    return _print_result(wrong, f"the losses of steps {SAVED + 1} to {STEPS} and the last checkpoint, bit for bit")


def _resume_agrees_on_other_mesh(folder: Path) -> bool:
    """Return whether the killed run, resumed on another mesh, has the losses of the uninterrupted one."""
    unbroken, moved = folder / "unbroken", folder / "moved"
    run = RunFolder(unbroken)
    cfg, devices = run.config(), run.info()["devices"]
    fits = lambda shape: not indivisible_sizes(cfg.data, cfg.model, shape)
    if (mesh := other_mesh(cfg.mesh, fits, devices["platform"], devices["there"])) is None:
        print(f"4/4 skipped: this run fits no other mesh of {devices['there']} x {devices['kind']}")
        return True
    print(f"4/4 the killed run, resumed on mesh {mesh} ...", flush=True)
    _train(dataclasses.replace(cfg, mesh=mesh), moved, "the run on another mesh")
    tolerance = TOLERANCE[cfg.train.dtype]
    largest = max(difference for difference, _ in different_losses(unbroken, moved, -1.0))
    wrong = [f"{what}, on mesh {mesh}" for _, what in different_losses(unbroken, moved, tolerance)]
    return _print_result(wrong, f"the losses of these steps on mesh {mesh}, within {tolerance:g} (at most {largest:.1g} apart)")


def verify_resume(cfg: RunConfig) -> int:
    """Return exit code 0 if all runs are equal, 1 if not (their directories are then kept), 2 for invalid settings."""
    if find_place(cfg.mesh, os.environ) is not None:
        raise ConfigError("--verify-resume starts its own processes; run it once, without a launcher such as srun or mpirun")
    jax.config.update("jax_platforms", "cpu")  # only in this process
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    code = 2
    try:
        code = 0 if all([_resume_is_exact(cfg, folder), _resume_agrees_on_other_mesh(folder)]) else 1
    except WrongExit as error:
        print(error, file=sys.stderr)
        code = 2 if error.code == 2 else 1  # the run has printed its error
    finally:
        if code != 1:
            shutil.rmtree(folder, ignore_errors=True)
    if code == 1:
        print(f"the runs are in {folder}")
    return code


# --- restore a checkpoint --------------------------------------------------------------------------------------------


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
    """Yield a line for every array whose saved dtype differs from the configuration's, or with non-finite values.

    A restore checks the shapes, but casts another dtype silently.
    """
    restored = named_leaves(state)
    for name, like in named_leaves(wanted).items():
        if saved[name] != (like.shape, str(like.dtype)):
            yield f"{name} is saved as {saved[name][1]}{list(saved[name][0])}, expected {like.dtype}{list(like.shape)}"
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


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
