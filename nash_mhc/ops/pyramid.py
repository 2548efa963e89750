"""Causal pooling of keys and values into coarser scales, per head and document.

Row i of a scale with stride s depends on tokens up to (i + 1) s - 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.arithmetic import widen
from nash_mhc.ops.kernels import pyramid_gpu
from nash_mhc.ops.platform import on_platform

# Without a barrier, XLA would pool again, in float32, in every consumer of the result.
_materialize = lax.optimization_barrier


def continues(segments_BI: Int[Array, "B I"]) -> Bool[Array, "B I"]:
    """Return whether the previous row exists and is in the same document, so that pooling may read it."""
    same = segments_BI[:, 1:] == segments_BI[:, :-1]
    return jnp.pad(same, ((0, 0), (1, 0)))


def pool_reference(
    z_BTNH: Float[Array, "B T N H"], kernel_JNH: Float[Array, "J N H"], continues_BI: Bool[Array, "B I"]
) -> Float[Array, "B I N H"]:
    """Return out[i] = sum_j kernel[j] z[(i - 1) r + j], j = 0 .. 2r - 1. Taps before a document's start read 0."""
    B, T, N, H = z_BTNH.shape
    r = kernel_JNH.shape[0] // 2
    padded = jnp.pad(widen(z_BTNH), ((0, 0), (r, 0), (0, 0), (0, 0)))
    total = jnp.zeros((B, T // r, N, H), padded.dtype)
    for j in range(2 * r):
        tap = padded[:, j : j + T : r]
        if j < r:
            tap = jnp.where(continues_BI[:, :, None, None], tap, 0.0)
        total = total + kernel_JNH[j][None, None] * tap
    return total.astype(z_BTNH.dtype)


def _blocks(z_BTNH: Array, r: int) -> list[Array]:
    """Return row j of every block of r rows, for each j, in float32."""
    B, T, N, H = z_BTNH.shape
    z = z_BTNH.reshape(B, T // r, r, N, H)
    return [widen(z[:, :, j]) for j in range(r)]


def _later(x: Array) -> Array:
    """Shift rows: row i gets row i - 1, the first gets zeros."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


def _earlier(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))[:, 1:]


@jax.custom_vjp
def pool(
    z_BTNH: Float[Array, "B T N H"], kernel_JNH: Float[Array, "J N H"], continues_BI: Bool[Array, "B I"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B I N H"]]:
    """Return (z, `pool_reference` of z). If later code uses the returned z, one backward pass sums both gradients."""
    forms: dict[str, Any] = {"default": _pool_in_xla}
    if pyramid_gpu.fits(z_BTNH, kernel_JNH.shape[0] // 2):
        forms["cuda"] = _pool_in_kernel
    return z_BTNH, _materialize(on_platform(z_BTNH, kernel_JNH, continues_BI, **forms))


def _pool_in_xla(z_BTNH: Array, kernel_JNH: Array, continues_BI: Array) -> Array:
    """Sum each block with both halves of the kernel, and shift the first sum by one block."""
    r = kernel_JNH.shape[0] // 2
    slots = _blocks(z_BTNH, r)
    weighted = lambda taps: functools.reduce(jnp.add, (k[None, None] * z for k, z in zip(taps, slots, strict=True)))
    before = jnp.where(continues_BI[:, :, None, None], _later(weighted(kernel_JNH[:r])), 0.0)
    return (before + weighted(kernel_JNH[r:])).astype(z_BTNH.dtype)


def _flat(x: Array) -> Array:
    """Merge heads and channels into one axis."""
    return x.reshape(*x.shape[:-2], -1)


def _in_blocks(x_BTNH: Array, r: int) -> Array:
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T // r, r, N * H)


def _pool_in_kernel(z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, *, interpret: bool = False) -> Array:
    r = kernel_JNH.shape[0] // 2
    out_BIW = pyramid_gpu.pool(_in_blocks(z_BTNH, r), _flat(kernel_JNH), continues_BI, interpret=interpret)
    return out_BIW.reshape(*out_BIW.shape[:2], *z_BTNH.shape[2:])


def _pool_fwd(z_BTNH, kernel_JNH, continues_BI):  # type: ignore[no-untyped-def]
    return pool(z_BTNH, kernel_JNH, continues_BI), (z_BTNH, kernel_JNH, continues_BI)


def _pool_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    z_BTNH, kernel_JNH, _ = saved
    forms: dict[str, Any] = {"default": _backward_in_xla}
    if pyramid_gpu.fits(z_BTNH, kernel_JNH.shape[0] // 2):
        forms["cuda"] = _backward_in_kernel
    return *_materialize(on_platform(*saved, *cotangents, **forms)), None


def _backward_in_xla(
    z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, dz_BTNH: Array, dout_BINH: Array
) -> tuple[Array, Array]:
    """Return (gradient of z, including `dz` from its other uses; gradient of the kernel)."""
    r = kernel_JNH.shape[0] // 2
    dout = widen(dout_BINH)
    dnext = _earlier(jnp.where(continues_BI[:, :, None, None], dout, 0.0))  # from the row after each block
    # Broadcast over all rows of a block: a stack interleaves slowly on a GPU.
    own, before = kernel_JNH[None, None, r:], kernel_JNH[None, None, :r]
    pooled = (dout[:, :, None] * own + dnext[:, :, None] * before).reshape(z_BTNH.shape)
    # Merge axes first: with five, XLA on a GPU may transpose them all before summing.
    B, T, N, H = z_BTNH.shape
    z_IrC = widen(z_BTNH).reshape(B * T // r, r, N * H)
    dkernel = [jnp.sum(g.reshape(B * T // r, 1, N * H) * z_IrC, axis=0) for g in (dnext, dout)]
    dz = (widen(dz_BTNH) + pooled).astype(z_BTNH.dtype)
    return dz, jnp.concatenate(dkernel).reshape(kernel_JNH.shape).astype(kernel_JNH.dtype)


def _backward_in_kernel(
    z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, dz_BTNH: Array, dout_BINH: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    z, dz = (_in_blocks(x, kernel_JNH.shape[0] // 2) for x in (z_BTNH, dz_BTNH))
    dz, dkernel = pyramid_gpu.pool_backward(z, _flat(kernel_JNH), continues_BI, dz, _flat(dout_BINH), interpret=interpret)
    return dz.reshape(z_BTNH.shape), dkernel.reshape(kernel_JNH.shape)


pool.defvjp(_pool_fwd, _pool_bwd)
