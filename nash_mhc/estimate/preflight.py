"""The check before a run: does it fit its devices? If it does not, or runs out of memory, which settings would fit?"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from nash_mhc.config.parsing import as_flags
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.estimate.candidates import (
    SAFE,
    candidates,
    layout_settings,
    layouts,
    sequence_per_chip,
    smaller_remats,
)
from nash_mhc.estimate.memory import Memory, estimate
from nash_mhc.estimate.roofline import ERROR, speed
from nash_mhc.model.architectures import architecture_of
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime.chips import Chip, Machine, by_kind, host_memory, this_cpu
from nash_mhc.runtime.hardware import device_memory

log = logging.getLogger(__name__)
_GIB = 2**30
# In tests, the compiler needs as little as this fraction of the estimate: reject a run only if even that is too much.
_TRUSTED = 0.85
_SHOWN = 3  # remedies, and parts of the memory, in a message
# The settings that each part of the memory depends on.
_CAUSES = {
    "parameters": "model size, --weights-dtype, --mesh-fsdp, --mesh-tp",
    "gradients": "model size, --mesh-fsdp, --mesh-tp",
    "optimizer": "model size, --optimizer, --moments-dtype, --mesh-fsdp, --mesh-tp",
    "streams": "--batch-size, --seq-len, --model-layers, --model-streams",
    "activations": "--batch-size, --seq-len, --model-layers, --remat",
    "logits": "--model-vocab-size, --mesh-tp",
    "collectives": "--mesh-fsdp",
    "teachers": "the frozen models of --objective, --mesh-fsdp, --mesh-tp",
    "temporaries": "--batch-size, --seq-len, the compiler",
}

# Remedies, from the one that changes the run least: more microbatches give the same step, remat costs time, and another
# mesh may cost more time.
_KINDS = {
    "data.batch_size": "microbatches", "train.grad_accum": "microbatches", "train.remat": "remat", "train.remat_keep": "remat",
}  # fmt: skip
_COST = {"microbatches": 1, "remat": 2, "mesh": 4}


class Remedy(NamedTuple):
    flags: str
    memory: float  # bytes per device

    def __str__(self) -> str:
        return f"{self.flags} ({_size(self.memory)})"


def device_capacity(mesh: Mesh) -> float:
    """Return the bytes of one device; emulated devices share the memory of this machine."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if (memory := device_memory(local[0])) is not None:
        return float(memory)
    if local[0].platform != "cpu" or (host := host_memory()) is None:
        return math.inf
    return host[1] / len(local)


def preflight(cfg: RunConfig, mesh: Mesh, *, no_preflight: bool = False) -> dict[str, Any] | None:
    """Return the estimated memory and speed of a resolved run, for run.json; None for a model without an estimate.

    Raise ConfigError if the run cannot fit, with settings that would; with `no_preflight`, only warn.
    """
    if architecture_of(cfg.model).activations is None:
        return None
    memory, capacity = estimate(cfg, mesh.shape), device_capacity(mesh)
    need, has = _size(memory.total), _size(capacity)
    if memory.total > capacity:
        remedies = ", or ".join(map(str, smaller(cfg, mesh.shape, capacity)))
        advice = f"what fits: {remedies}" if remedies else (
            "no layout of it fits; use a smaller --model-size or --seq-len, --weights-dtype bfloat16, or more devices "
            "(nash-mhc plan says how many)"
        )  # fmt: skip
        if memory.total * _TRUSTED <= capacity:
            log.warning(f"tight: this run needs about {need} per device, but only {has} is available; {advice}")
        elif no_preflight:
            log.warning(
                f"this run needs about {need} per device, but only {has} is available; continuing despite the memory estimate "
                "(--no-preflight)"
            )
        else:
            raise ConfigError(
                f"this run needs about {need} per device ({largest(memory)}), but only {has} is available; {advice}, or try "
                "anyway with --no-preflight"
            )
    expected: dict[str, Any] = {
        "gib": memory.total / _GIB,
        "gib_by_category": {field.name: getattr(memory, field.name) / _GIB for field in dataclasses.fields(memory)},
        "room_gib": capacity / _GIB if math.isfinite(capacity) else None,
    }
    if (chip := by_kind(mesh.devices.flat[0].device_kind)) is not None:
        fast = speed(cfg, mesh.shape, Machine(chip.name, chip, mesh.size), memory)
        expected |= {"step_ms": fast.times.step * 1e3, "tokens_per_s": fast.tokens_per_s, "mfu": fast.mfu, "error": ERROR}
    return expected


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"


def largest(memory: Memory) -> str:
    """Name the three largest parts of the memory and the settings that they depend on."""
    sizes = sorted(((getattr(memory, name), name) for name in _CAUSES), reverse=True)[:_SHOWN]
    return "; ".join(f"{name} {_size(size)}: set by {_CAUSES[name]}" for size, name in sizes)


