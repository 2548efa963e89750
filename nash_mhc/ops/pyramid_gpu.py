"""Pooling as GPU kernels (Pallas, Triton):
each token is read once forward, and once backward for both of its gradients.

`pyramid.py` has the same functions in plain arrays. Heads and channels are one axis W here, and tokens are in blocks:
z_BIrW has the r tokens of pooled row i at [b, i].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_LONGEST, _BLOCKS = 32, 512  # rows that a block of threads pools one after another, if that leaves so many blocks
_AT_ONCE = 4096  # numbers that the forward pass holds of each pooled row's tokens, so that registers are enough
# Of the backward pass: tokens and columns of a tile, and how many are summed before the sums are written down.
_TOKENS, _COLUMNS, _TILES = 32, 128, 4


def fits(z_BTNH: Array, ratio: int) -> bool:
    _, T, N, H = z_BTNH.shape
    return T % (ratio * _rows(ratio)) == 0 and N * H % _COLUMNS == 0


def _rows(ratio: int) -> int:
    """Pooled rows of a tile of the backward pass: a power of two."""
    return min(8, 1 << (max(1, _TOKENS // ratio).bit_length() - 1))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def pool(z_BIrW: Array, kernel_JW: Array, continues_BI: Array, *, interpret: bool = False) -> Array:
    """A block of threads walks along pooled rows and holds what the next one needs of the last."""
    B, count, r, W = z_BIrW.shape
    columns = min(W & -W, 1 << ((_AT_ONCE // r).bit_length() - 1))
    rows = min(count & -count, _LONGEST)
    while rows > 4 and B * (count // rows) * (W // columns) < _BLOCKS:
        rows //= 2

    def kernel(z_ref: Any, kernel_ref: Any, continues_ref: Any, out_ref: Any) -> None:
        b, first, here = pl.program_id(0), pl.program_id(1) * rows, pl.ds(pl.program_id(2) * columns, columns)
        taps = [kernel_ref[j, here] for j in range(2 * r)]
        weighted = lambda taps, slots: _sum([k * z for k, z in zip(taps, slots, strict=True)])
        slots_of = lambda i: [_wide(z_ref[b, i, j, here]) for j in range(r)]

        def body(n: Array, before: Array) -> Array:
            i = first + n
            slots = slots_of(i)
            out = weighted(taps[r:], slots) + jnp.where(continues_ref[b, i] != 0, before, 0.0)
            out_ref[b, i, here] = out.astype(out_ref.dtype)
            return weighted(taps[:r], slots)

        # The first row of all does not continue anything: what is read for it is not used.
        lax.fori_loop(0, rows, body, weighted(taps[:r], slots_of(jnp.maximum(first - 1, 0))))

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((B, count, W), z_BIrW.dtype), grid=(B, count // rows, W // columns),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1), name="pool", interpret=interpret,
    )(z_BIrW, kernel_JW, continues_BI.astype(jnp.int32))  # fmt: skip


def pool_backward(
    z_BIrW: Array, kernel_JW: Array, continues_BI: Array, dz_BIrW: Array, dout_BIW: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """(the whole gradient of z, of which `dz` came from elsewhere; that of the kernel).
    All loads of a tile go out at once."""
    B, count, r, W = z_BIrW.shape
    height = _rows(r)
    tiles = next(n for n in range(_TILES, 0, -1) if count % (n * height) == 0)

    def kernel(
        z_ref: Any, kernel_ref: Any, continues_ref: Any, dz_ref: Any, dout_ref: Any, all_ref: Any, sums_ref: Any
    ) -> None:
        b, piece, columns = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * _COLUMNS, _COLUMNS)
        taps = [kernel_ref[j, columns][None, :] for j in range(2 * r)]

        def body(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            first = (piece * tiles + n) * height
            rows, after = pl.ds(first, height), first + 1 + jnp.arange(height)
            inside = jnp.minimum(after, count - 1)
            dout, ahead = _wide(dout_ref[b, rows, columns]), _wide(dout_ref[b, inside, columns])
            z = [_wide(z_ref[b, rows, j, columns]) for j in range(r)]
            dz = [_wide(dz_ref[b, rows, j, columns]) for j in range(r)]
            # What the row after each row sends back to its tokens.
            goes_on = (after < count) & (continues_ref[b, inside] != 0)
            dnext = jnp.where(goes_on[:, None], ahead, 0.0)
            for j in range(r):
                all_ref[b, rows, j, columns] = (dz[j] + taps[r + j] * dout + taps[j] * dnext).astype(all_ref.dtype)
            products = [*(dnext * x for x in z), *(dout * x for x in z)]
            return tuple(s + jnp.sum(p, axis=0) for s, p in zip(sums, products, strict=True))

        zero = jnp.zeros(_COLUMNS, kernel_ref.dtype)
        for j, total in enumerate(lax.fori_loop(0, tiles, body, (zero,) * (2 * r))):
            sums_ref[b, piece, j, columns] = total

    pieces = jax.ShapeDtypeStruct((B, count // height // tiles, 2 * r, W), kernel_JW.dtype)
    dz, sums = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(z_BIrW.shape, z_BIrW.dtype), pieces], grid=(*pieces.shape[:2], W // _COLUMNS),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1), name="pool_backward", interpret=interpret,
    )(z_BIrW, kernel_JW, continues_BI.astype(jnp.int32), dz_BIrW, dout_BIW)  # fmt: skip
    return dz, jnp.sum(sums, axis=(0, 1))
