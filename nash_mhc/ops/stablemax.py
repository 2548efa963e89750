"""Stablemax: a softmax that grows by lines and not by powers, so that a logit need not run away to be sure."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def log_stablemax(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """log of s(x) / sum s(x), with s(x) = x + 1 from 0 on and 1 / (1 - x) below, in float32.

    As log s = +-log1p(+-x): s itself would lose what is far below 0.
    """
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Both sides of `where` are finite everywhere, and so are their gradients.
    log_s = jnp.where(x >= 0, jnp.log1p(jnp.maximum(x, 0.0)), -jnp.log1p(jnp.maximum(-x, 0.0)))
    return log_s - jnp.log(jnp.sum(jnp.exp(log_s), axis=-1, keepdims=True))
