"""Attention of every token over summaries of blocks: those up to its own block, in its document.

What a row of queries is to ordinary attention, a block of them is here. Beside what was found there is the evidence,
the log of the sum that the softmax divides by, through which gradients flow as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nash_mhc.ops import attend_summaries_gpu
from nash_mhc.ops.arithmetic import wide_dtype
from nash_mhc.ops.attend_rows import FOUND, Found, Rows
from nash_mhc.ops.platform import on_platform


def fits_summaries(rows: Rows) -> bool:
    return attend_summaries_gpu.fits(rows.q_BTNH.shape, rows.k_BIKH.shape, rows.q_BTNH.dtype)


def first_rows(segments_BI: Int[Array, "B I"]) -> Int[Array, "B I"]:
    """Where the document of each row begins."""
    begins = jnp.pad(segments_BI[:, 1:] != segments_BI[:, :-1], ((0, 0), (1, 0)))
    row = jnp.arange(segments_BI.shape[1], dtype=jnp.int32)[None]
    return lax.cummax(jnp.where(begins, row, 0), axis=1)


def find_in_summaries(rows: Rows) -> Found:
    B, count = rows.k_BIKH.shape[:2]
    first_BI = jnp.zeros((B, count), jnp.int32) if rows.segments_BI is None else first_rows(rows.segments_BI)
    return Found(*_find(rows.q_BTNH, rows.k_BIKH, rows.v_BIKH, first_BI))


@jax.custom_vjp
def _find(
    q_BTNH: Float[Array, "B T N H"],
    k_BIKH: Float[Array, "B I K H"],
    v_BIKH: Float[Array, "B I K H"],
    first_BI: Int[Array, "B I"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    return _find_fwd(q_BTNH, k_BIKH, v_BIKH, first_BI)[0]


def _find_fwd(q, k, v, first):  # type: ignore[no-untyped-def]
    out, evidence = on_platform(q, k, v, first, default=find_reference, cuda=_find_in_kernel)
    out, evidence = checkpoint_name(out, FOUND), checkpoint_name(evidence, FOUND)
    return (out, evidence), (q, k, v, first, out, evidence)


def _find_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    return *on_platform(*saved, *cotangents, default=_backward_reference, cuda=_backward_in_kernel), None


def _find_in_kernel(q: Array, k: Array, v: Array, first: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    return attend_summaries_gpu.forward(q, k, v, first, interpret=interpret)


def _backward_in_kernel(*args: Array, interpret: bool = False) -> tuple[Array, Array, Array]:
    return attend_summaries_gpu.backward(*args, interpret=interpret)


_find.defvjp(_find_fwd, _find_bwd)


def find_reference(q_BTNH: Array, k_BIKH: Array, v_BIKH: Array, first_BI: Array) -> tuple[Array, Array]:
    """All scores at once."""
    (B, T, N, H), (count, K) = q_BTNH.shape, k_BIKH.shape[1:3]
    block_T, row_I = jnp.arange(T) // (T // count), jnp.arange(count)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bikh->bkgti", q_BTKGH, k_BIKH, preferred_element_type=wide_dtype(q_BTNH.dtype)) * H**-0.5
    seen_BTI = (row_I[None, None] <= block_T[None, :, None]) & (row_I[None, None] >= first_BI[:, block_T, None])
    scores = jnp.where(seen_BTI[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BIKH.dtype)
    found_BTKGH = jnp.einsum("bkgti,bikh->btkgh", weights, v_BIKH, preferred_element_type=wide_dtype(v_BIKH.dtype))
    evidence_BTN = jax.nn.logsumexp(scores, axis=-1).transpose(0, 3, 1, 2).reshape(B, T, N)
    return found_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), evidence_BTN


def _backward_reference(
    q: Array, k: Array, v: Array, first: Array, out: Array, evidence: Array, dout: Array, devidence: Array
) -> tuple[Array, ...]:
    return jax.vjp(lambda q, k, v: find_reference(q, k, v, first), q, k, v)[1]((dout, devidence))
