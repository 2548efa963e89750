"""Every sensible way to run a model on a machine, each with its memory, its speed and its cost, best first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nash_mhc.config.schema import PrecisionConfig, RunConfig
from nash_mhc.estimate.memory import Memory, estimate
from nash_mhc.estimate.roofline import Speed, speed
from nash_mhc.estimate.teachers import all_misfits, teachers_of
from nash_mhc.model.device_settings import for_platform
from nash_mhc.runtime.chips import Machine, next_larger

# Of a chip's memory: what an estimate may come to and still be believed, by its error against the compiler.
SAFE = 0.9
# What is computed again, and what is kept by name beside it: from the fastest to the smallest.
_REMATS: tuple[tuple[str, str | None], ...] = (("none", None), ("dots", "ffn-up"), ("dots", None), ("full", None))
# How weights and moments are kept, where there is too little room for float32: what costs least first.
_SMALLER = (PrecisionConfig(moments_dtype="bfloat16"), PrecisionConfig(weights_dtype="bfloat16", moments_dtype="bfloat16"))
_MOST_PARTS = 64  # of a batch: more forward passes a step than this are not looked at
_MOST_TP = 16  # what splits a layer's every matrix stays within the fast links


@dataclass(frozen=True)
class Candidate:
    cfg: RunConfig  # resolved for the chip
    mesh: dict[str, int]
    memory: Memory
    speed: Speed
    room: float  # bytes of a chip

    @property
    def fits(self) -> str:
        """yes, tight or no."""
        share = self.memory.total / self.room
        return "yes" if share <= SAFE else "tight" if share <= 1 else "no"

    @property
    def settings(self) -> dict[str, Any]:
        """What `train` has to be told besides what the user has given."""
        kept = {key: value for key, value in precision_settings(self.cfg).items() if value != "float32"}
        return (
            {f"mesh.{axis}": size for axis, size in self.mesh.items()}
            | {
                "data.batch_size": self.cfg.data.batch_size,
                "train.grad_accum": self.cfg.train.grad_accum,
                "train.remat": self.cfg.train.remat,
            }
            | ({"train.remat_keep": self.cfg.train.remat_keep} if self.cfg.train.remat_keep else {})
            | kept
        )

    @property
    def is_whole(self) -> bool:
        """Whether everything is kept in float32."""
        return set(precision_settings(self.cfg).values()) == {"float32"}


def precision_settings(cfg: RunConfig) -> dict[str, str]:
    return {f"precision.{name}": value for name, value in dataclasses.asdict(cfg.precision).items()}


def smaller_precisions(cfg: RunConfig) -> list[RunConfig]:
    """The same run with weights or moments in half of the memory, where that can be."""
    if cfg.optim.optimizer != "adamw" or cfg.lora.rank or cfg.precision != PrecisionConfig():
        return []
    return [dataclasses.replace(cfg, precision=precision) for precision in _SMALLER]


def _meshes(chips: int, slices: int) -> Iterator[dict[str, int]]:
    """data x fsdp x tp; where there are several slices, data crosses them and nothing else does."""
    for tp in (t for t in range(1, min(chips, _MOST_TP) + 1) if chips % t == 0):
        for fsdp in (f for f in range(1, chips // tp + 1) if chips // tp % f == 0):
            data = chips // tp // fsdp
            if data % slices == 0:
                yield {"data": data, "fsdp": fsdp, "tp": tp}


def _parts(rows: int, ways: int) -> Iterator[tuple[int, int]]:
    """(rows of a forward pass, forward passes) that make these rows a step, where each device has whole rows."""
    for parts in range(1, _MOST_PARTS + 1):
        if rows % parts == 0 and rows // parts % ways == 0:
            yield rows // parts, parts


def smaller_remats(cfg: RunConfig) -> list[tuple[str, str | None]]:
    """The run's own, and those that keep less."""
    own, by_size = (cfg.train.remat, cfg.train.remat_keep), [remat for remat, _ in _REMATS]
    if own in _REMATS:
        return list(_REMATS[_REMATS.index(own) :])
    without = _REMATS[by_size.index(own[0]) :]
    return [own, *(each for each in without if each[1] is None)]


def ways(
    cfg: RunConfig, chips: int, slices: int = 1, remats: Sequence[tuple[str, str | None]] = _REMATS
) -> Iterator[tuple[RunConfig, dict[str, int]]]:
    """(configuration, mesh): all that divide, of as many rows a step."""
    rows = cfg.data.batch_size * cfg.train.grad_accum
    for mesh in _meshes(chips, slices):
        axes: dict[str, Any] = {**mesh}
        for batch, parts in _parts(rows, mesh["data"] * mesh["fsdp"]):
            for remat, keep in remats:
                one = dataclasses.replace(
                    cfg,
                    data=dataclasses.replace(cfg.data, batch_size=batch),
                    mesh=dataclasses.replace(cfg.mesh, **axes),
                    train=dataclasses.replace(cfg.train, grad_accum=parts, remat=remat, remat_keep=keep),
                )
                if not all_misfits(one, mesh):
                    yield one, mesh


