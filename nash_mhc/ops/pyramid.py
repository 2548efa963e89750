"""Causal pooling of keys and values into coarser scales, per head and document.

Row i of a scale with stride s depends on tokens up to (i + 1) s - 1. The GPU kernels (Pallas, Triton) read each token
once forward, and once backward for both gradients.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.arithmetic import add_up, widen
from nash_mhc.ops.platform import on_platform, run_kernel

# Without a barrier, XLA would pool again, in float32, in every consumer of the result.
_materialize = lax.optimization_barrier

_LONGEST, _BLOCKS = 32, 512  # most rows that a block of threads pools in sequence; wanted number of blocks
_AT_ONCE = 4096  # elements of a pooled row that the forward pass holds in registers
_COLUMNS, _SLOTS, _ROWS = 128, 4, 16  # backward pass: columns per block, tokens of each row, rows in sequence


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


@jax.custom_vjp
def pool(
    z_BTNH: Float[Array, "B T N H"], kernel_JNH: Float[Array, "J N H"], continues_BI: Bool[Array, "B I"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B I N H"]]:
    """Return (z, `pool_reference` of z). If later code uses the returned z, one backward pass sums both gradients."""
    operands, fits = (z_BTNH, kernel_JNH, continues_BI), fits_kernel(z_BTNH, kernel_JNH)
    return z_BTNH, _materialize(on_platform(*operands, default=_pool_in_xla, cuda=_pool_in_kernel, fits=fits))


def _pool_fwd(z_BTNH, kernel_JNH, continues_BI):  # type: ignore[no-untyped-def]
    return pool(z_BTNH, kernel_JNH, continues_BI), (z_BTNH, kernel_JNH, continues_BI)


def _pool_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    operands, fits = (*saved, *cotangents), fits_kernel(*saved[:2])
    return *_materialize(on_platform(*operands, default=_backward_in_xla, cuda=_backward_in_kernel, fits=fits)), None


pool.defvjp(_pool_fwd, _pool_bwd)


def _pool_in_xla(z_BTNH: Array, kernel_JNH: Array, continues_BI: Array) -> Array:
    """Sum each block with both halves of the kernel, and shift the first sum by one block."""
    B, T, N, H = z_BTNH.shape
    r = kernel_JNH.shape[0] // 2
    z = z_BTNH.reshape(B, T // r, r, N, H)
    slots = [widen(z[:, :, j]) for j in range(r)]  # row j of every block
    weighted = lambda taps: functools.reduce(jnp.add, (k[None, None] * z for k, z in zip(taps, slots, strict=True)))
    later = jnp.pad(weighted(kernel_JNH[:r]), ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    before = jnp.where(continues_BI[:, :, None, None], later, 0.0)
    return (before + weighted(kernel_JNH[r:])).astype(z_BTNH.dtype)


def _backward_in_xla(
    z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, dz_BTNH: Array, dout_BINH: Array
) -> tuple[Array, Array]:
    r = kernel_JNH.shape[0] // 2
    dout = widen(dout_BINH)
    # From the row after each block.
    dnext = jnp.pad(jnp.where(continues_BI[:, :, None, None], dout, 0.0), ((0, 0), (0, 1), (0, 0), (0, 0)))[:, 1:]
    # Broadcast over the tokens of a block. jnp.stack would interleave two arrays in memory, which is slow on a GPU.
    own, before = kernel_JNH[None, None, r:], kernel_JNH[None, None, :r]
    pooled = (dout[:, :, None] * own + dnext[:, :, None] * before).reshape(z_BTNH.shape)
    # Merge axes first (X: blocks, W: heads x channels): with five, XLA on a GPU may transpose them all before summing.
    B, T, N, H = z_BTNH.shape
    z_XrW = widen(z_BTNH).reshape(B * T // r, r, N * H)
    dkernel = [jnp.sum(g.reshape(B * T // r, 1, N * H) * z_XrW, axis=0) for g in (dnext, dout)]
    dz = (widen(dz_BTNH) + pooled).astype(z_BTNH.dtype)
    return dz, jnp.concatenate(dkernel).reshape(kernel_JNH.shape).astype(kernel_JNH.dtype)


# --- GPU kernels. Heads and channels are one axis W. z_BIrW holds the r tokens of pooled row i at [b, i]. -------------


def fits_kernel(z_BTNH: Array, kernel_JNH: Array) -> bool:
    _, T, N, H = z_BTNH.shape
    return T % (kernel_JNH.shape[0] // 2) == 0 and N * H % _COLUMNS == 0


def _pool_in_kernel(z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, *, interpret: bool = False) -> Array:
    """Pool all blocks of tokens. A block of threads loops over rows and carries what the next row needs."""
    (B, T, N, H), r = z_BTNH.shape, kernel_JNH.shape[0] // 2
    count, W = T // r, N * H
    columns = min(W & -W, 1 << ((_AT_ONCE // r).bit_length() - 1))
    rows = min(count & -count, _LONGEST)
    while rows > 4 and B * (count // rows) * (W // columns) < _BLOCKS:
        rows //= 2

    def kernel(z_ref: Any, kernel_ref: Any, continues_ref: Any, out_ref: Any) -> None:
        b, first, here = pl.program_id(0), pl.program_id(1) * rows, pl.ds(pl.program_id(2) * columns, columns)
        taps = [kernel_ref[j, here] for j in range(2 * r)]
        weighted = lambda taps, slots: add_up([k * z for k, z in zip(taps, slots, strict=True)])
        slots_of = lambda i: [widen(z_ref[b, i, j, here]) for j in range(r)]

        def body(n: Array, carried_sum: Array) -> Array:
            i = first + n
            slots = slots_of(i)
            out = weighted(taps[r:], slots) + jnp.where(continues_ref[b, i] != 0, carried_sum, 0.0)
            out_ref[b, i, here] = out.astype(out_ref.dtype)
            return weighted(taps[:r], slots)

        # Row 0 continues nothing, so the value read for it is masked.
        lax.fori_loop(0, rows, body, weighted(taps[:r], slots_of(jnp.maximum(first - 1, 0))))

    args = z_BTNH.reshape(B, count, r, W), kernel_JNH.reshape(2 * r, W), continues_BI.astype(jnp.int32)
    outs, grid = [((B, count, W), z_BTNH.dtype)], (B, count // rows, W // columns)
    (out_BIW,) = run_kernel("pool", kernel, args, outs, grid=grid, warps=4, interpret=interpret)
    return out_BIW.reshape(B, count, N, H)


def _backward_in_kernel(
    z_BTNH: Array, kernel_JNH: Array, continues_BI: Array, dz_BTNH: Array, dout_BINH: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Return (gradient of z, including `dz` from its other uses; gradient of the kernel).

    A block of threads loops over pooled rows with a few tokens of each, so the sums for the kernel fit into registers.
    """
    (B, T, N, H), r = z_BTNH.shape, kernel_JNH.shape[0] // 2
    count, W = T // r, N * H
    rows, slots = min(count & -count, _ROWS), math.gcd(r, _SLOTS)
    groups = r // slots

    def kernel(
        z_ref: Any, kernel_ref: Any, continues_ref: Any, dz_ref: Any, dout_ref: Any, all_ref: Any, sums_ref: Any
    ) -> None:
        # Token groups vary fastest, so the gradients of their rows are still cached.
        group, piece, b = pl.program_id(0) % groups, pl.program_id(1), pl.program_id(2)
        here = pl.ds(pl.program_id(0) // groups * _COLUMNS, _COLUMNS)
        mine = [group * slots + j for j in range(slots)]
        before, own = ([kernel_ref[half + j, here] for j in mine] for half in (0, r))

        def body(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            i = piece * rows + n
            after = jnp.minimum(i + 1, count - 1)
            dout, ahead = widen(dout_ref[b, i, here]), widen(dout_ref[b, after, here])
            z, dz = ([widen(ref[b, i, j, here]) for j in mine] for ref in (z_ref, dz_ref))
            # From the next row to the tokens of this one.
            dnext = jnp.where((i + 1 < count) & (continues_ref[b, after] != 0), ahead, 0.0)
            for j, d, k_own, k_before in zip(mine, dz, own, before, strict=True):
                all_ref[b, i, j, here] = (d + k_own * dout + k_before * dnext).astype(all_ref.dtype)
            products = [*(dnext * x for x in z), *(dout * x for x in z)]
            return tuple(s + p for s, p in zip(sums, products, strict=True))

        sums = lax.fori_loop(0, rows, body, (jnp.zeros(_COLUMNS, kernel_ref.dtype),) * (2 * slots))
        for j, total in zip([*mine, *(r + j for j in mine)], sums, strict=True):
            sums_ref[b, piece, j, here] = total

    in_blocks = lambda x: x.reshape(B, count, r, W)
    args = (
        in_blocks(z_BTNH), kernel_JNH.reshape(2 * r, W), continues_BI.astype(jnp.int32), in_blocks(dz_BTNH),
        dout_BINH.reshape(B, count, W),
    )  # fmt: skip
    outs = [((B, count, r, W), z_BTNH.dtype), ((B, count // rows, 2 * r, W), kernel_JNH.dtype)]
    grid = W // _COLUMNS * groups, count // rows, B
    dz, sums = run_kernel("pool_backward", kernel, args, outs, grid=grid, warps=2, interpret=interpret)
    return dz.reshape(z_BTNH.shape), jnp.sum(sums, axis=(0, 1)).reshape(kernel_JNH.shape)
