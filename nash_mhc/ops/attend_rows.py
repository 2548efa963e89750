"""What attention works on, and what it finds."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FOUND = "attention_found"  # checkpoint name of what a kernel finds, and of its softmax's sums


class Documents(NamedTuple):
    """Where the documents of each row lie, for kernels that walk them one by one;
    those beyond the room are left out."""

    lengths_BM: Int[Array, "B M"]  # 0: no such document
    starts_BM: Int[Array, "B M"]
    number_BT: Int[Array, "B T"]  # of the document that a token is in, counted in its row
    count_B: Int[Array, "B"] | None  # None: there is room for all, whatever the rows hold


class Rows(NamedTuple):
    """What attention needs of one resolution of a batch."""

    q_BTNH: Float[Array, "B T N H"]
    k_BTKH: Float[Array, "B T K H"]
    v_BTKH: Float[Array, "B T K H"]
    segments_BT: Int[Array, "B T"] | None = None
    documents: Documents | None = None  # of `segments_BT`, where they were found once for all layers


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
