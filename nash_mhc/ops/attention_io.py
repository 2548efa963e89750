"""Inputs and outputs of attention at one resolution."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

ATTENDED = "attention_found"  # checkpoint name of a kernel's output and of its log-sum-exp


class Bounds(NamedTuple):
    """First and end row of the document of each row of keys."""

    first_BI: Int[Array, "B I"]
    end_BI: Int[Array, "B I"]


class Documents(NamedTuple):
    """The documents of each sequence, up to a capacity, for kernels that process them one by one."""

    lengths_BM: Int[Array, "B M"]  # 0: absent
    starts_BM: Int[Array, "B M"]
    number_BT: Int[Array, "B T"]  # index of a token's document within its sequence
    count_B: Int[Array, "B"] | None  # documents per sequence; None: never more than the capacity
    bounds: Bounds  # for kernels that need no list


def bounds_of(segments_BI: Int[Array, "B I"]) -> Bounds:
    count = segments_BI.shape[1]
    row = jnp.arange(count, dtype=jnp.int32)[None]
    changes = segments_BI[:, 1:] != segments_BI[:, :-1]
    first = lax.cummax(jnp.where(jnp.pad(changes, ((0, 0), (1, 0))), row, 0), axis=1)
    end = lax.cummin(jnp.where(jnp.pad(changes, ((0, 0), (0, 1))), row + 1, count), axis=1, reverse=True)
    return Bounds(first, end)


class AttentionInput(NamedTuple):
    """Queries, keys and values of one resolution. Each row of keys stands for a block of `stride` tokens.

    All queries of a block see the same keys: those of the blocks up to and including their own.
    """

    q_BTNH: Float[Array, "B T N H"]
    k_BIKH: Float[Array, "B I K H"]
    v_BIKH: Float[Array, "B I K H"]
    segments_BI: Int[Array, "B I"] | None = None
    documents: Documents | None = None  # of `segments_BI`, if precomputed for all layers

    @property
    def stride(self) -> int:
        """Return the number of tokens per block."""
        return self.q_BTNH.shape[1] // self.k_BIKH.shape[1]


class AttentionOutput(NamedTuple):
    """The weighted values, and the log-sum-exp of the scores."""

    out_BTNH: Float[Array, "B T N H"]
    lse_BTN: Float[Array, "B T N"]


def with_lse_gradient(out: Float[Array, "*B H"], dout: Float[Array, "*B H"], dlse: Float[Array, "*B"]) -> Float[Array, "*B H"]:
    """Return a float32 replacement for `out` that makes a flash kernel's backward pass include the gradient of the lse.

    d score = weight * (dO . v - dO . O + dL). The kernel computes dO . O, so O is shifted along dO to subtract dL.
    """
    wide = dout.astype(jnp.float32)
    length = jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return out.astype(jnp.float32) - dlse[..., None] * (wide / length)


def by_block(q_BTNH: Float[Array, "B T N H"], stride: int, kv_heads: int) -> Float[Array, "B I M H"]:
    """Return the queries of a block as heads of one row, grouped by key head; M = stride * N."""
    if stride == 1:
        return q_BTNH
    B, T, N, H = q_BTNH.shape
    q = q_BTNH.reshape(B, T // stride, stride, kv_heads, N // kv_heads, H)
    return q.transpose(0, 1, 3, 2, 4, 5).reshape(B, T // stride, stride * N, H)


def by_token(rows_BIMH: Float[Array, "B I M H"], stride: int, kv_heads: int) -> Float[Array, "B T N H"]:
    """Invert `by_block`."""
    if stride == 1:
        return rows_BIMH
    B, count, M, H = rows_BIMH.shape
    rows = rows_BIMH.reshape(B, count, kv_heads, stride, M // (stride * kv_heads), H)
    return rows.transpose(0, 1, 3, 2, 4, 5).reshape(B, count * stride, M // stride, H)
