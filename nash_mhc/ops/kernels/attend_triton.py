"""Attention with evidence where few keys are seen: summaries of blocks, or the tokens of a window.

There is a row of keys for each block of tokens, and a token sees those up to its own block, in its document. Beside
what was found there is the evidence, the log of the sum that the softmax divides by, through which gradients flow as
well. Documents may be as many as there are rows, and the bits are the same every time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import wide_dtype
from nash_mhc.ops.attend_rows import FOUND, Bounds, Found, Rows, bounds_of
from nash_mhc.ops.kernels import attend_triton_gpu
from nash_mhc.ops.platform import on_platform


def fits_triton(rows: Rows) -> bool:
    return attend_triton_gpu.fits(rows.q_BTNH.shape, rows.k_BIKH.shape, rows.q_BTNH.dtype)


def found_by_triton(rows: Rows, window: int | None = None) -> Found:
    B, count = rows.k_BIKH.shape[:2]
    segments_BI = jnp.zeros((B, count), jnp.int32) if rows.segments_BI is None else rows.segments_BI
    bounds = bounds_of(segments_BI) if rows.documents is None else rows.documents.bounds
    return Found(*_find(window or count, rows.q_BTNH, rows.k_BIKH, rows.v_BIKH, bounds))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _find(
    window: int,  # rows, the own one counted
    q_BTNH: Float[Array, "B T N H"],
    k_BIKH: Float[Array, "B I K H"],
    v_BIKH: Float[Array, "B I K H"],
    bounds: Bounds,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    return _find_fwd(window, q_BTNH, k_BIKH, v_BIKH, bounds)[0]


def _find_fwd(window, q, k, v, bounds):  # type: ignore[no-untyped-def]
    forms = [functools.partial(form, window=window) for form in (find_reference, _find_in_kernel)]
    out, evidence = on_platform(q, k, v, *bounds, default=forms[0], cuda=forms[1])
    out, evidence = checkpoint_name(out, FOUND), checkpoint_name(evidence, FOUND)
    return (out, evidence), (q, k, v, bounds, out, evidence)


def _find_bwd(window, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, bounds, *found = saved
    forms = [functools.partial(form, window=window) for form in (_backward_reference, _backward_in_kernel)]
    return *on_platform(q, k, v, *bounds, *found, *cotangents, default=forms[0], cuda=forms[1]), None


def _find_in_kernel(
    q: Array, k: Array, v: Array, first: Array, end: Array, *, window: int, interpret: bool = False
) -> tuple[Array, Array]:
    return attend_triton_gpu.forward(q, k, v, first, window=window, interpret=interpret)


def _backward_in_kernel(*args: Array, window: int, interpret: bool = False) -> tuple[Array, Array, Array]:
    return attend_triton_gpu.backward(*args, window=window, interpret=interpret)


_find.defvjp(_find_fwd, _find_bwd)


def find_reference(
    q_BTNH: Array, k_BIKH: Array, v_BIKH: Array, first_BI: Array, end_BI: Array, *, window: int
) -> tuple[Array, Array]:
    """All scores at once."""
    (B, T, N, H), (count, K) = q_BTNH.shape, k_BIKH.shape[1:3]
    block_T, row_I = jnp.arange(T) // (T // count), jnp.arange(count)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bikh->bkgti", q_BTKGH, k_BIKH, preferred_element_type=wide_dtype(q_BTNH.dtype)) * H**-0.5
    first_BT1 = jnp.maximum(first_BI[:, block_T], block_T[None] - window + 1)[..., None]
    seen_BTI = (row_I[None, None] <= block_T[None, :, None]) & (row_I[None, None] >= first_BT1)
    scores = jnp.where(seen_BTI[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BIKH.dtype)
    found_BTKGH = jnp.einsum("bkgti,bikh->btkgh", weights, v_BIKH, preferred_element_type=wide_dtype(v_BIKH.dtype))
    evidence_BTN = jax.nn.logsumexp(scores, axis=-1).transpose(0, 3, 1, 2).reshape(B, T, N)
    return found_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), evidence_BTN


def _backward_reference(
    q: Array, k: Array, v: Array, first: Array, end: Array, out: Array, evidence: Array, dout: Array, devidence: Array,
    *, window: int,
) -> tuple[Array, ...]:  # fmt: skip
    return jax.vjp(lambda q, k, v: find_reference(q, k, v, first, end, window=window), q, k, v)[1]((dout, devidence))
