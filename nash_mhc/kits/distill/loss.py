"""The loss against a teacher of which K logits per position are known; all other tokens count as one more token.

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

from nash_mhc.kits.distill.logits import AXES, TeacherLogits, chunk_logits, local_columns
from nash_mhc.objectives.vocabulary import (
    HIDDEN_AXES,
    TABLE_AXES,
    TOKEN_AXES,
    gather,
    reduce_gradients,
    scaled,
    sum_over_batch,
)
from nash_mhc.ops.xent import chunk_length
from nash_mhc.parallel.sharding import mesh_axis, on_shards

_LEAST = 1e-7  # smallest probability of the rest: below it, 1 - sum(p) is rounding error
_NORMALISED = 0.8  # share of the normalized difference of layers; the rest is the plain difference


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


_SUM_AXES: Any = DistillSums(*((),) * len(DistillSums._fields))  # type: ignore[arg-type]
_AXES = [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES, TOKEN_AXES, AXES]


def _options(vocab_size: int, parts: LossWeights) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "parts": parts, "vocab_axes": mesh_axis("vocab")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def sharded_distill(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: TeacherLogits,
    vocab_size: int,
    parts: LossWeights,
) -> DistillSums:
    """Return the sums on the mesh. Only `loss` has a gradient; the other sums are metrics."""

    def local(x: Array, w: Array, targets: Array, weights: Array, teacher: TeacherLogits) -> DistillSums:
        x, w = gather(x, w)
        return sum_over_batch(distill(x, w, targets, weights, teacher, **_options(vocab_size, parts))[0])

    with jax.named_scope("loss"):
        return on_shards(local, _AXES, _SUM_AXES)(x_BTD, w_VD, targets_BT, weights_BT, teacher)


def _forward(x_BTD, w_VD, targets_BT, weights_BT, teacher, vocab_size, parts):  # type: ignore[no-untyped-def]
    def local(x: Array, w: Array, targets: Array, weights: Array, teacher: TeacherLogits) -> tuple[DistillSums, Array, Array]:
        x, w = gather(x, w)
        sums, dx, dw = distill(x, w, targets, weights, teacher, **_options(vocab_size, parts), with_grads=True)
        return sum_over_batch(sums), *reduce_gradients(dx, dw)  # type: ignore[arg-type]

    with jax.named_scope("loss"):
        out = on_shards(local, _AXES, (_SUM_AXES, HIDDEN_AXES, TABLE_AXES))
        sums, dx_BTD, dw_VD = out(x_BTD, w_VD, targets_BT, weights_BT, teacher)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(vocab_size, parts, grads, cotangent):  # type: ignore[no-untyped-def]
    return *(scaled(grad, cotangent.loss) for grad in grads), None, None, None


sharded_distill.defvjp(_forward, _backward)
