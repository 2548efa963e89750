"""What is plugged in, in a sentence, and which preset and mesh fit it.

Devices are asked in a process of their own, which ends at once: a TPU belongs to one process at a time, and the first
that asks a GPU takes most of its memory. Both are for the training run, not for the notebook.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import NamedTuple

from nash_mhc.config import presets
from nash_mhc.config.schema import ConfigError, RunConfig

# Weights, two moments of Adam and a gradient, in float32.
_BYTES_A_PARAMETER = 16
# Of what the backward pass finds saved (remat dots), for each layer, token and channel. `bench compile` of 3b for eight
# v6e chips says 47; what XLA needs besides is the reserve.
_BYTES_SAVED, _USABLE = 48, 0.85
_AXES = ("data", "fsdp", "tp")


class Found(NamedTuple):
    """The devices of this machine; all are alike."""

    platform: str  # cpu, gpu, tpu
    kind: str
    number: int
    memory: int | None  # bytes that a program may use on one of them; None: not known
    cores: float  # processors of the host


class Proposal(NamedTuple):
    sentence: str  # what is here
    size: str  # of the model: a preset
    mesh: str  # data x fsdp x tp, as 2x2x2
    batch_size: int
    grad_accum: int
    why: str

    @property
    def flags(self) -> list[str]:
        """What has to be told to `nash_mhc.train` besides size and mesh."""
        return ["--batch-size", str(self.batch_size), "--grad-accum", str(self.grad_accum)]


def device_sentence(found: Found) -> str:
    if found.platform == "cpu":
        return f"This is a CPU with {found.cores:g} core{'s' * (found.cores != 1)}: there is no accelerator."
    thing = "chip" if found.platform == "tpu" else "GPU"
    each = f" with {found.memory / 2**30:.1f} GiB" if found.memory else ""
    if found.number == 1:
        return f"This is one {found.kind} {thing}{each}; a 2x2x2 mesh needs eight."
    return f"These are {found.number} {found.kind} {thing}s{each}{' each' * bool(each)}."


def mesh_shape(mesh: str) -> tuple[int, int, int]:
    """`2x2x2` -> (2, 2, 2); ConfigError for what is no mesh. -1 takes the devices that are left."""
    try:
        data, fsdp, tp = (int(size) for size in mesh.lower().split("x"))
        if min(data, fsdp, tp) < -1 or 0 in (data, fsdp, tp):
            raise ValueError
    except ValueError:
        raise ConfigError(f"mesh {mesh!r}: write data x fsdp x tp as three numbers, for instance 2x2x2") from None
    return data, fsdp, tp


def mesh_flags(mesh: str) -> list[str]:
    return [word for axis, size in zip(_AXES, mesh_shape(mesh), strict=True) for word in (f"--mesh-{axis}", str(size))]


def _mesh_of(number: int) -> str:
    """Eight or more are split in every way; fewer share the parameters, which is what is short then."""
    return f"{number // 4}x2x2" if number % 8 == 0 else f"1x{number}x1"


def _bytes(run: RunConfig, parameters: int, mesh: tuple[int, int, int], rows: int) -> float:
    """What a device has to hold for so many rows of its own."""
    m, (_, fsdp, tp) = presets.model(run.model_size), mesh
    saved = _BYTES_SAVED * m.layers * run.data.seq_len * m.width / tp
    return _BYTES_A_PARAMETER * parameters / (fsdp * tp) + rows * saved


def propose(found: Found) -> Proposal:
    """The largest preset that fits, by the memory of a device, and as many rows of a batch as fit beside it."""
    sentence = device_sentence(found)
    tiny = presets.run("tiny").data.batch_size
    if found.platform == "cpu":
        return Proposal(sentence, "tiny", "1x1x1", tiny, 1, "tiny learns the built-in stories in minutes on a CPU.")
    if found.memory is None:
        why = "How much memory it has is not known, so choose the size yourself; tiny runs anywhere."
        return Proposal(sentence, "tiny", "1x1x1", tiny, 1, why)
    from nash_mhc.model.architectures import count_parameters  # imports JAX

    mesh = _mesh_of(found.number)
    shape, room = mesh_shape(mesh), _USABLE * found.memory
    for size in reversed(presets.sizes()):
        run, parameters = presets.run(size), count_parameters(presets.model(size))
        most = max(1, run.data.batch_size // math.prod(shape[:2]))  # rows of a device, as the preset has them
        fitting = [rows for rows in (8, 4, 2, 1) if rows <= most and _bytes(run, parameters, shape, rows) <= room]
        if fitting:
            batch = fitting[0] * math.prod(shape[:2])
            need, kept = _bytes(run, parameters, shape, fitting[0]) / 2**30, _bytes(run, parameters, shape, 0) / 2**30
            why = (
                f"{size} has {parameters:,} parameters: {kept:.1f} GiB a device for weights, moments and gradients, and about "
                f"{need - kept:.1f} GiB for {fitting[0]} row{'s' * (fitting[0] > 1)} of {run.data.seq_len} tokens."
            )
            return Proposal(sentence, size, mesh, batch, max(1, run.data.batch_size // batch), why)
    return Proposal(sentence, "tiny", "1x1x1", tiny, 1, "No larger preset fits its memory.")


def here() -> Proposal:
    """For this machine. Asked in another process: see above."""
    asked = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = (asked.stderr.strip() or "no reason given").splitlines()[-1]
        raise ConfigError(f"the devices cannot be looked at: {last}")
    return Proposal(**json.loads(asked.stdout.splitlines()[-1]))


def _look() -> Found:
    import jax

    from nash_mhc.runtime.hardware import cores, device_memory

    devices = jax.local_devices()
    device = devices[0]
    return Found(device.platform, device.device_kind, len(devices), device_memory(device), cores())


if __name__ == "__main__":
    print(json.dumps(propose(_look())._asdict()))
