"""Before a run begins: does it fit its devices? And if it does not, or memory ran out all the same, what would."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from nash_mhc.config.parsing import as_flags
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.estimate.candidates import (
    SAFE,
    candidates,
    precision_settings,
    rows_for,
    smaller_precisions,
    smaller_remats,
    ways,
)
from nash_mhc.estimate.memory import Memory, estimate
from nash_mhc.estimate.roofline import ERROR, speed
from nash_mhc.model.architectures import architecture_of
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime.chips import Chip, Machine, by_kind, host_memory, this_cpu
from nash_mhc.runtime.hardware import device_memory

_GIB = 2**30
# The compiler may need that much less than the estimate says, by the tests: only what is too large even so is refused.
_TRUSTED = 0.85
_SHOWN = 3
# What each part of the memory is made by, as a user sets it.
_MADE_BY = {
    "parameters": "the model and --weights-dtype, split by --mesh-fsdp and --mesh-tp",
    "gradients": "the model, split by --mesh-fsdp and --mesh-tp",
    "optimizer": "the model, --optimizer and --moments-dtype, split by --mesh-fsdp and --mesh-tp",
    "streams": "--batch-size x --seq-len, by --model-layers and --model-streams",
    "activations": "--batch-size x --seq-len, by --remat and --model-layers",
    "logits": "--model-vocab-size, split by --mesh-tp",
    "collectives": "weights gathered over --mesh-fsdp",
    "teachers": "--distill-teacher and --distill-anchor, split by --mesh-fsdp and --mesh-tp",
    "temporaries": "the compiler, most of it by --batch-size x --seq-len",
}


# The same rows in more parts are the same step; remat costs time; another mesh may cost more of it; shorter rows are
# another run, and so are weights that are kept in half of the bits.
_KINDS = {
    "data.batch_size": "parts", "train.grad_accum": "parts", "train.remat": "remat", "train.remat_keep": "remat",
    "data.seq_len": "length",
    "precision.weights_dtype": "precision", "precision.moments_dtype": "precision",
}  # fmt: skip
_HARM = {"parts": 1, "remat": 2, "mesh": 4, "precision": 8, "length": 16}


class Remedy(NamedTuple):
    flags: str
    memory: float  # bytes of a device


def room_of(mesh: Mesh) -> float:
    """Bytes of one device. Emulated devices share what this machine has."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if (known := device_memory(local[0])) is not None:
        return float(known)
    if local[0].platform != "cpu" or (known_here := host_memory()) is None:
        return math.inf
    return known_here[1] / len(local)


def preflight(cfg: RunConfig, mesh: Mesh, say: Callable[[str], None], *, insist: bool = False) -> dict[str, Any] | None:
    """What is expected of a resolved run, for its folder; None for a model that does not say what it holds.

    ConfigError for what cannot fit, with what would; `insist`: a warning instead.
    """
    if architecture_of(cfg.model).activations is None:
        return None
    memory, room = estimate(cfg, mesh.shape), room_of(mesh)
    if memory.total * _TRUSTED > room:
        text = f"this run needs about {_gib(memory.total)} of each device's {_gib(room)} ({largest(memory)})"
        if not insist:
            raise ConfigError(f"{text}; {_advice(cfg, mesh.shape, room)}, or insist with --no-preflight")
        say(f"{text}; it was told to begin all the same")
    elif memory.total > room:
        say(f"tight: this run needs about {_gib(memory.total)} of each device's {_gib(room)}; {_advice(cfg, mesh.shape, room)}")
    return _expected(cfg, mesh, memory, room)


def _expected(cfg: RunConfig, mesh: Mesh, memory: Memory, room: float) -> dict[str, Any]:
    known: dict[str, Any] = {
        "gib": memory.total / _GIB,
        "gib_by_category": {field.name: getattr(memory, field.name) / _GIB for field in dataclasses.fields(memory)},
        "room_gib": room / _GIB if math.isfinite(room) else None,
    }
    if (chip := by_kind(mesh.devices.flat[0].device_kind)) is not None:
        there = speed(cfg, mesh.shape, Machine(chip.name, chip, mesh.size), memory)
        known |= {"step_ms": there.times.step * 1e3, "tokens_per_s": there.tokens_a_second, "mfu": there.mfu, "error": ERROR}
    return known


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"


def largest(memory: Memory) -> str:
    """The three largest parts, with what makes them."""
    sizes = sorted(((getattr(memory, name), name) for name in _MADE_BY), reverse=True)[:_SHOWN]
    return ", ".join(f"{name} {_gib(size)} from {_MADE_BY[name]}" for size, name in sizes)


def _advice(cfg: RunConfig, mesh: Mapping[str, int], room: float) -> str:
    found = smaller(cfg, mesh, room)
    if not found:
        return "no split of it fits; take a smaller --model-size or more devices (nash-mhc plan says how many)"
    return "what fits: " + ", or ".join(f"{remedy.flags} ({_gib(remedy.memory)})" for remedy in found)


