"""What the backward pass finds saved, and what it computes again: `--remat`, and `--remat-keep` beside it."""

from __future__ import annotations

from typing import Any

import jax

from nash_mhc.model.attention import OUTPUT, QKV
from nash_mhc.model.multiscale import MIXED
from nash_mhc.model.parts import DOWN, UP
from nash_mhc.model.residual import COEFFICIENTS, READ
from nash_mhc.ops.attend_rows import FOUND
from nash_mhc.parallel.sharding import is_gathered_weight

# The names of `config.schema.KEEPABLE`, and under which one the code marks what is meant (`checkpoint_name`).
MARKS = {
    "qkv": QKV,
    "attention": FOUND,
    "mixed": MIXED,
    "output": OUTPUT,
    "ffn-up": UP,
    "ffn-down": DOWN,
    "read": READ,
    "coefficients": COEFFICIENTS,
}
# What `dots` keeps of these: results of matrix products, but for the widest, and what costs a pass over all streams.
# What the game mixes is not among them: attention is computed again anyway, and the rest of the way is one short pass.
_OF_DOTS = ("coefficients", "read")
DOTS = frozenset({"qkv", "output", "ffn-down", *_OF_DOTS})


def kept_names(remat: str) -> frozenset[str]:
    """Of `dots+ffn-up`, as an Execution has it: all that is kept, by name. `none` keeps everything, named or not."""
    base, _, more = remat.partition("+")
    named = frozenset(more.split(",")) if more else frozenset()
    return {"none": frozenset(MARKS), "dots": DOTS, "full": frozenset[str]()}[base] | named


def remat_policy(remat: str, *, float8: bool = False) -> Any:
    """For `jax.checkpoint`. No policy keeps gathered weights: that would undo fsdp's saving.

    Products in float8 are none that a policy of JAX's knows: of those, `dots` keeps what it has a name for.
    """
    policies = jax.checkpoint_policies
    base, _, more = remat.partition("+")
    if base == "none":
        return lambda primitive, *_, **params: not is_gathered_weight(primitive, params)
    by_name = () if base == "full" else DOTS if float8 else _OF_DOTS
    marks = [MARKS[name] for name in (*by_name, *(more.split(",") if more else ()))]
    named = policies.save_only_these_names(*marks)
    if base == "dots" and not float8:
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
    return named
