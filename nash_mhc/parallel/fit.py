"""Does this model and this batch divide over this mesh? Asked before anything compiles: inside jit, an axis that
does not divide would be replicated in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nash_mhc.config.schema import ConfigError, RunConfig, nearest_multiple
from nash_mhc.parallel.sharding import RULES


def check_fit(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> None:
    """ConfigError for the first size that its mesh axes do not divide, with the nearest settings that work."""
    model, data = cfg.model, cfg.data
    sizes = [  # logical axis, its length in this run, the flag that sets it
        ("batch", data.batch_size, "--batch-size"),
        ("time_split", data.seq_len, "--seq-len"),
        ("embed", model.width, "--model-width"),
        ("heads", model.heads, "--model-heads"),
        ("kv_heads", model.kv_heads, "--model-kv-heads"),
        ("ffn", model.ffn, "--model-ffn"),
        ("vocab", model.padded_vocab, "--model-vocab-size"),
    ]
    for axis, size, flag in sizes:
        ways = math.prod(mesh_shape[a] for a in RULES[axis])
        if size % ways:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            over = " x ".join(RULES[axis])
            best = min(divisors, key=lambda d: abs(d - ways))
            raise ConfigError(
                f"{flag} {size} cannot be split over {over} = {ways}; the nearest that works is {flag} "
                f"{nearest_multiple(size, ways)}, or a mesh with {over} = {best}"
            )
