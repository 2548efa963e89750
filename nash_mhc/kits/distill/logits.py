"""The teacher's logits at each position: its top-k tokens, random other tokens, and the log-sum-exp over all tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.objectives.vocabulary import HIDDEN_AXES, TABLE_AXES, TOKEN_AXES, gather
from nash_mhc.ops.xent import chunk_length
from nash_mhc.parallel.sharding import mesh_axis, on_shards


class TeacherLogits(NamedTuple):
    """The teacher's logits that the loss uses; K tokens per position."""

    ids: Int[Array, "*A B T K"]  # the top-k tokens, largest logit first, then random other tokens
    logits: Float[Array, "*A B T K"]
    lse: Float[Array, "*A B T"]  # log-sum-exp of all logits divided by the temperature
    layers: Float[Array, "*A L B T D"] | None = None  # outputs of the layers, for --distill-layers


AXES: Any = TeacherLogits((*TOKEN_AXES, "candidates"), (*TOKEN_AXES, "candidates"), TOKEN_AXES)  # type: ignore[arg-type]


def chunk_logits(x_BcD: Array, w_VD: Array, is_token_11V: Array) -> Array:
    """Return the logits of a chunk; padding columns get probability 0."""
    z_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w_VD, preferred_element_type=jnp.float32)
    return jnp.where(is_token_11V, z_BcV, -jnp.inf)


def local_columns(ids: Array, first: Array | int, count: int) -> tuple[Array, Array]:
    """Return the columns of these ids in this device's shard of the vocabulary (0 elsewhere), and which are in it."""
    columns = ids - first
    is_local = (columns >= 0) & (columns < count)
    return jnp.where(is_local, columns, 0), is_local


def _random_numbers(tokens_BT: Int[Array, "B T"], count: int, below: int) -> Int[Array, "B T R"]:
    """Draw numbers seeded by each sequence's tokens, so they depend neither on the batch nor on the mesh."""
    T = tokens_BT.shape[1]
    factors_T = jnp.arange(1, T + 1, dtype=jnp.uint32) * jnp.uint32(2654435761)
    seeds_B = jnp.sum(tokens_BT.astype(jnp.uint32) * factors_T[None], axis=1, dtype=jnp.uint32)
    return jax.vmap(lambda seed: jax.random.randint(jax.random.key(seed), (T, count), 0, below))(seeds_B)


def other_tokens(ids_BTK: Int[Array, "B T K"], numbers_BTR: Int[Array, "B T R"]) -> Int[Array, "B T R"]:
    """Return the n-th tokens outside of the top-k, for each number n."""
    K = ids_BTK.shape[-1]
    # The n-th remaining token is n plus the number of top-k tokens before it.
    before_BTK = jnp.sort(ids_BTK, axis=-1) - jnp.arange(K)[None, None]
    find = lambda before_K, numbers_R: numbers_R + jnp.searchsorted(before_K, numbers_R, side="right")
    return jax.vmap(jax.vmap(find))(before_BTK, numbers_BTR).astype(ids_BTK.dtype)


def teacher_logits(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    tokens_BT: Int[Array, "B T"],
    *,
    vocab_size: int,
    k: int,
    vocabulary: int | None = None,
    random: int = 0,
    temperature: float = 1.0,
    vocab_axes: tuple[str, ...] = (),
) -> TeacherLogits:
    """Return the `k` largest logits, those of `random` other tokens, and the log-sum-exp, chunk by chunk along T.

    vocabulary: columns that may be in the top-k (None: all), where the table has more columns than the tokenizer has
    tokens. The log-sum-exp is over all `vocab_size` columns, as the student's. tokens_BT: seeds the random tokens.
    """
    B, T, _ = x_BTD.shape
    V, c = w_VD.shape[0], chunk_length(B, T, w_VD.shape[0])
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    numbers_BTR = _random_numbers(tokens_BT, random, vocab_size - k) if random else jnp.zeros((B, T, 0), jnp.int32)

    def chunk(_: None, inputs: tuple[Array, Array]) -> tuple[None, TeacherLogits]:
        x_BcD, numbers_BcR = inputs
        z_BcV = chunk_logits(x_BcD, w_VD, column_11V < vocab_size)
        top_Bc = jnp.max(z_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        sum_Bc = jnp.sum(jnp.exp((z_BcV - top_Bc[..., None]) / temperature), axis=-1)
        allowed_BcV = z_BcV if vocabulary is None else jnp.where(column_11V < vocabulary, z_BcV, -jnp.inf)
        logits, ids = lax.top_k(allowed_BcV, min(k, V))
        ids += first
        if vocab_axes:  # the top-k of all devices are among the top-k of each
            sum_Bc = lax.psum(sum_Bc, vocab_axes)
            logits, ids = (lax.all_gather(a, vocab_axes, axis=2, tiled=True) for a in (logits, ids))
            logits, indices = lax.top_k(logits, k)
            ids = jnp.take_along_axis(ids, indices, axis=-1)
        if random:
            others_BcR = other_tokens(ids, numbers_BcR)
            own_BcR, is_local_BcR = local_columns(others_BcR, first, V)
            found = jnp.where(is_local_BcR, jnp.take_along_axis(z_BcV, own_BcR, axis=-1), 0.0)
            found = lax.psum(found, vocab_axes) if vocab_axes else found
            ids, logits = jnp.concatenate([ids, others_BcR], axis=-1), jnp.concatenate([logits, found], axis=-1)
        return None, TeacherLogits(ids, logits, top_Bc / temperature + jnp.log(sum_Bc))

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, a.shape[-1]), 1, 0)
    _, found = lax.scan(chunk, None, (split(x_BTD), split(numbers_BTR)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(B, T, *a.shape[3:]), found)


def sharded_teacher_logits(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], **options: Any
) -> TeacherLogits:
    """Return `teacher_logits` on the mesh, with its options."""

    def local(x: Array, w: Array, tokens: Array) -> TeacherLogits:
        x, w = gather(x, w)
        return teacher_logits(x, w, tokens, vocab_axes=mesh_axis("vocab"), **options)

    return on_shards(local, [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES], AXES)(x_BTD, w_VD, tokens_BT)
