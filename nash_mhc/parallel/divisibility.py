"""Does this model and this batch divide over this mesh? Asked before anything compiles: inside jit, an axis that
does not divide would be replicated in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import jax

from nash_mhc.config.key_names import keys
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, Length, RunConfig, nearest_multiple
from nash_mhc.parallel.mesh import as_flags, nearest_shape
from nash_mhc.parallel.sharding import RULES


def misfits(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> list[Length]:
    """Every size that its mesh axes do not divide."""
    data = cfg.data
    of_data = [Length("batch", data.batch_size, "--batch-size"), Length("time_split", data.seq_len, "--seq-len")]
    return [length for length in (*of_data, *cfg.model.lengths()) if length.size % _ways(length, mesh_shape)]


def check_fit(cfg: RunConfig, mesh_shape: Mapping[str, int], *, model_is_given: bool = False) -> None:
    """ConfigError that names every size that its mesh axes do not divide, with settings that work.

    `model_is_given`: no flag changes this model, so only another mesh or batch is proposed.
    """
    if not (found := misfits(cfg, mesh_shape)):
        return
    names: dict[str, list[str]] = {}
    for length in found:
        over = f"{' x '.join(RULES[length.axis])} = {_ways(length, mesh_shape)}"
        names.setdefault(over, []).append(f"{length.flag} {length.size}")
    (over, first), *others = ((over, _listed(sizes)) for over, sizes in names.items())
    rest = "".join(f", {sizes} over {over}" for over, sizes in others)
    remedies = []
    smaller = nearest_shape(
        mesh_shape,
        math.prod(mesh_shape.values()),
        lambda shape: not misfits(cfg, shape),
        all_devices=jax.distributed.is_initialized(),
    )
    if smaller is not None:
        remedies.append(as_flags(smaller, math.prod(mesh_shape.values())))
    if not model_is_given and (resized := _resized(cfg, found, mesh_shape)) is not None:
        remedies.append(resized)
    if not remedies:
        remedies.append("another size: no mesh of all devices divides them")
    raise ConfigError(f"{first} cannot be split over {over}{rest}; try {', or '.join(remedies)}")


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`"""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def _ways(length: Length, mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in RULES[length.axis])


def _resized(cfg: RunConfig, found: list[Length], mesh_shape: Mapping[str, int]) -> str | None:
    """Flags with which all sizes divide and the configuration is still a valid one; None where there are none."""
    by_flag = {key.flag: key for key in keys(cfg.model_kind).values()}
    values, wanted = cfg.to_dict(), dict[str, int]()
    if cfg.train.init_from is not None or cfg.train.resume_from is not None:
        found_in_data = [length for length in found if length.flag in ("--batch-size", "--seq-len")]
        if found_in_data != found:
            return None  # the weights that the run starts from have these sizes
    for length in found:
        if length.flag not in by_flag or (length.axis == "time_split" and Path(cfg.data.dataset).is_dir()):
            return None  # rows of a prepared folder have the length that they have
        wanted |= _nearest(cfg.model, length, _ways(length, mesh_shape), by_flag[length.flag].of(values))
    for flag, size in wanted.items():
        section, _, name = by_flag[flag].path.rpartition(".")
        values[section][name] = size
    try:
        fits = not misfits(RunConfig.from_dict(values), mesh_shape)
    except ConfigError:
        return None
    return " ".join(f"{flag} {size}" for flag, size in wanted.items()) if fits else None


def _nearest(model: ArchitectureConfig, length: Length, ways: int, value: int) -> dict[str, int]:
    """Flags with which this size divides; `value` is what its own flag is set to."""
    axis, size, flag = length
    if axis == "vocab":  # upwards, so that the tokenizer still fits; the model pads it to a multiple of 128
        unit = math.lcm(128, ways)
        return {flag: -(-size // unit) * unit}
    of = {other.axis: other.size for other in model.lengths()}
    if axis not in ("heads", "kv_heads") or "kv_heads" not in of:
        # Rows hold whole coarse blocks; a size may be a share of what its flag sets.
        unit = math.lcm(ways, model.alignment) if axis == "time_split" else ways * (value // size)
        return {flag: nearest_multiple(value, unit)}
    heads = nearest_multiple(of["heads"], ways)
    shared = [k for k in range(ways, heads + 1, ways) if heads % k == 0]
    kv_heads = {"--model-kv-heads": min(shared, key=lambda k: abs(k - of["kv_heads"]))}
    return {flag: heads} | kv_heads if axis == "heads" else kv_heads
