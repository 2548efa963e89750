"""The short convolution as GPU kernels (Pallas, Triton): one pass forward, and one backward for both gradients.

XLA needs several passes for the gradients of the taps. `conv.py` has the plain form. Tokens are one axis here,
[tokens, D]. Bit j of a token's `same` says whether the token j before it is in the same document.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from nash_mhc.ops.arithmetic import add_up

_ROWS, _COLUMNS, _WARPS = 4, 256, 4  # tokens and channels of a tile: 8 numbers a thread, a load of 16 bytes each
_TILES = 32  # tiles that a block of threads processes in sequence


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether an array of shape [B, T, D] divides into whole tiles."""
    B, T, D = shape
    return B * T % (_ROWS * _TILES) == 0 and D % _columns(D) == 0 and _columns(D) >= 32


def _columns(width: int) -> int:
    return min(width & -width, _COLUMNS)


def _shifted(ref: Any, at: Array, by: int, tokens: int, here: Any) -> Array:
    """Return rows `at + by` in float32, clipped to the array; the caller masks clipped rows."""
    rows = jnp.clip(at + by, 0, tokens - 1) if by else at
    return ref[rows, here].astype(jnp.promote_types(ref.dtype, jnp.float32))


def _is_same(same_ref: Any, at: Array, j: int, tokens: int) -> Array:
    """Return whether tokens `at` and the tokens j before them are in the same document."""
    return ((same_ref[jnp.clip(at, 0, tokens - 1)] >> j) & 1 != 0)[:, None]


def conv(x: Array, taps: Array, same: Array, *, interpret: bool = False) -> Array:
    """Return sum_j taps[j] x[t - j] for every token t."""
    (tokens, width), J, columns = x.shape, taps.shape[0], _columns(x.shape[1])

    def kernel(x_ref: Any, taps_ref: Any, same_ref: Any, out_ref: Any) -> None:
        block, here = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        taps = [taps_ref[j, here][None] for j in range(J)]

        def body(n: Array, _: None) -> None:
            at = (block * _TILES + n) * _ROWS + jnp.arange(_ROWS)
            terms = [taps[0] * _shifted(x_ref, at, 0, tokens, here)]
            for j in range(1, J):
                terms.append(taps[j] * jnp.where(_is_same(same_ref, at, j, tokens), _shifted(x_ref, at, -j, tokens, here), 0.0))
            out_ref[at, here] = add_up(terms).astype(out_ref.dtype)

        lax.fori_loop(0, _TILES, body, None)

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tokens // (_ROWS * _TILES), width // columns),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="short_conv", interpret=interpret,
    )(x, taps, same)  # fmt: skip


def conv_backward(x: Array, taps: Array, same: Array, dout: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """Return the gradients of the tokens and of the taps."""
    (tokens, width), J, columns = x.shape, taps.shape[0], _columns(x.shape[1])
    blocks, wide = tokens // (_ROWS * _TILES), jnp.promote_types(x.dtype, jnp.float32)

    def kernel(x_ref: Any, taps_ref: Any, same_ref: Any, dout_ref: Any, dx_ref: Any, dtaps_ref: Any) -> None:
        block, here = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        taps = [taps_ref[j, here][None] for j in range(J)]

        def body(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = (block * _TILES + n) * _ROWS + jnp.arange(_ROWS)
            dout = _shifted(dout_ref, at, 0, tokens, here)
            terms, products = [taps[0] * dout], [dout * _shifted(x_ref, at, 0, tokens, here)]
            for j in range(1, J):
                ahead = (at + j < tokens)[:, None] & _is_same(same_ref, at + j, j, tokens)
                terms.append(taps[j] * jnp.where(ahead, _shifted(dout_ref, at, j, tokens, here), 0.0))
                before = jnp.where(_is_same(same_ref, at, j, tokens), _shifted(x_ref, at, -j, tokens, here), 0.0)
                products.append(dout * before)
            dx_ref[at, here] = add_up(terms).astype(dx_ref.dtype)
            return tuple(s + p for s, p in zip(sums, products, strict=True))

        zero = jnp.zeros((_ROWS, columns), wide)
        for j, total in enumerate(lax.fori_loop(0, _TILES, body, (zero,) * J)):
            dtaps_ref[block, j, here] = jnp.sum(total, axis=0)

    dx, dtaps = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((blocks, J, width), wide)],
        grid=(blocks, width // columns), name="short_conv_back", interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
    )(x, taps, same, dout)  # fmt: skip
    return dx, jnp.sum(dtaps, axis=0)
