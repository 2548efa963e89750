"""How likely a model holds given tokens, token by token, without ever holding [B, T, V] logits in float32.

Like `xent.py`, which gives sums for training: chunks along T, and columns that may be split over mesh axes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.xent import chunk_length


class TokenScores(NamedTuple):
    log_prob_BT: Float[Array, "B T"]  # nats, float32
    is_best_BT: Bool[Array, "B T"]  # whether greedy decoding takes this token: of equals, the first


def log_probs_reference(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], *, vocab_size: int
) -> TokenScores:
    """The plain form: all logits at once."""
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    log_probs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    found_BT = jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return TokenScores(found_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT)


def log_probs(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    vocab_size: int,
    vocab_axes: tuple[str, ...] = (),
) -> TokenScores:
    """As `log_probs_reference`, in chunks. Inside shard_map, w_VD is this device's rows of the table."""
    B, T, _ = x_BTD.shape
    V = w_VD.shape[0]
    c = chunk_length(B, T, V)
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    over_shards = lambda reduce, a: reduce(a, vocab_axes) if vocab_axes else a

    def chunk(inputs: tuple[Array, Array]) -> TokenScores:
        x_BcD, t_Bc = inputs
        logits_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w_VD, preferred_element_type=jnp.float32)
        logits_BcV = jnp.where(column_11V < vocab_size, logits_BcV, -jnp.inf)  # padding columns take no probability
        own_Bc = jnp.max(logits_BcV, axis=-1)
        top_Bc = over_shards(lax.pmax, own_Bc)
        sum_Bc = over_shards(lax.psum, jnp.sum(jnp.exp(logits_BcV - top_Bc[..., None]), axis=-1))
        target_Bc = over_shards(lax.psum, jnp.sum(jnp.where(column_11V == t_Bc[..., None], logits_BcV, 0.0), axis=-1))
        # Of several devices with the same best logit, the one with the lowest column.
        best_Bc = jnp.where(own_Bc == top_Bc, first + jnp.argmax(logits_BcV, axis=-1), jnp.iinfo(jnp.int32).max)
        best_Bc = over_shards(lax.pmin, best_Bc)
        return TokenScores(target_Bc - top_Bc - jnp.log(sum_Bc), best_Bc == t_Bc)

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)
    scores = lax.map(chunk, (split(x_BTD), split(targets_BT)))
    return jax.tree.map(lambda a_ABc: jnp.moveaxis(a_ABc, 0, 1).reshape(B, T), scores)
