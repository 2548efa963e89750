"""Recurrences that are not linear: rings of units, each of which hears its neighbour through a tanh.

    h_t[n] = (1 - leak) h_{t-1}[n] + leak tanh(weight[n] h_{t-1}[n - 1] + b_t[n])

Nothing of it can be computed ahead, so that tokens are walked one after the other. A ring is a permutation times its
weights: with |weight| = radius everywhere, that is its spectral radius, and nothing is stretched more than by it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.kits.reservoir.linear_scan import goes_on

CHUNK = 64  # tokens whose states are computed again on the way back, instead of being kept: one state a chunk is


def tanh_step(
    weight_2N: Float[Array, "2 N"],
    leak_N: Float[Array, "N"],
    h_2BN: Float[Array, "2 B N"],
    b_2BN: Float[Array, "2 B N"],
    ring: int,
) -> Float[Array, "2 B N"]:
    """The states after one token."""
    by_ring = h_2BN.reshape(*h_2BN.shape[:-1], -1, ring)
    heard_2BN = jnp.roll(by_ring, 1, axis=-1).reshape(h_2BN.shape)
    leak_11N = leak_N[None, None]
    return (1 - leak_11N) * h_2BN + leak_11N * jnp.tanh(weight_2N[:, None] * heard_2BN + b_2BN)


def tanh_scan(
    weight_2N: Float[Array, "2 N"],
    leak_N: Float[Array, "N"],
    b_2BTN: Float[Array, "2 B T N"],
    segments_BT: Int[Array, "B T"],
    ring: int,
    chunk: int = CHUNK,
) -> Float[Array, "2 B T N"]:
    """The states after every token. Where a document begins, nothing is left of the one before."""
    _, B, T, N = b_2BTN.shape
    missing = -T % chunk
    in_chunks = lambda x, axis: jnp.moveaxis(
        jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]), axis, 0
    ).reshape(-1, chunk, *(s for a, s in enumerate(x.shape) if a != axis))

    def one(h_2BN: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        b_2BN, goes_on_B = inputs
        h_2BN = tanh_step(weight_2N, leak_N, jnp.where(goes_on_B[None, :, None], h_2BN, 0.0), b_2BN, ring)
        return h_2BN, h_2BN

    @jax.checkpoint
    def several(h_2BN: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return lax.scan(one, h_2BN, inputs)

    with jax.named_scope("tanh_scan"):
        chunks = (in_chunks(b_2BTN, 2), in_chunks(goes_on(segments_BT), 1))
        _, h_C = lax.scan(several, jnp.zeros((2, B, N), b_2BTN.dtype), chunks)
    return jnp.moveaxis(h_C.reshape(-1, 2, B, N)[:T], 0, 2)
