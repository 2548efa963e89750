"""RMS normalization, alone and with RoPE, as GPU kernels (Pallas, Triton): one pass forward, one backward.

XLA reads the input twice, recomputes a token's angles for every head, and uses some ten kernels for the backward pass.
`norm.py` has the plain forms. Tokens are one axis here, [tokens, D]. A head is split into the halves that form pairs,
[tokens, N, 2, H / 2]. Cosines and sines are per token, [tokens, H / 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from nash_mhc.ops.arithmetic import add_up

_NUMBERS, _WARPS = 4096, 4  # elements of a tile of tokens x heads: 32 per thread
_TILES = 8  # tiles that a block of threads processes in the backward pass before it writes its sums
_COLUMNS, _MOST_CHUNKS, _BLOCK = 1024, 16, 16  # for norms over the width: columns per chunk, chunks, tokens per block


def _tile(heads: int, head_dim: int) -> tuple[int, int]:
    """Return (tokens, heads) of a tile, both powers of two."""
    together = min(heads & -heads, max(1, _NUMBERS // head_dim))
    return max(1, _NUMBERS // (together * head_dim)), together


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether an array of shape [B, T, N, H] divides into whole tiles."""
    B, T, N, H = shape
    return H in (16, 32, 64, 128, 256) and B * T % (_tile(N, H)[0] * _TILES) == 0


def _halves(ref: Any, tokens: Any = slice(None)) -> tuple[Array, Array]:
    """Return both halves of each head, [tokens, heads, H / 2], in float32."""
    wide = jnp.promote_types(ref.dtype, jnp.float32)
    return ref[tokens, :, 0, :].astype(wide), ref[tokens, :, 1, :].astype(wide)


def _mean(a: Array, b: Array) -> Array:
    """Return the mean of each head over both halves."""
    return ((jnp.sum(a, axis=-1) + jnp.sum(b, axis=-1)) / (2 * a.shape[-1]))[..., None]


def _inverse_rms(a: Array, b: Array, eps: float) -> Array:
    return lax.rsqrt(_mean(a * a, b * b) + eps)


def norm_rope(x: Array, scale: Array, cos: Array, sin: Array, eps: float, *, interpret: bool = False) -> Array:
    """Return each head, RMS-normalized, times the scale [2, H / 2], and rotated by the angles of its token."""
    tokens, N, _, half = x.shape
    rows, heads = _tile(N, 2 * half)

    def kernel(x_ref: Any, scale_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        a, b = _halves(x_ref)
        inverse = _inverse_rms(a, b, eps)
        a, b = a * inverse * scale_ref[0, :][None, None], b * inverse * scale_ref[1, :][None, None]
        cos, sin = cos_ref[...][:, None], sin_ref[...][:, None]
        out_ref[:, :, 0, :] = (a * cos - b * sin).astype(out_ref.dtype)
        out_ref[:, :, 1, :] = (b * cos + a * sin).astype(out_ref.dtype)

    of_heads = pl.BlockSpec((rows, heads, 2, half), lambda i, n: (i, n, 0, 0))
    of_tokens = pl.BlockSpec((rows, half), lambda i, n: (i, 0))
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tokens // rows, N // heads),
        in_specs=[of_heads, pl.BlockSpec(scale.shape, lambda i, n: (0, 0)), of_tokens, of_tokens], out_specs=of_heads,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="norm_and_rope", interpret=interpret,
    )(x, scale, cos, sin)  # fmt: skip


