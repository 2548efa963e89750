"""What attention works on, and what it finds."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

FOUND = "attention_found"  # checkpoint name of what a kernel finds, and of its softmax's sums


class Bounds(NamedTuple):
    """Where the document of each row of keys begins, and where it has ended."""

    first_BI: Int[Array, "B I"]
    end_BI: Int[Array, "B I"]


class Documents(NamedTuple):
    """Where the documents of each row lie, for kernels that walk them one by one;
    those beyond the room are left out."""

    lengths_BM: Int[Array, "B M"]  # 0: no such document
    starts_BM: Int[Array, "B M"]
    number_BT: Int[Array, "B T"]  # of the document that a token is in, counted in its row
    count_B: Int[Array, "B"] | None  # None: there is room for all, whatever the rows hold
    bounds: Bounds  # for kernels that need no list


def bounds_of(segments_BI: Int[Array, "B I"]) -> Bounds:
    count = segments_BI.shape[1]
    row = jnp.arange(count, dtype=jnp.int32)[None]
    changes = segments_BI[:, 1:] != segments_BI[:, :-1]
    first = lax.cummax(jnp.where(jnp.pad(changes, ((0, 0), (1, 0))), row, 0), axis=1)
    end = lax.cummin(jnp.where(jnp.pad(changes, ((0, 0), (0, 1))), row + 1, count), axis=1, reverse=True)
    return Bounds(first, end)


class Rows(NamedTuple):
    """What attention needs of one resolution of a batch. All queries of a block see the same keys: those of the blocks
    up to its own one, which is a token where there are as many keys as queries."""

    q_BTNH: Float[Array, "B T N H"]
    k_BIKH: Float[Array, "B I K H"]
    v_BIKH: Float[Array, "B I K H"]
    segments_BI: Int[Array, "B I"] | None = None
    documents: Documents | None = None  # of `segments_BI`, where they were found once for all layers

    @property
    def stride(self) -> int:
        """Tokens of a block."""
        return self.q_BTNH.shape[1] // self.k_BIKH.shape[1]


class Found(NamedTuple):
    """What attention found, and how much: the log of the sum that its softmax divides by."""

    out_BTNH: Float[Array, "B T N H"]
    evidence_BTN: Float[Array, "B T N"]


def with_gradient_of_evidence(
    out: Float[Array, "*B H"], dout: Float[Array, "*B H"], devidence: Float[Array, "*B"]
) -> Float[Array, "*B H"]:
    """What a flash kernel's backward pass, which knows of no gradient of the evidence, is given for `out`, in float32.

    d score = weight * (dO . v - dO . O + dL). The kernel forms dO .
    O by itself, so O is moved along dO by what takes dL from that product.
    """
    wide = dout.astype(jnp.float32)
    length = jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return out.astype(jnp.float32) - devidence[..., None] * (wide / length)


def by_block(q_BTNH: Float[Array, "B T N H"], stride: int, kv_heads: int) -> Float[Array, "B I M H"]:
    """The queries of a block as heads of one row, those that share keys side by side; M = stride * N."""
    if stride == 1:
        return q_BTNH
    B, T, N, H = q_BTNH.shape
    q = q_BTNH.reshape(B, T // stride, stride, kv_heads, N // kv_heads, H)
    return q.transpose(0, 1, 3, 2, 4, 5).reshape(B, T // stride, stride * N, H)


def by_token(rows_BIMH: Float[Array, "B I M H"], stride: int, kv_heads: int) -> Float[Array, "B T N H"]:
    """The other way."""
    if stride == 1:
        return rows_BIMH
    B, count, M, H = rows_BIMH.shape
    rows = rows_BIMH.reshape(B, count, kv_heads, stride, M // (stride * kv_heads), H)
    return rows.transpose(0, 1, 3, 2, 4, 5).reshape(B, count * stride, M // stride, H)
