"""Attention with evidence where few keys are seen: summaries of blocks, or the tokens of a window.

There is a row of keys for each block of tokens, and a token sees those up to its own block, in its document. Beside
what was found there is the evidence, the log of the sum that the softmax divides by, through which gradients flow as
well. Documents may be as many as there are rows, and the bits are the same every time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nash_mhc.ops import attend_triton_gpu
from nash_mhc.ops.arithmetic import wide_dtype
from nash_mhc.ops.attend_rows import FOUND, Found, Rows
from nash_mhc.ops.platform import on_platform


def fits_triton(rows: Rows) -> bool:
    return attend_triton_gpu.fits(rows.q_BTNH.shape, rows.k_BIKH.shape, rows.q_BTNH.dtype)


class Sight(NamedTuple):
    """Which rows see which: all up to themselves in their document, or a window of these."""

    first_BI: Int[Array, "B I"]  # that a row sees
    end_BI: Int[Array, "B I"]  # of those that see it


def sight(segments_BI: Int[Array, "B I"], window: int | None) -> Sight:
    """`window`: rows, the own one counted."""
    count = segments_BI.shape[1]
    row = jnp.arange(count, dtype=jnp.int32)[None]
    changes = segments_BI[:, 1:] != segments_BI[:, :-1]
    first = lax.cummax(jnp.where(jnp.pad(changes, ((0, 0), (1, 0))), row, 0), axis=1)
    last = jnp.pad(changes, ((0, 0), (0, 1)))
    end = lax.cummin(jnp.where(last, row + 1, count), axis=1, reverse=True)
    if window is not None:
        first, end = jnp.maximum(first, row - window + 1), jnp.minimum(end, row + window)
    return Sight(first, end)


def found_by_triton(rows: Rows, window: int | None = None) -> Found:
    B, count = rows.k_BIKH.shape[:2]
    segments_BI = jnp.zeros((B, count), jnp.int32) if rows.segments_BI is None else rows.segments_BI
    return Found(*_find(min(count, window or count), rows.q_BTNH, rows.k_BIKH, rows.v_BIKH, sight(segments_BI, window)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _find(
    most: int,  # keys that a query sees
    q_BTNH: Float[Array, "B T N H"],
    k_BIKH: Float[Array, "B I K H"],
    v_BIKH: Float[Array, "B I K H"],
    seen: Sight,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    return _find_fwd(most, q_BTNH, k_BIKH, v_BIKH, seen)[0]


def _find_fwd(most, q, k, v, seen):  # type: ignore[no-untyped-def]
    in_kernel = functools.partial(_find_in_kernel, most=most)
    out, evidence = on_platform(q, k, v, *seen, default=find_reference, cuda=in_kernel)
    out, evidence = checkpoint_name(out, FOUND), checkpoint_name(evidence, FOUND)
    return (out, evidence), (q, k, v, seen, out, evidence)


def _find_bwd(most, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, seen, *found = saved
    in_kernel = functools.partial(_backward_in_kernel, most=most)
    grads = on_platform(q, k, v, *seen, *found, *cotangents, default=_backward_reference, cuda=in_kernel)
    return *grads, None


def _find_in_kernel(
    q: Array, k: Array, v: Array, first: Array, end: Array, *, most: int, interpret: bool = False
) -> tuple[Array, Array]:
    return attend_triton_gpu.forward(q, k, v, first, most=most, interpret=interpret)


def _backward_in_kernel(*args: Array, most: int, interpret: bool = False) -> tuple[Array, Array, Array]:
    return attend_triton_gpu.backward(*args, most=most, interpret=interpret)


_find.defvjp(_find_fwd, _find_bwd)


def find_reference(q_BTNH: Array, k_BIKH: Array, v_BIKH: Array, first_BI: Array, end_BI: Array) -> tuple[Array, Array]:
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
    q: Array, k: Array, v: Array, first: Array, end: Array, out: Array, evidence: Array, dout: Array, devidence: Array
) -> tuple[Array, ...]:
    return jax.vjp(lambda q, k, v: find_reference(q, k, v, first, end), q, k, v)[1]((dout, devidence))
