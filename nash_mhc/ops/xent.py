"""Cross-entropy and log-probabilities over a large vocabulary, without [B, T, V] logits in float32.

A loop over chunks along T computes the logits of a chunk and, in training, its gradients at once: three matmuls per
chunk instead of the four of recomputation. (The loss is a sum, so gradients only need scaling later.) With `vocab_axes`
the vocabulary is split over those mesh axes, and only per-token values cross devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_CHUNK_ELEMENTS = 2**26  # logits of one chunk: enough to fill a matmul, small compared to the activations


class XentSums(NamedTuple):
    """Weighted sums over tokens; divide by `weight` for means."""

    loss: Float[Array, ""]  # ce + z_weight * z
    ce: Float[Array, ""]  # nats
    z: Float[Array, ""]  # squared log-sum-exp
    correct: Float[Array, ""]  # tokens whose argmax is the target
    weight: Float[Array, ""]
    entropy: Float[Array, ""]  # of the predictions, nats; 0 when gradients are computed


def xent_reference(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    vocab_size: int,
    z_weight: float = 0.0,
) -> XentSums:
    """Compute all logits at once; `xent_and_grads` is tested against this."""
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    ce_BT = lse_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    hit_BT = (jnp.argmax(logits_BTV, axis=-1) == targets_BT).astype(jnp.float32)
    entropy_BT = lse_BT - jnp.sum(jax.nn.softmax(logits_BTV) * logits_BTV, axis=-1)
    ce, z, correct, entropy = (jnp.sum(a * weights_BT) for a in (ce_BT, lse_BT**2, hit_BT, entropy_BT))
    return XentSums(ce + z_weight * z, ce, z, correct, jnp.sum(weights_BT), entropy)


def chunk_length(B: int, T: int, V: int) -> int:
    """Return the largest divisor of T whose chunk of logits stays under the limit."""
    wanted = max(1, _CHUNK_ELEMENTS // (B * V))
    # At least two chunks: even small sizes never hold all of [B, T, V].
    return max(c for c in range(1, T + 1) if T % c == 0 and ((c <= wanted and c < T) or c == 1))


def xent_and_grads(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    vocab_size: int,
    z_weight: float = 0.0,
    vocab_axes: tuple[str, ...] = (),
    with_grads: bool = True,
) -> tuple[XentSums, Any, Any]:
    """Compute `xent_reference` in chunks. Return (sums, d loss / d x, d loss / d w in float32, or None).

    Inside shard_map, w_VD holds this device's rows of the table, and d x still has to be summed over `vocab_axes`.
    """
    B, T, D = x_BTD.shape
    V = w_VD.shape[0]
    c = chunk_length(B, T, V)
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    total = lambda a: lax.psum(a, vocab_axes) if vocab_axes else a

    def chunk(carry, inputs):  # type: ignore[no-untyped-def]
        sums, dw = carry
        x_BcD, t_Bc, m_Bc = inputs
        logits_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w_VD, preferred_element_type=jnp.float32)
        logits_BcV = jnp.where(column_11V < vocab_size, logits_BcV, -jnp.inf)  # padding of the vocabulary
        top_Bc = jnp.max(logits_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        exp_BcV = jnp.exp(logits_BcV - top_Bc[..., None])
        sum_Bc = total(jnp.sum(exp_BcV, axis=-1))
        lse_Bc = top_Bc + jnp.log(sum_Bc)
        is_target_BcV = column_11V == t_Bc[..., None]
        target_Bc = total(jnp.sum(jnp.where(is_target_BcV, logits_BcV, 0.0), axis=-1))
        ce, z = jnp.sum(m_Bc * (lse_Bc - target_Bc)), jnp.sum(m_Bc * lse_Bc**2)
        correct = jnp.sum(m_Bc * (target_Bc >= top_Bc))
        entropy = jnp.zeros(())
        if not with_grads:
            mean_Bc = total(jnp.sum(exp_BcV * jnp.where(column_11V < vocab_size, logits_BcV, 0.0), axis=-1)) / sum_Bc
            entropy = jnp.sum(m_Bc * (lse_Bc - mean_Bc))
        step = XentSums(ce + z_weight * z, ce, z, correct, jnp.sum(m_Bc), entropy)
        sums = jax.tree.map(jnp.add, sums, step)
        if not with_grads:
            return (sums, dw), None
        # d loss / d logits = weight * (p * (1 + 2 z_weight lse) - onehot)
        scale_Bc = m_Bc * (1.0 + 2.0 * z_weight * lse_Bc) / sum_Bc
        dlogits_BcV = exp_BcV * scale_Bc[..., None] - jnp.where(is_target_BcV, m_Bc[..., None], 0.0)
        dlogits_BcV = dlogits_BcV.astype(x_BTD.dtype)
        dx_BcD = jnp.einsum("bcv,vd->bcd", dlogits_BcV, w_VD)
        dw = dw + jnp.einsum("bcv,bcd->vd", dlogits_BcV, x_BcD, preferred_element_type=jnp.float32)
        return (sums, dw), dx_BcD

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)
    zero = XentSums(*(jnp.zeros((), jnp.float32) for _ in XentSums._fields))
    start = (zero, jnp.zeros((V, D), jnp.float32) if with_grads else jnp.zeros(()))
    (sums, dw), dx = lax.scan(chunk, start, (split(x_BTD), split(targets_BT), split(weights_BT)))
    if not with_grads:
        return sums, None, None
    return sums, jnp.moveaxis(dx, 0, 1).reshape(B, T, D), dw


class TokenScores(NamedTuple):
    log_prob_BT: Float[Array, "B T"]  # nats, float32
    is_best_BT: Bool[Array, "B T"]  # whether greedy decoding would choose this token; ties go to the first


def log_probs_reference(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], *, vocab_size: int
) -> TokenScores:
    """Compute all logits at once; `log_probs` is tested against this."""
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    log_probs_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    log_prob_BT = jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return TokenScores(log_prob_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT)


def log_probs(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    vocab_size: int,
    vocab_axes: tuple[str, ...] = (),
) -> TokenScores:
    """Compute `log_probs_reference` in chunks. Inside shard_map, w_VD holds this device's rows of the table."""
    B, T, _ = x_BTD.shape
    V = w_VD.shape[0]
    c = chunk_length(B, T, V)
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    over_shards = lambda reduce, a: reduce(a, vocab_axes) if vocab_axes else a

    def chunk(inputs: tuple[Array, Array]) -> TokenScores:
        x_BcD, t_Bc = inputs
        logits_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w_VD, preferred_element_type=jnp.float32)
        logits_BcV = jnp.where(column_11V < vocab_size, logits_BcV, -jnp.inf)  # padding of the vocabulary
        own_Bc = jnp.max(logits_BcV, axis=-1)
        top_Bc = over_shards(lax.pmax, own_Bc)
        sum_Bc = over_shards(lax.psum, jnp.sum(jnp.exp(logits_BcV - top_Bc[..., None]), axis=-1))
        target_Bc = over_shards(lax.psum, jnp.sum(jnp.where(column_11V == t_Bc[..., None], logits_BcV, 0.0), axis=-1))
        # Ties between devices go to the lowest column.
        best_Bc = jnp.where(own_Bc == top_Bc, first + jnp.argmax(logits_BcV, axis=-1), jnp.iinfo(jnp.int32).max)
        best_Bc = over_shards(lax.pmin, best_Bc)
        return TokenScores(target_Bc - top_Bc - jnp.log(sum_Bc), best_Bc == t_Bc)

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)
    scores = lax.map(chunk, (split(x_BTD), split(targets_BT)))
    return jax.tree.map(lambda a_ABc: jnp.moveaxis(a_ABc, 0, 1).reshape(B, T), scores)
