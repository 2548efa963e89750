"""Cross-entropy over a large vocabulary without ever holding [B, T, V] logits in float32.

Tokens are walked in chunks along T; each chunk's logits live only inside the loop, and its gradients are formed there
and then (the loss is a sum, so they only need scaling later): three matmuls a chunk instead of the four of
recomputation. With `vocab_axes` the columns are split over those mesh axes
and only per-token numbers cross between devices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Largest float32 logits block of one chunk, in elements: big enough to fill a matmul, small beside the activations.
_CHUNK_ELEMENTS = 2**26


class XentSums(NamedTuple):
    """Sums over tokens, each weighted by the token's weight; divide by `weight` for means."""

    loss: Float[Array, ""]  # ce + z_weight * z + smoothing * (uniform - ce)
    ce: Float[Array, ""]  # nats
    z: Float[Array, ""]  # squared log-partition
    correct: Float[Array, ""]  # tokens whose best guess is right
    weight: Float[Array, ""]
    uniform: Float[Array, ""]  # nats against a target of equal shares; 0 where nothing is smoothed
    entropy: Float[Array, ""]  # nats, of what is predicted; 0 where gradients are computed, which do without


def xent_reference(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    vocab_size: int,
    z_weight: float = 0.0,
    smoothing: float = 0.0,
) -> XentSums:
    """The plain form: all logits at once."""
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    ce_BT = lse_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    hit_BT = (jnp.argmax(logits_BTV, axis=-1) == targets_BT).astype(jnp.float32)
    uniform_BT = lse_BT - jnp.mean(logits_BTV, axis=-1) if smoothing else jnp.zeros_like(ce_BT)
    entropy_BT = lse_BT - jnp.sum(jax.nn.softmax(logits_BTV) * logits_BTV, axis=-1)
    ce, z, correct, uniform, entropy = (jnp.sum(a * weights_BT) for a in (ce_BT, lse_BT**2, hit_BT, uniform_BT, entropy_BT))
    loss = ce + z_weight * z + smoothing * (uniform - ce)
    return XentSums(loss, ce, z, correct, jnp.sum(weights_BT), uniform, entropy)


def xent(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    vocab_size: int,
    z_weight: float = 0.0,
    smoothing: float = 0.0,
    vocab_axes: tuple[str, ...] = (),
) -> XentSums:
    """As `xent_reference`, in chunks. Inside shard_map, w_VD is this device's rows of the table."""
    return _walk(x_BTD, w_VD, targets_BT, weights_BT, vocab_size, z_weight, smoothing, vocab_axes, with_grads=False)[0]


def xent_and_grads(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    vocab_size: int,
    z_weight: float = 0.0,
    smoothing: float = 0.0,
    vocab_axes: tuple[str, ...] = (),
) -> tuple[XentSums, Float[Array, "B T D"], Float[Array, "V D"]]:
    """The sums, d loss / d x and d loss / d w (float32).
    With `vocab_axes`, d x is this device's part of a sum over them."""
    return _walk(x_BTD, w_VD, targets_BT, weights_BT, vocab_size, z_weight, smoothing, vocab_axes, with_grads=True)


def chunk_length(B: int, T: int, V: int) -> int:
    """The largest divisor of T whose chunk of logits stays under the cap."""
    wanted = max(1, _CHUNK_ELEMENTS // (B * V))
    # At least two chunks, so that the whole of [B, T, V] exists at no size, small ones included.
    return max(c for c in range(1, T + 1) if T % c == 0 and ((c <= wanted and c < T) or c == 1))


def _walk(x, w, targets, weights, vocab_size, z_weight, smoothing, vocab_axes, *, with_grads):  # type: ignore[no-untyped-def]
    B, T, D = x.shape
    V = w.shape[0]
    c = chunk_length(B, T, V)
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]

    def total(a):  # type: ignore[no-untyped-def]
        return lax.psum(a, vocab_axes) if vocab_axes else a

    def chunk(carry, inputs):  # type: ignore[no-untyped-def]
        sums, dw = carry
        x_BcD, t_Bc, m_Bc = inputs
        logits_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w, preferred_element_type=jnp.float32)
        logits_BcV = jnp.where(column_11V < vocab_size, logits_BcV, -jnp.inf)  # padding columns take no probability
        top_Bc = jnp.max(logits_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        exp_BcV = jnp.exp(logits_BcV - top_Bc[..., None])
        sum_Bc = total(jnp.sum(exp_BcV, axis=-1))
        lse_Bc = top_Bc + jnp.log(sum_Bc)
        is_target_BcV = column_11V == t_Bc[..., None]
        target_Bc = total(jnp.sum(jnp.where(is_target_BcV, logits_BcV, 0.0), axis=-1))
        ce, z = jnp.sum(m_Bc * (lse_Bc - target_Bc)), jnp.sum(m_Bc * lse_Bc**2)
        correct = jnp.sum(m_Bc * (target_Bc >= top_Bc))
        loss, uniform, shared = ce + z_weight * z, jnp.zeros(()), column_11V < vocab_size
        if smoothing:
            mean_Bc = total(jnp.sum(jnp.where(shared, logits_BcV, 0.0), axis=-1)) / vocab_size
            uniform = jnp.sum(m_Bc * (lse_Bc - mean_Bc))
            loss = loss + smoothing * (uniform - ce)
        entropy = jnp.zeros(())
        if not with_grads:
            mean_Bc = total(jnp.sum(exp_BcV * jnp.where(shared, logits_BcV, 0.0), axis=-1)) / sum_Bc
            entropy = jnp.sum(m_Bc * (lse_Bc - mean_Bc))
        step = XentSums(loss, ce, z, correct, jnp.sum(m_Bc), uniform, entropy)
        sums = jax.tree.map(jnp.add, sums, step)
        if not with_grads:
            return (sums, dw), None
        # d loss / d logits = weight * (p * (1 + 2 z_weight lse) - (1 - smoothing) onehot - smoothing / V)
        scale_Bc = m_Bc * (1.0 + 2.0 * z_weight * lse_Bc) / sum_Bc
        dlogits_BcV = exp_BcV * scale_Bc[..., None] - jnp.where(is_target_BcV, (1.0 - smoothing) * m_Bc[..., None], 0.0)
        if smoothing:
            dlogits_BcV = dlogits_BcV - jnp.where(shared, smoothing / vocab_size * m_Bc[..., None], 0.0)
        dlogits_BcV = dlogits_BcV.astype(x.dtype)
        dx_BcD = jnp.einsum("bcv,vd->bcd", dlogits_BcV, w)
        dw = dw + jnp.einsum("bcv,bcd->vd", dlogits_BcV, x_BcD, preferred_element_type=jnp.float32)
        return (sums, dw), dx_BcD

    def split(a):  # type: ignore[no-untyped-def]
        return jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)

    zero = XentSums(*(jnp.zeros((), jnp.float32) for _ in XentSums._fields))
    start = (zero, jnp.zeros((V, D), jnp.float32) if with_grads else jnp.zeros(()))
    (sums, dw), dx = lax.scan(chunk, start, (split(x), split(targets), split(weights)))
    if not with_grads:
        return sums, None, None
    return sums, jnp.moveaxis(dx, 0, 1).reshape(B, T, D), dw