def smaller(cfg: RunConfig, mesh: Mapping[str, int], capacity: float) -> list[Remedy]:
    """Return at most three layouts that fit, each of a different kind; the smallest change comes first."""
    if set(mesh) != {"data", "fsdp", "tp"}:
        return []  # `layouts` knows no other axes
    devices, remats = math.prod(mesh.values()), smaller_remats(cfg.train)
    found: list[tuple[int, float, tuple[str, ...], Remedy]] = []
    now = layout_settings(mesh, cfg.data, cfg.train)
    for other, its_mesh in layouts(cfg, devices, remats=remats):
        its_settings = layout_settings(its_mesh, other.data, other.train)
        changed = {key: value for key, value in its_settings.items() if now[key] != value}
        size = estimate(other, its_mesh).total
        if changed and size <= SAFE * capacity:
            kinds = tuple(sorted({_KINDS.get(key, "mesh") for key in changed}))
            # Of one kind, the remedy that needs the most memory changes the least.
            found.append((sum(_COST[kind] for kind in kinds), -size, kinds, Remedy(" ".join(as_flags(changed)), size)))
    best: dict[tuple[str, ...], Remedy] = {}
    for _, _, kinds, remedy in sorted(found, key=lambda each: each[:2]):
        best.setdefault(kinds, remedy)
    return list(best.values())[:_SHOWN]


def out_of_memory(cfg: RunConfig, mesh: Mesh, error: Exception, resume: str) -> ConfigError:
    """Return JAX's error with the largest parts of the memory and flags that need less; `resume` continues the run."""
    message = re.split(r" with allocator| \[|\n", str(error).partition("RESOURCE_EXHAUSTED")[2].lstrip(": "))
    cause = message[0].rstrip(".") or "out of memory"
    estimated, advice = "", "a smaller --batch-size with more --grad-accum, --remat full, or more devices along --mesh-fsdp"
    if architecture_of(cfg.model).activations is not None:
        memory = estimate(cfg, mesh.shape)
        estimated = f"; the estimate was {_size(memory.total)} per device ({largest(memory)})"
        # The estimate was too low, or known to exceed the capacity: the remedies must be well below both.
        remedies = smaller(cfg, mesh.shape, _TRUSTED * min(memory.total, device_capacity(mesh)))
        advice = ", or ".join(map(str, remedies)) or "a smaller --model-size, or more devices along --mesh-fsdp"
    return ConfigError(
        f"the devices ran out of memory ({cause}){estimated}; try {advice}; with those flags, resume from the last checkpoint: "
        f"{resume}"
    )


def fastest_here(cfg: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return the run with the mesh, remat and microbatches that are estimated to be the fastest here (`--mesh-auto`).

    Settings that the user has `given` stay as they are. Raise ConfigError if nothing fits.
    """
    all_devices: dict[str, Any] = {axis: -1 if axis == "data" else 1 for axis in cfg.mesh.axes}
    mesh = make_mesh(dataclasses.replace(cfg.mesh, **all_devices))
    device = mesh.devices.flat[0]
    chip: Chip | None = this_cpu().chip if device.platform == "cpu" else by_kind(device.device_kind)
    if chip is None:
        raise ConfigError(f"--mesh-auto: unknown chip {device.device_kind}; give --mesh-data, --mesh-fsdp and --mesh-tp")
    machine = Machine(chip.name, dataclasses.replace(chip, usable_gib=device_capacity(mesh) / _GIB), mesh.size)
    enough = dataclasses.replace(cfg, **sequence_per_chip(cfg.data, cfg.train, machine.chips, given))
    found = candidates(enough, machine, given)
    if not found:
        raise ConfigError(f"--mesh-auto: no mesh of {mesh.size} devices divides this model and its batch; change --batch-size")
    if found[0].fits == "no":
        least = min(each.memory.total for each in found)
        raise ConfigError(
            f"--mesh-auto: nothing fits: the smallest layout needs {_size(least)} per device, but only "
            f"{_size(machine.chip.memory)} is available; use a smaller --model-size or --batch-size, or more devices "
            "(nash-mhc plan says how many)"
        )
    best = found[0]
    flags = " ".join(as_flags(best.settings))
    if jax.process_index() == 0:
        log.info(f"--mesh-auto: {flags} ({_size(best.memory.total)} per device, best of {len(found)} layouts)")
    chosen = {name: getattr(best.cfg.train, name) for name in ("grad_accum", "remat", "remat_keep")}
    return dataclasses.replace(cfg, mesh=best.cfg.mesh, data=best.cfg.data, train=dataclasses.replace(cfg.train, **chosen))