def candidates(cfg: RunConfig, machine: Machine, given: Mapping[str, Any], *, also_smaller: bool = False) -> list[Candidate]:
    """Those that divide, best first: what fits before what does not, then by speed, then by room that is left.

    `given` are the user's own settings, which stay as they are: a mesh, a remat, parts of a batch. `also_smaller`:
    where nothing fits easily, with weights and moments in bfloat16 as well, after what fits without.
    """
    teachers_of(cfg)  # a folder that holds no model is an error, and not a mesh that does not divide
    found = _divided(cfg, machine, given)
    if also_smaller and not any(key.startswith("precision.") for key in given) and all(c.fits != "yes" for c in found):
        for smaller in smaller_precisions(cfg):
            found += _divided(smaller, machine, given)
    order = {"yes": 0, "tight": 1, "no": 2}
    # What fits in float32, even tightly, goes before what fits in half of the bits.
    rank = lambda c: (c.fits == "no", not c.is_whole and c.fits != "no", order[c.fits])
    best = lambda c: (*rank(c), -c.speed.tokens_a_second if c.fits != "no" else c.memory.total, c.memory.total)
    return sorted(found, key=best)


def _divided(cfg: RunConfig, machine: Machine, given: Mapping[str, Any]) -> list[Candidate]:
    wanted = {axis: given[f"mesh.{axis}"] for axis in cfg.mesh.axes if given.get(f"mesh.{axis}", -1) != -1}
    is_set = "train.remat" in given or "train.remat_keep" in given
    remats = [(cfg.train.remat, cfg.train.remat_keep)] if is_set else _REMATS
    return [
        _candidate(for_platform(one, machine.chip.platform), mesh, machine)
        for one, mesh in ways(cfg, machine.chips, machine.slices, remats)
        if all(mesh[axis] == size for axis, size in wanted.items())
        and ("train.grad_accum" not in given or one.train.grad_accum == cfg.train.grad_accum)
    ]


def _candidate(cfg: RunConfig, mesh: dict[str, int], machine: Machine) -> Candidate:
    memory = estimate(cfg, mesh)
    return Candidate(cfg, mesh, memory, speed(cfg, mesh, machine, memory), machine.chip.memory)


def rows_for(cfg: RunConfig, machine: Machine, given: Mapping[str, Any]) -> RunConfig:
    """With a row a chip and step at least, unless the user has said how many: a preset's few cannot be split more."""
    rows = cfg.data.batch_size * cfg.train.grad_accum
    if {"data.batch_size", "train.grad_accum"} & set(given) or rows % machine.chips == 0:
        return cfg
    more = -(-rows // machine.chips) * machine.chips
    train = dataclasses.replace(cfg.train, grad_accum=1)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=more), train=train)


def nearest_that_fit(cfg: RunConfig, machine: Machine, given: Mapping[str, Any]) -> list[tuple[str, Candidate]]:
    """(what is changed, the best of it): the smallest changes with which it fits, for when nothing does."""
    changes: list[tuple[str, RunConfig, Machine, Mapping[str, Any]]] = []
    without = {key: value for key, value in given.items() if not key.startswith(("train.remat", "train.grad_accum", "mesh."))}
    changes.append(("another mesh, remat or number of parts", cfg, machine, without))
    for rows in (r for r in range(cfg.data.batch_size * cfg.train.grad_accum - 1, 0, -1) if r % machine.chips == 0):
        fewer = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=rows))
        changes.append((f"--batch-size {rows}", fewer, machine, without))
    T = cfg.data.seq_len // 2
    while T >= 1024 and T % cfg.model.alignment == 0:
        shorter = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, seq_len=T))
        changes.append((f"--seq-len {T}", shorter, machine, without))
        T //= 2
    for larger in next_larger(machine):
        changes.append((f"--chip {larger.name}", rows_for(cfg, larger, given), larger, without))
    found: list[tuple[str, Candidate]] = []
    for what, changed, where, kept in changes:
        if what.split()[0] in {name.split()[0] for name, _ in found}:
            continue  # a smaller change of this kind does already
        best = candidates(changed, where, kept, also_smaller=True)[:1]
        if best and best[0].fits == "yes":
            found.append((what, best[0]))
    return found