def norm_rope_backward(
    x: Array, scale: Array, cos: Array, sin: Array, douts: Sequence[Array], eps: float, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Return the gradients of x and of the scale, from the sum of the output gradients `douts`."""
    tokens, N, _, half = x.shape
    rows, heads = _tile(N, 2 * half)
    blocks = tokens // (rows * _TILES), N // heads

    def kernel(x_ref: Any, scale_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        *dout_refs, dx_ref, dscale_ref = refs
        scale_a, scale_b = scale_ref[0, :][None, None], scale_ref[1, :][None, None]

        def body(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            here = pl.ds(n * rows, rows)
            a, b = _halves(x_ref, here)
            da, db = (add_up(halves) for halves in zip(*(_halves(ref, here) for ref in dout_refs), strict=True))
            cos, sin = cos_ref[here, :][:, None], sin_ref[here, :][:, None]
            inverse = _inverse_rms(a, b, eps)
            a, b = a * inverse, b * inverse
            # The transpose of a rotation is the inverse rotation, with the same amplitude.
            da, db = da * cos + db * sin, db * cos - da * sin
            sums = sums[0] + da * a, sums[1] + db * b
            da, db = da * scale_a, db * scale_b
            along = _mean(da * a, db * b)
            dx_ref[here, :, 0, :] = ((da - a * along) * inverse).astype(dx_ref.dtype)
            dx_ref[here, :, 1, :] = ((db - b * along) * inverse).astype(dx_ref.dtype)
            return sums

        zero = jnp.zeros((rows, heads, half), jnp.promote_types(x.dtype, jnp.float32))
        for i, total in enumerate(lax.fori_loop(0, _TILES, body, (zero, zero))):
            dscale_ref[i, :] = jnp.sum(jnp.sum(total, axis=0), axis=0)

    of_heads = pl.BlockSpec((rows * _TILES, heads, 2, half), lambda i, n: (i, n, 0, 0))
    of_tokens = pl.BlockSpec((rows * _TILES, half), lambda i, n: (i, 0))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dx, dscale = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((*blocks, 2, half), wide)], grid=blocks,
        in_specs=[of_heads, pl.BlockSpec(scale.shape, lambda i, n: (0, 0)), of_tokens, of_tokens, *[of_heads] * len(douts)],
        out_specs=[of_heads, pl.BlockSpec((None, None, 2, half), lambda i, n: (i, n, 0, 0))],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="norm_and_rope_back", interpret=interpret,
    )(x, scale, cos, sin, *douts)  # fmt: skip
    return dx, jnp.sum(dscale, axis=(0, 1))


class _Cut(NamedTuple):
    """Tokens processed at once, and the chunks of columns of each."""

    rows: int
    columns: int
    chunks: int

    @staticmethod
    def of(width: int) -> _Cut:
        columns = min(width & -width, _COLUMNS)
        return _Cut(min(_COLUMNS // columns, _BLOCK), columns, width // columns)


def fits_width(tokens: int, width: int) -> bool:
    """Return whether an array [tokens, width] divides into whole blocks and few enough chunks."""
    return tokens % _BLOCK == 0 and _Cut.of(width).chunks <= _MOST_CHUNKS


def norm(x: Array, scale_D: Array, eps: float, *, interpret: bool = False) -> Array:
    """Return each token, RMS-normalized, times the scale."""
    tokens, width = x.shape
    cut, wide = _Cut.of(width), jnp.promote_types(x.dtype, jnp.float32)

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        first = pl.program_id(0) * _BLOCK
        chunks = [pl.ds(i * cut.columns, cut.columns) for i in range(cut.chunks)]

        def body(n: Array, _: None) -> None:
            at = pl.ds(first + n * cut.rows, cut.rows)
            held = [x_ref[at, here].astype(wide) for here in chunks]
            inverse = lax.rsqrt(add_up([jnp.sum(a * a, axis=1) for a in held]) / width + eps)[:, None]
            for here, a in zip(chunks, held, strict=True):
                out_ref[at, here] = (a * inverse * scale_ref[here][None]).astype(out_ref.dtype)

        lax.fori_loop(0, _BLOCK // cut.rows, body, None)

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tokens // _BLOCK,), interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="rms_norm",
    )(x, scale_D)  # fmt: skip


def norm_backward(x: Array, scale_D: Array, dout: Array, eps: float, *, interpret: bool = False) -> tuple[Array, Array]:
    """Return the gradients of x and of the scale."""
    tokens, width = x.shape
    cut, wide, blocks = _Cut.of(width), jnp.promote_types(x.dtype, jnp.float32), tokens // _BLOCK

    def kernel(x_ref: Any, scale_ref: Any, dout_ref: Any, dx_ref: Any, dscale_ref: Any) -> None:
        block = pl.program_id(0)
        chunks = [pl.ds(i * cut.columns, cut.columns) for i in range(cut.chunks)]

        def body(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = pl.ds(block * _BLOCK + n * cut.rows, cut.rows)
            held = [x_ref[at, here].astype(wide) for here in chunks]
            d = [dout_ref[at, here].astype(wide) for here in chunks]
            inverse = lax.rsqrt(add_up([jnp.sum(a * a, axis=1) for a in held]) / width + eps)[:, None]
            held = [a * inverse for a in held]
            sums = tuple(s + a * b for s, a, b in zip(sums, held, d, strict=True))
            d = [a * scale_ref[here][None] for a, here in zip(d, chunks, strict=True)]
            along = (add_up([jnp.sum(a * b, axis=1) for a, b in zip(held, d, strict=True)]) / width)[:, None]
            for here, a, b in zip(chunks, held, d, strict=True):
                dx_ref[at, here] = ((b - a * along) * inverse).astype(dx_ref.dtype)
            return sums

        zeros = (jnp.zeros((cut.rows, cut.columns), wide),) * cut.chunks
        for here, total in zip(chunks, lax.fori_loop(0, _BLOCK // cut.rows, body, zeros), strict=True):
            dscale_ref[block, here] = jnp.sum(total, axis=0)

    dx, dscale = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((blocks, width), wide)], grid=(blocks,),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="rms_norm_back", interpret=interpret,
    )(x, scale_D, dout)  # fmt: skip
    return dx, jnp.sum(dscale, axis=0)
