"""Does this model and this batch divide over this mesh? Asked before anything compiles: inside jit, an axis that
does not divide would be replicated in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nash_mhc.config.schema import ArchitectureConfig, ConfigError, Length, RunConfig, nearest_multiple
from nash_mhc.parallel.sharding import RULES


def check_fit(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> None:
    """ConfigError for the first size that its mesh axes do not divide, with the nearest settings that work."""
    model, data = cfg.model, cfg.data
    of_data = [Length("batch", data.batch_size, "--batch-size"), Length("time_split", data.seq_len, "--seq-len")]
    sizes = [*of_data, *model.lengths()]
    for axis, size, flag in sizes:
        ways = math.prod(mesh_shape[a] for a in RULES[axis])
        if size % ways:
            over = " x ".join(RULES[axis])
            # A mesh must suit everything else that lies on the same axes, too.
            others = [n for a, n, _ in sizes if RULES[a] == RULES[axis]]
            if axis == "embed":
                others.append(data.batch_size // math.prod(mesh_shape[a] for a in RULES["batch"] if a not in RULES["embed"]))
            best = min((d for d in range(1, ways) if not any(n % d for n in others)), key=lambda d: abs(d - ways))
            raise ConfigError(
                f"{flag} {size} cannot be split over {over} = {ways}; the nearest that works is "
                f"{_nearest(model, axis, size, flag, ways)}, or a mesh with {over} = {best}"
            )


def _nearest(model: ArchitectureConfig, axis: str, size: int, flag: str, ways: int) -> str:
    """Flags with which this size divides and the model is still a valid one."""
    if axis == "vocab":  # upwards, so that the tokenizer still fits; the model pads it to a multiple of 128
        unit = math.lcm(128, ways)
        return f"{flag} {-(-size // unit) * unit}"
    if axis not in ("heads", "kv_heads"):
        unit = math.lcm(ways, model.alignment) if axis == "time_split" else ways  # rows hold whole coarse blocks
        return f"{flag} {nearest_multiple(size, unit)}"
    of = {length.axis: length.size for length in model.lengths()}
    heads = nearest_multiple(of["heads"], ways)
    shared = [k for k in range(ways, heads + 1, ways) if heads % k == 0]
    kv_heads = f"--model-kv-heads {min(shared, key=lambda k: abs(k - of['kv_heads']))}"
    return f"{flag} {heads} {kv_heads}" if axis == "heads" else kv_heads
