"""Pooling as GPU kernels (Pallas, Triton): one read of each token forward, and one backward for both gradients.

`pyramid.py` has the plain forms. Heads and channels are one axis W here, and tokens are in blocks: z_BIrW holds the r
tokens of pooled row i at [b, i].
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from nash_mhc.ops.arithmetic import add_up, widen

_LONGEST, _BLOCKS = 32, 512  # most rows that a block of threads pools in sequence; wanted number of blocks
_AT_ONCE = 4096  # elements of a pooled row that the forward pass holds in registers
_COLUMNS, _SLOTS, _ROWS = 128, 4, 16  # backward pass: columns per block, tokens of each row, rows in sequence


def fits(z_BTNH: Array, ratio: int) -> bool:
    _, T, N, H = z_BTNH.shape
    return T % ratio == 0 and N * H % _COLUMNS == 0


def pool(z_BIrW: Array, kernel_JW: Array, continues_BI: Array, *, interpret: bool = False) -> Array:
    """Pool all blocks of tokens. A block of threads loops over rows and carries what the next row needs."""
    B, count, r, W = z_BIrW.shape
    columns = min(W & -W, 1 << ((_AT_ONCE // r).bit_length() - 1))
    rows = min(count & -count, _LONGEST)
    while rows > 4 and B * (count // rows) * (W // columns) < _BLOCKS:
        rows //= 2

    def kernel(z_ref: Any, kernel_ref: Any, continues_ref: Any, out_ref: Any) -> None:
        b, first, here = pl.program_id(0), pl.program_id(1) * rows, pl.ds(pl.program_id(2) * columns, columns)
        taps = [kernel_ref[j, here] for j in range(2 * r)]
        weighted = lambda taps, slots: add_up([k * z for k, z in zip(taps, slots, strict=True)])
        slots_of = lambda i: [widen(z_ref[b, i, j, here]) for j in range(r)]

        def body(n: Array, before: Array) -> Array:
            i = first + n
            slots = slots_of(i)
            out = weighted(taps[r:], slots) + jnp.where(continues_ref[b, i] != 0, before, 0.0)
            out_ref[b, i, here] = out.astype(out_ref.dtype)
            return weighted(taps[:r], slots)

        # Row 0 continues nothing, so the value read for it is masked.
        lax.fori_loop(0, rows, body, weighted(taps[:r], slots_of(jnp.maximum(first - 1, 0))))

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((B, count, W), z_BIrW.dtype), grid=(B, count // rows, W // columns),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1), name="pool", interpret=interpret,
    )(z_BIrW, kernel_JW, continues_BI.astype(jnp.int32))  # fmt: skip


def pool_backward(
    z_BIrW: Array, kernel_JW: Array, continues_BI: Array, dz_BIrW: Array, dout_BIW: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Return (gradient of z, including `dz` from its other uses; gradient of the kernel).

    A block of threads loops over pooled rows with a few tokens of each, so the sums for the kernel fit into registers.
    """
    B, count, r, W = z_BIrW.shape
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

    outs = [(z_BIrW.shape, z_BIrW.dtype), ((B, count // rows, 2 * r, W), kernel_JW.dtype)]
    dz, sums = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(*out) for out in outs], grid=(W // _COLUMNS * groups, count // rows, B),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1), name="pool_backward", interpret=interpret,
    )(z_BIrW, kernel_JW, continues_BI.astype(jnp.int32), dz_BIrW, dout_BIW)  # fmt: skip
    return dz, jnp.sum(sums, axis=(0, 1))