def smaller(cfg: RunConfig, mesh: Mapping[str, int], room: float) -> list[Remedy]:
    """At most three settings that fit with some room left, each of another kind, those that change least first."""
    if set(mesh) != {"data", "fsdp", "tp"}:
        return []  # `ways` knows no other axes: of a mesh with one more, nobody has said what may be split along it
    found: list[tuple[int, float, tuple[str, ...], Remedy]] = []
    now = _settings(cfg, mesh)
    for other, its_mesh in itertools.chain(_ways(cfg, mesh), _more(cfg, mesh)):
        changed = {key: value for key, value in _settings(other, its_mesh).items() if now[key] != value}
        size = estimate(other, its_mesh).total
        if changed and size <= SAFE * room:
            kinds = tuple(sorted({_KINDS.get(key, "mesh") for key in changed}))
            # What comes nearest to the room was changed least.
            found.append((sum(_HARM[kind] for kind in kinds), -size, kinds, Remedy(" ".join(as_flags(changed)), size)))
    best: dict[tuple[str, ...], Remedy] = {}
    for _, _, kinds, remedy in sorted(found, key=lambda each: each[:2]):
        best.setdefault(kinds, remedy)
    return list(best.values())[:_SHOWN]


def _ways(cfg: RunConfig, mesh: Mapping[str, int]) -> Iterator[tuple[RunConfig, dict[str, int]]]:
    """Over as many devices, with nothing kept that is not kept now."""
    return ways(cfg, math.prod(mesh.values()), remats=smaller_remats(cfg))


def _settings(cfg: RunConfig, mesh: Mapping[str, int]) -> dict[str, Any]:
    return {f"mesh.{axis}": size for axis, size in mesh.items()} | {
        "data.batch_size": cfg.data.batch_size,
        "data.seq_len": cfg.data.seq_len,
        "train.grad_accum": cfg.train.grad_accum,
        "train.remat": cfg.train.remat,
        "train.remat_keep": cfg.train.remat_keep,
        **precision_settings(cfg),
    }


def _more(cfg: RunConfig, mesh: Mapping[str, int]) -> Iterator[tuple[RunConfig, dict[str, int]]]:
    """Less of the same, for when no split of it fits: in half of the bits, or shorter rows."""
    for halved in smaller_precisions(cfg):
        yield from (way for way in _ways(halved, mesh) if way[1] == dict(mesh))
    length = cfg.data.seq_len // 2
    while length >= 2 * cfg.model.alignment and length % cfg.model.alignment == 0:
        shorter = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, seq_len=length))
        yield from (way for way in _ways(shorter, mesh) if way[1] == dict(mesh))
        length //= 2


def after_running_out(cfg: RunConfig, mesh: Mapping[str, int], room: float, said: str, again: str) -> ConfigError:
    """Memory ran out, whatever was expected: what holds most, and settings that hold a good deal less."""
    memory = estimate(cfg, mesh)
    # Less than was expected, which was too little; and where it was known to be too much, less than there is.
    found = smaller(cfg, mesh, _TRUSTED * min(memory.total, room))
    what = ", or ".join(f"{remedy.flags} ({_gib(remedy.memory)})" for remedy in found)
    return ConfigError(
        f"the devices have too little memory for this run ({said}); it was expected to hold {_gib(memory.total)} of each "
        f"({largest(memory)}); try {what or 'a smaller --model-size, or more devices along --mesh-fsdp'}; what is saved stays, "
        f"and with those flags this continues from it: {again}"
    )


def machine_here(mesh: Mesh) -> Machine:
    """The devices of a mesh as a machine to plan for; ConfigError for a chip that nothing is known of."""
    device = mesh.devices.flat[0]
    chip: Chip | None = this_cpu().chip if device.platform == "cpu" else by_kind(device.device_kind)
    if chip is None:
        raise ConfigError(f"--mesh-auto: nothing is known of {device.device_kind}; give --mesh-data, --mesh-fsdp and --mesh-tp")
    return Machine(chip.name, dataclasses.replace(chip, usable_gib=room_of(mesh) / _GIB), mesh.size)


def best_here(cfg: RunConfig, given: Mapping[str, Any], say: Callable[[str], None]) -> RunConfig:
    """`--mesh-auto`: with the mesh, remat and split of the batch that are expected to be the fastest of what fits here.

    What the user has set stays as it is. ConfigError where nothing fits.
    """
    everything: dict[str, Any] = {axis: -1 if axis == "data" else 1 for axis in cfg.mesh.axes}
    mesh = make_mesh(dataclasses.replace(cfg.mesh, **everything))
    machine = machine_here(mesh)
    found = candidates(rows_for(cfg, machine, given), machine, given)
    if not found:
        raise ConfigError(f"--mesh-auto: no mesh of {mesh.size} devices divides this model and its batch; set --batch-size")
    if found[0].fits == "no":
        least = min(each.memory.total for each in found)
        raise ConfigError(
            f"--mesh-auto: nothing fits: the smallest way needs {_gib(least)} of each device's {_gib(room_of(mesh))}; take a "
            "smaller --model-size or --batch-size, or more devices (nash-mhc plan says how many)"
        )
    best = found[0]
    chosen = {name: getattr(best.cfg.train, name) for name in ("grad_accum", "remat", "remat_keep")}
    say(f"--mesh-auto: {' '.join(as_flags(best.settings))} ({_gib(best.memory.total)} a device, of {len(found)} ways)")
    axes: dict[str, Any] = {**best.mesh}
    return dataclasses.replace(
        cfg,
        mesh=dataclasses.replace(cfg.mesh, **axes),
        data=dataclasses.replace(cfg.data, batch_size=best.cfg.data.batch_size),
        train=dataclasses.replace(cfg.train, **chosen),
    )
