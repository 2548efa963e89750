"""Ways to run a model on a machine: every sensible mesh, batch split and remat, with its memory, speed and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nash_mhc.config.schema import DataConfig, PrecisionConfig, RunConfig, TrainConfig
from nash_mhc.estimate.memory import Memory, estimate
from nash_mhc.estimate.roofline import Speed, speed
from nash_mhc.model.architectures import architecture_of, for_platform
from nash_mhc.objectives.registry import feed_of
from nash_mhc.parallel.mesh import indivisible_sizes
from nash_mhc.runtime.chips import Machine, next_larger

SAFE = 0.9  # share of a chip's memory that an estimate may reach, given its error against the compiler
Remat = tuple[str, str | None]  # --remat, --remat-keep
_REMATS: tuple[Remat, ...] = (("none", None), ("dots", "ffn-up"), ("dots", None), ("full", None))  # fastest first
# For weights and moments that do not fit in float32: the precision that costs least first.
_SMALLER = (PrecisionConfig(moments_dtype="bfloat16"), PrecisionConfig(weights_dtype="bfloat16", moments_dtype="bfloat16"))
_MAX_ACCUM = 64  # microbatches per step
_MAX_TP = 16  # tp stays within the fast links


@dataclass(frozen=True)
class Candidate:
    cfg: RunConfig  # resolved for the chip
    mesh: dict[str, int]
    memory: Memory
    speed: Speed
    capacity: float  # bytes per chip

    @property
    def fits(self) -> str:
        """Return yes, tight or no."""
        share = self.memory.total / self.capacity
        return "yes" if share <= SAFE else "tight" if share <= 1 else "no"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings to add to the user's own."""
        layout, precision = layout_settings(self.mesh, self.cfg.data, self.cfg.train), self.cfg.precision
        dtypes = {"weights_dtype": precision.weights_dtype, "moments_dtype": precision.moments_dtype}
        lower = {f"precision.{name}": dtype for name, dtype in dtypes.items() if dtype != "float32"}
        return {key: value for key, value in layout.items() if value is not None} | lower

    @property
    def is_float32(self) -> bool:
        """Whether weights and moments are float32."""
        return self.cfg.precision == PrecisionConfig()


def layout_settings(mesh: Mapping[str, int], data: DataConfig, train: TrainConfig) -> dict[str, Any]:
    """Return the settings in which layouts differ."""
    return {f"mesh.{axis}": size for axis, size in mesh.items()} | {
        "data.batch_size": data.batch_size,
        "train.grad_accum": train.grad_accum,
        "train.remat": train.remat,
        "train.remat_keep": train.remat_keep,
    }


def smaller_remats(train: TrainConfig) -> list[Remat]:
    """Return the run's own remat, and those that save less."""
    own: Remat = (train.remat, train.remat_keep)
    if own in _REMATS:
        return list(_REMATS[_REMATS.index(own) :])
    policies = [remat for remat, _ in _REMATS]
    return [own, *(each for each in _REMATS[policies.index(train.remat) :] if each[1] is None)]


def fastest_remat(cfg: RunConfig, mesh: Mapping[str, int], capacity: float) -> Remat:
    """Return the remat for `--remat auto`: the fastest whose estimate fits into `capacity` bytes, else the smallest."""
    if architecture_of(cfg.model).activations is None:  # there is no estimate
        return _REMATS[0]
    return next((each for each in _REMATS if estimate(with_remat(cfg, each), mesh).total <= SAFE * capacity), _REMATS[-1])


def with_remat(cfg: RunConfig, remat: Remat) -> RunConfig:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, remat=remat[0], remat_keep=remat[1]))


