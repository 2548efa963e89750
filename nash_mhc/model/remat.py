"""The activations that remat saves for the backward pass: `--remat` and `--remat-keep`."""

from __future__ import annotations

from typing import Any

import jax

from nash_mhc.model.mixers.attention import OUTPUT, QKV
from nash_mhc.model.mixers.multiscale import MIXED
from nash_mhc.model.parts import DOWN, UP
from nash_mhc.model.residual import COEFFICIENTS, READ
from nash_mhc.ops.attention_io import ATTENDED
from nash_mhc.parallel.sharding import is_gathered_weight

# Names in `config.schema.KEEPABLE`, and the `checkpoint_name` of each in the code.
MARKS = {
    "qkv": QKV,
    "attention": ATTENDED,
    "mixed": MIXED,
    "output": OUTPUT,
    "ffn-up": UP,
    "ffn-down": DOWN,
    "read": READ,
    "coefficients": COEFFICIENTS,
}
# `dots` saves matmul results except the widest, and what costs a pass over all streams. It does not save `mixed`:
# attention is recomputed anyway, and the game is one short pass.
_STREAM_NAMES = ("coefficients", "read")
DOTS = frozenset({"qkv", "output", "ffn-down", *_STREAM_NAMES})


def kept_names(remat: str) -> frozenset[str]:
    """Return the names saved by a policy such as `dots+ffn-up`. (`none` also saves everything without a name.)"""
    base, _, more = remat.partition("+")
    named = frozenset(more.split(",")) if more else frozenset()
    return {"none": frozenset(MARKS), "dots": DOTS, "full": frozenset[str]()}[base] | named


def remat_policy(remat: str, *, float8: bool = False) -> Any:
    """Return a policy for `jax.checkpoint`. None saves gathered weights, which would undo the savings of fsdp.

    JAX's policies do not recognize float8 products, so with float8 `dots` saves by name only.
    """
    policies = jax.checkpoint_policies
    base, _, more = remat.partition("+")
    if base == "none":
        return lambda primitive, *_, **params: not is_gathered_weight(primitive, params)
    by_name = () if base == "full" else DOTS if float8 else _STREAM_NAMES
    marks = [MARKS[name] for name in (*by_name, *(more.split(",") if more else ()))]
    named = policies.save_only_these_names(*marks)
    if base == "dots" and not float8:
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
    return named
