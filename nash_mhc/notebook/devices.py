"""Detect the accelerators of this machine and propose a preset and mesh that fit.

Detection runs in a short separate process: a TPU belongs to one process at a time, and JAX reserves most of a GPU's
memory. Both are needed by the training process, not by the notebook.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import NamedTuple

from nash_mhc.config import presets
from nash_mhc.config.schema import ConfigError

_BYTES_PER_PARAMETER = 16  # weights, two Adam moments and a gradient, in float32
# Activations saved for the backward pass (remat dots), per layer, token and channel. `bench compile` of 3b for eight
# v6e chips says 47; the share below leaves room for XLA's temporaries.
_SAVED_BYTES, _USABLE_SHARE = 48, 0.85
_AXES = ("data", "fsdp", "tp")


class Found(NamedTuple):
    """The devices of this machine, which are all alike."""

    platform: str  # cpu, gpu, tpu
    kind: str
    number: int
    memory: int | None  # usable bytes per device; None: unknown
    cores: float  # of the host


class Proposal(NamedTuple):
    sentence: str  # describes the devices
    size: str  # preset
    mesh: str  # data x fsdp x tp, such as 2x2x2
    batch_size: int
    grad_accum: int
    why: str

    @property
    def flags(self) -> list[str]:
        """Batch flags of `nash_mhc.train`."""
        return ["--batch-size", str(self.batch_size), "--grad-accum", str(self.grad_accum)]


def device_sentence(found: Found) -> str:
    if found.platform == "cpu":
        return f"This is a CPU with {found.cores:g} core{'s' * (found.cores != 1)}: there is no accelerator."
    noun = "chip" if found.platform == "tpu" else "GPU"
    memory = f" with {found.memory / 2**30:.1f} GiB" if found.memory else ""
    if found.number == 1:
        return f"This is one {found.kind} {noun}{memory}; a 2x2x2 mesh needs eight."
    return f"These are {found.number} {found.kind} {noun}s{memory}{' each' * bool(memory)}."


def mesh_flags(mesh: str) -> list[str]:
    """Return the flags for a mesh such as `2x2x2`; -1 takes the remaining devices."""
    sizes = mesh.lower().split("x")
    if len(sizes) != len(_AXES) or not all(re.fullmatch(r"-1|[1-9]\d*", size.strip()) for size in sizes):
        raise ConfigError(f"mesh {mesh!r}: write data x fsdp x tp as three numbers, for example 2x2x2")
    return [word for axis, size in zip(_AXES, sizes, strict=True) for word in (f"--mesh-{axis}", size.strip())]


def propose(found: Found) -> Proposal:
    """Propose the largest preset that fits a device's memory, with the largest batch that fits."""
    sentence = device_sentence(found)
    small = lambda why: Proposal(sentence, "tiny", "1x1x1", presets.run("tiny").data.batch_size, 1, why)
    if found.platform == "cpu":
        return small("tiny learns the built-in stories in minutes on a CPU.")
    if found.memory is None:
        return small("The device memory is unknown, so choose the size yourself; tiny runs anywhere.")
    from nash_mhc.model.architectures import count_parameters  # imports JAX

    # Eight or more devices are split along all axes; fewer share the parameters, because memory is scarce then.
    data, fsdp, tp = (found.number // 4, 2, 2) if found.number % 8 == 0 else (1, found.number, 1)
    for size in reversed(presets.sizes()):
        run, model, parameters = presets.run(size), presets.model(size), count_parameters(presets.model(size))
        state = _BYTES_PER_PARAMETER * parameters / (fsdp * tp)
        per_sequence = _SAVED_BYTES * model.layers * run.data.seq_len * model.width / tp
        most = max(1, run.data.batch_size // (data * fsdp))  # sequences per device in the preset
        budget = _USABLE_SHARE * found.memory
        fitting = [count for count in (8, 4, 2, 1) if count <= most and state + count * per_sequence <= budget]
        if fitting:
            count = fitting[0]
            batch = count * data * fsdp
            why = (
                f"{size} has {parameters:,} parameters: per device {state / 2**30:.1f} GiB for weights, moments and gradients, "
                f"and about {count * per_sequence / 2**30:.1f} GiB for {count} sequence{'s' * (count > 1)} of "
                f"{run.data.seq_len} tokens."
            )
            return Proposal(sentence, size, f"{data}x{fsdp}x{tp}", batch, max(1, run.data.batch_size // batch), why)
    return small("No larger preset fits its memory.")


def detect() -> Proposal:
    """Detect the devices in another process and propose a preset."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ConfigError(f"cannot detect the devices: {last}")
    return Proposal(**json.loads(done.stdout.splitlines()[-1]))


def _local_devices() -> Found:
    import jax

    from nash_mhc.runtime.hardware import cores, device_memory

    devices = jax.local_devices()
    return Found(devices[0].platform, devices[0].device_kind, len(devices), device_memory(devices[0]), cores())


if __name__ == "__main__":
    print(json.dumps(propose(_local_devices())._asdict()))