def _meshes(chips: int, slices: int) -> Iterator[dict[str, int]]:
    """Yield data x fsdp x tp; only data crosses slices."""
    for tp in (t for t in range(1, min(chips, _MAX_TP) + 1) if chips % t == 0):
        for fsdp in (f for f in range(1, chips // tp + 1) if chips // tp % f == 0):
            data = chips // tp // fsdp
            if data % slices == 0:
                yield {"data": data, "fsdp": fsdp, "tp": tp}


def _batch_splits(sequences: int, shards: int) -> Iterator[tuple[int, int]]:
    """Yield (batch size, microbatches) with this many sequences per step, and as many on each shard."""
    for accum in range(1, _MAX_ACCUM + 1):
        if sequences % accum == 0 and sequences // accum % shards == 0:
            yield sequences // accum, accum


def layouts(
    cfg: RunConfig, chips: int, slices: int = 1, remats: Sequence[Remat] = _REMATS
) -> Iterator[tuple[RunConfig, dict[str, int]]]:
    """Yield (configuration, mesh): every mesh, batch split and remat that divides, with as many sequences per step.

    The mesh divides frozen models that read every batch, too; raise ConfigError for a directory that holds none.
    """
    models = [cfg.model, *feed_of(cfg.objective.name).models(cfg)]
    sequences = cfg.data.batch_size * cfg.train.grad_accum
    for mesh in _meshes(chips, slices):
        axes: dict[str, Any] = {**mesh}
        for batch, accum in _batch_splits(sequences, mesh["data"] * mesh["fsdp"]):
            data = dataclasses.replace(cfg.data, batch_size=batch)
            if any(indivisible_sizes(data, model, mesh) for model in models):
                continue
            for remat, keep in remats:
                train = dataclasses.replace(cfg.train, grad_accum=accum, remat=remat, remat_keep=keep)
                yield dataclasses.replace(cfg, data=data, mesh=dataclasses.replace(cfg.mesh, **axes), train=train), mesh


def candidates(cfg: RunConfig, machine: Machine, given: Mapping[str, Any], *, also_smaller: bool = False) -> list[Candidate]:
    """Return all layouts that divide, best first: those that fit, then by speed, then by free memory.

    The settings that the user has `given` stay: a mesh, remat or gradient accumulation. With `also_smaller`, if no
    layout has `fits` = yes, also try bfloat16 weights and moments; they come after float32 layouts that fit.
    """
    axes = {axis: given[f"mesh.{axis}"] for axis in cfg.mesh.axes if given.get(f"mesh.{axis}", -1) != -1}
    is_set = given.get("train.remat", "auto") != "auto" or "train.remat_keep" in given
    remats = [(cfg.train.remat, cfg.train.remat_keep)] if is_set else _REMATS
    found: list[Candidate] = []

    def add(precision: PrecisionConfig) -> None:
        """Add the layouts that agree with the user's settings."""
        run = dataclasses.replace(cfg, precision=precision)
        for layout, mesh in layouts(run, machine.chips, machine.slices, remats):
            same_accum = "train.grad_accum" not in given or layout.train.grad_accum == cfg.train.grad_accum
            if same_accum and all(mesh[axis] == size for axis, size in axes.items()):
                resolved = for_platform(layout, machine.chip.platform)
                memory = estimate(resolved, mesh)
                found.append(Candidate(resolved, mesh, memory, speed(resolved, mesh, machine, memory), machine.chip.memory))

    add(cfg.precision)
    supported = cfg.optim.optimizer in ("adamw", "normuon") and not cfg.lora.rank
    may_be_lower = supported and cfg.precision == PrecisionConfig() and not any(k.startswith("precision.") for k in given)
    if also_smaller and may_be_lower and all(c.fits != "yes" for c in found):
        for precision in _SMALLER:
            add(precision)
    order = {"yes": 0, "tight": 1, "no": 2}
    # Float32 layouts that fit, even tightly, come before bfloat16 ones.
    rank = lambda c: (c.fits == "no", not c.is_float32 and c.fits != "no", order[c.fits])
    best = lambda c: (*rank(c), -c.speed.tokens_per_s if c.fits != "no" else c.memory.total, c.memory.total)
    return sorted(found, key=best)


def sequence_per_chip(data: DataConfig, train: TrainConfig, chips: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections with at least one sequence per chip and step; {} if not needed, or if the user set the batch."""
    sequences = data.batch_size * train.grad_accum
    if {"data.batch_size", "train.grad_accum"} & set(given) or sequences % chips == 0:
        return {}
    batch_size = -(-sequences // chips) * chips
    return {"data": dataclasses.replace(data, batch_size=batch_size), "train": dataclasses.replace(train, grad_accum=1)}


def larger_that_fits(cfg: RunConfig, machine: Machine, given: Mapping[str, Any]) -> tuple[Machine, Candidate] | None:
    """Return the smallest larger machine with this chip on which the run fits, and the best candidate there."""
    free = {key: value for key, value in given.items() if not key.startswith(("train.remat", "train.grad_accum", "mesh."))}
    for larger in next_larger(machine):
        sections = sequence_per_chip(cfg.data, cfg.train, larger.chips, given)
        best = candidates(dataclasses.replace(cfg, **sections), larger, free, also_smaller=True)[:1]
        if best and best[0].fits == "yes":
            return larger, best[0]
    return None
