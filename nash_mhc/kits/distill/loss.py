"""The teacher's logits at each position, and the loss of a student against them.

Of each position, K logits are known: the top-k and random other tokens. All other tokens count as one more token:

    loss = sum over the K of p log(p / q)  +  p_rest log(p_rest / q_rest)

p is the teacher's probability, from its logits and log-sum-exp; q the student's. A softmax over the K tokens alone
(`renormalised`) ignores the rest and is biased (arXiv 2503.16870). At temperature t both are softmaxes of logits / t,
and the loss is multiplied by t^2. With random other tokens, those replace the rest: each counts (V - K) / R times: the
divergence is unbiased. As in `ops/xent.py`, gradients are computed chunk by chunk along T.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.objectives.vocabulary import HIDDEN_AXES, TABLE_AXES, TOKEN_AXES, ChunkedLoss, gather, sharded_loss
from nash_mhc.ops.xent import chunk_length
from nash_mhc.parallel.sharding import mesh_axis, on_shards

_LEAST = 1e-7  # smallest probability of the rest: below it, 1 - sum(p) is rounding error
_NORMALISED = 0.8  # share of the normalized difference of layers; the rest is the plain difference


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
    """Return, for each n in `numbers_BTR`, the n-th token id that is not in the top-k."""
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


class LossWeights(NamedTuple):
    """Shares of the loss; the divergence from the teacher has the rest, `1 - hard - text`."""

    text: float = 0.0  # cross-entropy of the text
    hard: float = 0.0  # cross-entropy of the teacher's top-1 token
    temperature: float = 1.0
    renormalised: bool = False  # softmaxes over the top-k tokens alone
    random: int = 0  # how many of the K tokens are random; they come last

    @property
    def soft(self) -> float:
        return (1.0 - self.text - self.hard) * self.temperature**2

    def counts(self, tokens: int, vocab_size: int) -> np.ndarray:
        """Return how many tokens each of the K tokens stands for."""
        top_k = tokens - self.random
        counts = np.ones(tokens, np.float32)
        counts[top_k:] = (vocab_size - top_k) / max(self.random, 1)
        return counts


class DistillSums(NamedTuple):
    """Sums over tokens, weighted; divide by `weight` for means."""

    loss: Float[Array, ""]
    kl: Float[Array, ""]  # nats, at the temperature
    ce: Float[Array, ""]  # nats, of the text
    hard: Float[Array, ""]  # nats, of the teacher's top-1 token
    agree: Float[Array, ""]  # tokens where both have the same top-1 token
    correct: Float[Array, ""]
    weight: Float[Array, ""]


def _rest(p_rest: Array, q_rest: Array) -> Array:
    """Return p log(p / q) of the rest as one token; 0 where the teacher gives it no probability."""
    p = jnp.maximum(p_rest, _LEAST)
    return jnp.where(p_rest > _LEAST, p * (jnp.log(p) - jnp.log(jnp.maximum(q_rest, _LEAST))), 0.0)


class _Divergence(NamedTuple):
    """The divergence and its gradient: `every_Bc` times q for all tokens, plus `some_BcK` for the K tokens."""

    kl_Bc: Array
    every_Bc: Array
    some_BcK: Array


def _divergence(logp_BcK: Array, logq_BcK: Array, counts_11K: Array, parts: LossWeights) -> _Divergence:
    if parts.renormalised:
        top_k_1K = (jnp.arange(logp_BcK.shape[-1]) < logp_BcK.shape[-1] - parts.random)[None, None]
        logp_BcK = jax.nn.log_softmax(logp_BcK, where=top_k_1K)
        logq_top_BcK = jax.nn.log_softmax(logq_BcK, where=top_k_1K)
        p_BcK, q_BcK = (jnp.where(top_k_1K, jnp.exp(a), 0.0) for a in (logp_BcK, logq_top_BcK))
        kl_Bc = jnp.sum(jnp.where(top_k_1K, p_BcK * (logp_BcK - logq_top_BcK), 0.0), axis=-1)
        return _Divergence(kl_Bc, jnp.zeros_like(kl_Bc), q_BcK - p_BcK)
    if parts.random:
        p_BcK = counts_11K * jnp.exp(logp_BcK)
        kl_Bc = jnp.sum(p_BcK * (logp_BcK - logq_BcK), axis=-1)
        return _Divergence(kl_Bc, jnp.sum(p_BcK, axis=-1), -p_BcK)
    p_BcK, q_BcK = jnp.exp(logp_BcK), jnp.exp(logq_BcK)
    p_rest_Bc, q_rest_Bc = 1 - jnp.sum(p_BcK, axis=-1), 1 - jnp.sum(q_BcK, axis=-1)
    kl_Bc = jnp.sum(p_BcK * (logp_BcK - logq_BcK), axis=-1) + _rest(p_rest_Bc, q_rest_Bc)
    # d kl / d z is q - p for the K tokens and q (1 - p_rest / q_rest) for the rest. Where the teacher gives the rest no
    # probability, its term is left out, and the probabilities add up to slightly less than 1.
    has_rest_Bc = (p_rest_Bc > _LEAST) & (q_rest_Bc > _LEAST)
    ratio_Bc = jnp.where(has_rest_Bc, p_rest_Bc / jnp.maximum(q_rest_Bc, _LEAST), 0.0)
    whole_Bc = jnp.sum(p_BcK, axis=-1) + jnp.where(has_rest_Bc, p_rest_Bc, 0.0)
    return _Divergence(kl_Bc, whole_Bc - ratio_Bc, q_BcK * ratio_Bc[..., None] - p_BcK)


def distill(
    x: Float[Array, "B T D"],
    w: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher: TeacherLogits,
    *,
    vocab_size: int,
    parts: LossWeights,
    vocab_axes: tuple[str, ...] = (),
    with_grads: bool = False,
) -> tuple[DistillSums, Float[Array, "B T D"] | None, Float[Array, "V D"] | None]:
    """Return the sums, d loss / d x and d loss / d w (float32; both None unless `with_grads`).

    Inside shard_map, w is this device's shard of the table, and d x is to be summed over `vocab_axes`.
    """
    B, T, D = x.shape
    V, c, t = w.shape[0], chunk_length(B, T, w.shape[0]), parts.temperature
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    total = lambda a: lax.psum(a, vocab_axes) if vocab_axes else a
    counts_11K = jnp.asarray(parts.counts(teacher.ids.shape[-1], vocab_size))[None, None]

    def chunk(carry, inputs):  # type: ignore[no-untyped-def]
        sums, dw = carry
        x_BcD, y_Bc, m_Bc, known = inputs
        z_BcV = chunk_logits(x_BcD, w, column_11V < vocab_size)
        own_BcK, is_local_BcK = local_columns(known.ids, first, V)
        at_ids = jnp.take_along_axis(z_BcV, own_BcK, axis=-1)
        z_BcK = total(jnp.where(is_local_BcK, at_ids, 0.0))
        top_Bc = jnp.max(z_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        exp_BcV = jnp.exp((z_BcV - top_Bc[..., None]) / t)
        sum_Bc = total(jnp.sum(exp_BcV, axis=-1))
        logp_BcK = known.logits.astype(jnp.float32) / t - known.lse[..., None]
        logq_BcK = (z_BcK - top_Bc[..., None]) / t - jnp.log(sum_Bc)[..., None]
        kl_Bc, every_Bc, some_BcK = _divergence(logp_BcK, logq_BcK, counts_11K, parts)
        # At temperature 1, for the text and the teacher's top-1 token.
        lse_Bc, exp1_BcV = top_Bc + jnp.log(sum_Bc), exp_BcV
        if t != 1.0:
            exp1_BcV = jnp.exp(z_BcV - top_Bc[..., None])
            lse_Bc = top_Bc + jnp.log(total(jnp.sum(exp1_BcV, axis=-1)))
        is_target_BcV = column_11V == y_Bc[..., None]
        target_Bc = total(jnp.sum(jnp.where(is_target_BcV, z_BcV, 0.0), axis=-1))
        ce_Bc, hard_Bc = lse_Bc - target_Bc, lse_Bc - z_BcK[..., 0]
        measured = (kl_Bc, ce_Bc, hard_Bc, z_BcK[..., 0] >= top_Bc, target_Bc >= top_Bc)
        kl, ce, hard, agree, correct = (jnp.sum(m_Bc * a) for a in measured)
        loss = parts.soft * kl + parts.text * ce + parts.hard * hard
        sums = jax.tree.map(jnp.add, sums, DistillSums(loss, kl, ce, hard, agree, correct, jnp.sum(m_Bc)))
        if not with_grads:
            return (sums, dw), None
        soft_Bc = m_Bc * (parts.soft / t)
        dz_BcV = exp_BcV * (soft_Bc * every_Bc / sum_Bc)[..., None]
        if parts.text or parts.hard:
            exact_Bc = (parts.text + parts.hard) * m_Bc * jnp.exp(top_Bc - lse_Bc)
            dz_BcV += exp1_BcV * exact_Bc[..., None] - jnp.where(is_target_BcV, parts.text * m_Bc[..., None], 0.0)
        some_BcK = some_BcK * soft_Bc[..., None]
        some_BcK = some_BcK.at[..., 0].add(-parts.hard * m_Bc)
        b_B11, c_1c1 = jnp.arange(B)[:, None, None], jnp.arange(c)[None, :, None]
        dz_BcV = dz_BcV.at[b_B11, c_1c1, own_BcK].add(jnp.where(is_local_BcK, some_BcK, 0.0))
        dz_BcV = dz_BcV.astype(x.dtype)
        dx_BcD = jnp.einsum("bcv,vd->bcd", dz_BcV, w)
        dw = dw + jnp.einsum("bcv,bcd->vd", dz_BcV, x_BcD, preferred_element_type=jnp.float32)
        return (sums, dw), dx_BcD

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)
    zero = DistillSums(*(jnp.zeros((), jnp.float32) for _ in DistillSums._fields))
    start = (zero, jnp.zeros((V, D), jnp.float32) if with_grads else jnp.zeros(()))
    (sums, dw), dx = lax.scan(chunk, start, jax.tree.map(split, (x, targets, weights, teacher)))
    if not with_grads:
        return sums, None, None
    return sums, jnp.moveaxis(dx, 0, 1).reshape(B, T, D), dw


def layer_difference(student_LBTD: Float[Array, "L B T D"], teacher_LBTD: Float[Array, "L B T D"]) -> Float[Array, "B T"]:
    """Return the mean distance of the student's layer outputs from the teacher's: most of it between the RMS-normalized
    outputs, the rest between the outputs themselves, relative to the teacher's."""
    s, t = student_LBTD.astype(jnp.float32), jax.lax.stop_gradient(teacher_LBTD.astype(jnp.float32))
    power = lambda x: jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6
    normalized = power(s * jax.lax.rsqrt(power(s)) - t * jax.lax.rsqrt(power(t)))
    return jnp.mean(_NORMALISED * normalized + (1 - _NORMALISED) * power(s - t) / power(t), axis=(0, -1))


def sharded_distill(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: TeacherLogits,
    vocab_size: int,
    parts: LossWeights,
) -> DistillSums:
    """Return the sums of `distill` on the mesh."""
    loss = ChunkedLoss(
        functools.partial(distill, vocab_size=vocab_size, parts=parts), (TOKEN_AXES, TOKEN_AXES, AXES), DistillSums
    )
    out: DistillSums = sharded_loss(loss, x_BTD, w_VD, targets_BT, weights_BT, teacher)
    return out
