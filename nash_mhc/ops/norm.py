"""RMS normalization, alone and followed by rotary position embedding, with explicit gradients.

XLA on a GPU reads the input twice, recomputes a token's angles for every head, and uses some ten kernels for the
backward pass. The GPU kernels (Pallas, Triton) use one pass forward and one backward.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from nash_mhc.ops.arithmetic import add_up, wide_dtype, widen
from nash_mhc.ops.platform import on_platform, run_kernel
from nash_mhc.ops.rope import Rotation, cos_and_sin, rope

# A barrier materializes reductions, and results in their own dtype. Fused into later code (a rotation, a transposed
# copy), a GPU recomputed reductions for every element and wrote float32 instead of bfloat16.
_materialize = lax.optimization_barrier

_TILE_SIZE, _WARPS = 4096, 4  # elements of a tile of tokens x heads: 32 per thread
_TILES = 8  # tiles that a block of threads processes in the backward pass before it writes its sums, at least
_COLUMNS, _MOST_CHUNKS, _BLOCK = 1024, 16, 16  # for norms over the width: columns per chunk, chunks, tokens per block


def _inverse_rms(x: Array, eps: float) -> Array:
    return _materialize(lax.rsqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps))


def _aligned(scale_D: Array, x: Array) -> Array:
    return scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)


def rms_norm_reference(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Compute `rms_norm` with automatic gradients."""
    rms = jnp.sqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps)
    return (widen(x) / rms * _aligned(scale_D, x)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Return x / rms(x) * scale, computed in float32, in the dtype of x."""
    return _rms_norm_fwd(x, scale_D, eps)[0]


def _rms_norm_fwd(x, scale_D, eps):  # type: ignore[no-untyped-def]
    saved = x, scale_D, _inverse_rms(x, eps)  # the kernels compute the rms themselves; XLA then drops this one
    in_kernel = functools.partial(_norm_in_kernel, eps)
    return _materialize(on_platform(*saved, default=_norm_in_xla, cuda=in_kernel, fits=_fits_norm(x))), saved


def _rms_norm_bwd(eps, saved, dout):  # type: ignore[no-untyped-def]
    in_kernel = functools.partial(_norm_backward_in_kernel, eps)
    dx, dscale = on_platform(*saved, dout, default=_norm_backward_in_xla, cuda=in_kernel, fits=_fits_norm(dout))
    return _materialize(dx), dscale  # every residual stream reads dx: compute it once


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def _norm_in_xla(x: Array, scale_D: Array, inverse: Array) -> Array:
    return (widen(x) * inverse * _aligned(scale_D, x)).astype(x.dtype)


def _norm_backward_in_xla(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    return _norm_gradients(x, scale_D, inverse, widen(_materialize(dout)))


def _norm_gradients(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    normed = widen(x) * inverse
    dnormed = dout * _aligned(scale_D, x)
    along = _materialize(jnp.mean(dnormed * normed, axis=-1, keepdims=True))
    dx = ((dnormed - normed * along) * inverse).astype(x.dtype)
    return dx, jnp.sum(dout * normed, axis=tuple(range(x.ndim - 1))).astype(scale_D.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def norm_and_rope_copies(
    x_BTNH: Float[Array, "B T N H"], scale_H: Float[Array, "H"], positions_BT: Int[Array, "B T"], eps: float, by: Rotation,
    copies: int,
) -> tuple[Float[Array, "B T N H"], ...]:  # fmt: skip
    """Return rope(rms_norm(x)) once for each reader, so that one pass of the backward sums their gradients.

    After the reduction, this is one pass without rounding in between.
    """
    return _norm_rope_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies)[0]


def _norm_rope_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies):  # type: ignore[no-untyped-def]
    saved = x_BTNH, scale_H, positions_BT, _inverse_rms(x_BTNH, eps)
    in_xla, in_kernel = functools.partial(_norm_rope_in_xla, by), functools.partial(_norm_rope_in_kernel, eps, by)
    out_BTNH = on_platform(*saved, default=in_xla, cuda=in_kernel, fits=_fits_norm_rope(x_BTNH.shape))
    return (_materialize(out_BTNH),) * copies, saved


def _norm_rope_bwd(eps, by, copies, saved, douts):  # type: ignore[no-untyped-def]
    in_xla = functools.partial(_norm_rope_backward_in_xla, by)
    in_kernel = functools.partial(_norm_rope_backward_in_kernel, eps, by)
    return *on_platform(*saved, *douts, default=in_xla, cuda=in_kernel, fits=_fits_norm_rope(saved[0].shape)), None


norm_and_rope_copies.defvjp(_norm_rope_fwd, _norm_rope_bwd)


def _norm_rope_in_xla(by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array) -> Array:
    normed = widen(x_BTNH) * inverse_BTN1 * _aligned(scale_H, x_BTNH)
    return rope(normed, positions_BT, by).astype(x_BTNH.dtype)


def _norm_rope_backward_in_xla(
    by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array, *douts_BTNH: Array
) -> tuple[Array, Array]:
    # The transpose of a rotation is the inverse rotation, with the same amplitude.
    dout_BTNH = functools.reduce(jnp.add, map(widen, _materialize(douts_BTNH)))
    dnormed_BTNH = rope(dout_BTNH, -positions_BT, by)
    return _norm_gradients(x_BTNH, scale_H, inverse_BTN1, dnormed_BTNH)


# --- GPU kernels of the norm over the width, with tokens in one axis: [tokens, D] ------------------------------------


class _Cut(NamedTuple):
    """Tokens processed at once, and the chunks of columns of each."""

    rows: int
    columns: int
    chunks: int

    @staticmethod
    def of(width: int) -> _Cut:
        columns = min(width & -width, _COLUMNS)
        return _Cut(min(_COLUMNS // columns, _BLOCK), columns, width // columns)

    def slices(self) -> list[Any]:
        return [pl.ds(i * self.columns, self.columns) for i in range(self.chunks)]


def _fits_norm(x: Array) -> bool:
    """Return whether x divides into whole blocks and few chunks, on one device: the sharding of x is unknown here."""
    tokens, width = math.prod(x.shape[:-1]), x.shape[-1]
    is_one_device = jax.sharding.get_abstract_mesh().size <= 1
    return is_one_device and tokens % _BLOCK == 0 and _Cut.of(width).chunks <= _MOST_CHUNKS


def _norm_in_kernel(eps: float, x: Array, scale_D: Array, _: Array, *, interpret: bool = False) -> Array:
    width = x.shape[-1]
    cut, wide, tokens = _Cut.of(width), wide_dtype(x.dtype), x.size // width

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        first, chunks = pl.program_id(0) * _BLOCK, cut.slices()

        def body(n: Array, _: None) -> None:
            at = pl.ds(first + n * cut.rows, cut.rows)
            held = [x_ref[at, here].astype(wide) for here in chunks]
            inverse = lax.rsqrt(add_up([jnp.sum(a * a, axis=1) for a in held]) / width + eps)[:, None]
            for here, a in zip(chunks, held, strict=True):
                out_ref[at, here] = (a * inverse * scale_ref[here][None]).astype(out_ref.dtype)

        lax.fori_loop(0, _BLOCK // cut.rows, body, None)

    args, outs = (x.reshape(tokens, width), scale_D), [((tokens, width), x.dtype)]
    (out,) = run_kernel("rms_norm", kernel, args, outs, grid=(tokens // _BLOCK,), warps=_WARPS, interpret=interpret)
    return out.reshape(x.shape)


def _norm_backward_in_kernel(
    eps: float, x: Array, scale_D: Array, _: Array, dout: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    width = x.shape[-1]
    cut, wide, tokens = _Cut.of(width), wide_dtype(x.dtype), x.size // width
    blocks = tokens // _BLOCK

    def kernel(x_ref: Any, scale_ref: Any, dout_ref: Any, dx_ref: Any, dscale_ref: Any) -> None:
        block, chunks = pl.program_id(0), cut.slices()

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

    args = x.reshape(tokens, width), scale_D, dout.reshape(tokens, width)
    outs = [((tokens, width), x.dtype), ((blocks, width), wide)]
    dx, dscale = run_kernel("rms_norm_back", kernel, args, outs, grid=(blocks,), warps=_WARPS, interpret=interpret)
    return dx.reshape(x.shape), jnp.sum(dscale, axis=0).astype(scale_D.dtype)


# --- GPU kernels of norm and rope, with heads in the two halves that form pairs: [tokens, N, 2, H / 2] ---------------


def _tile(heads: int, head_dim: int) -> tuple[int, int]:
    """Return (tokens, heads) of a tile, both powers of two."""
    together = min(heads & -heads, max(1, _TILE_SIZE // head_dim))
    return max(1, _TILE_SIZE // (together * head_dim)), together


def _tiles_along_tokens(heads: int, head_dim: int) -> int:
    """Return the tiles along the tokens that a block of threads processes in the backward pass."""
    return max(1, _TILES // (heads // _tile(heads, head_dim)[1]))


def _fits_norm_rope(shape: tuple[int, ...]) -> bool:
    """Return whether an array of shape [B, T, N, H] divides into whole tiles."""
    B, T, N, H = shape
    return H in (16, 32, 64, 128, 256) and B * T % (_tile(N, H)[0] * _tiles_along_tokens(N, H)) == 0


def _operands(x_BTNH: Array, scale_H: Array, positions_BT: Array, by: Rotation) -> tuple[Array, Array, Array, Array]:
    """Return x and scale with each head in two halves, and the cosines and sines of each token, shared by all heads."""
    B, T, N, H = x_BTNH.shape
    cos, sin = (each.reshape(B * T, H // 2) for each in cos_and_sin(positions_BT, H, by))
    return x_BTNH.reshape(B * T, N, 2, H // 2), scale_H.reshape(2, H // 2), cos, sin


def _blocks(rows: int, heads: int, half: int) -> tuple[pl.BlockSpec, list[pl.BlockSpec]]:
    """Return the blocks of an array of heads, and of x, scale, cos and sin. A block has all heads of its tokens."""
    of_heads = pl.BlockSpec((rows, heads, 2, half), lambda i: (i, 0, 0, 0))
    of_tokens = pl.BlockSpec((rows, half), lambda i: (i, 0))
    return of_heads, [of_heads, pl.BlockSpec((2, half), lambda i: (0, 0)), of_tokens, of_tokens]


def _halves(ref: Any, tokens: Any, heads: Any) -> tuple[Array, Array]:
    """Return both halves of these heads, [tokens, heads, H / 2], in float32."""
    return widen(ref[tokens, heads, 0, :]), widen(ref[tokens, heads, 1, :])


def _mean(a: Array, b: Array) -> Array:
    """Return the mean of each head over both halves."""
    return ((jnp.sum(a, axis=-1) + jnp.sum(b, axis=-1)) / (2 * a.shape[-1]))[..., None]


def _norm_rope_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *, interpret: bool = False
) -> Array:
    args = _operands(x_BTNH, scale_H, positions_BT, by)
    (tokens, N), half = args[0].shape[:2], scale_H.shape[0] // 2
    rows, heads = _tile(N, 2 * half)

    def kernel(x_ref: Any, scale_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        cos, sin = cos_ref[...][:, None], sin_ref[...][:, None]

        def body(n: Array, _: None) -> None:
            at = pl.ds(n * heads, heads)
            a, b = _halves(x_ref, slice(None), at)
            inverse = lax.rsqrt(_mean(a * a, b * b) + eps)
            a, b = a * inverse * scale_ref[0, :][None, None], b * inverse * scale_ref[1, :][None, None]
            out_ref[:, at, 0, :] = (a * cos - b * sin).astype(out_ref.dtype)
            out_ref[:, at, 1, :] = (b * cos + a * sin).astype(out_ref.dtype)

        lax.fori_loop(0, N // heads, body, None)

    of_heads, in_specs = _blocks(rows, N, half)
    (out,) = run_kernel(
        "norm_and_rope", kernel, args, [(args[0].shape, x_BTNH.dtype)], grid=(tokens // rows,), warps=_WARPS,
        in_specs=in_specs, out_specs=[of_heads], interpret=interpret,
    )  # fmt: skip
    return out.reshape(x_BTNH.shape)


def _norm_rope_backward_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *douts_BTNH: Array,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    args = _operands(x_BTNH, scale_H, positions_BT, by)
    (tokens, N), half = args[0].shape[:2], scale_H.shape[0] // 2
    rows, heads = _tile(N, 2 * half)
    groups, tiles, wide = N // heads, _tiles_along_tokens(N, 2 * half), wide_dtype(x_BTNH.dtype)
    blocks = tokens // (rows * tiles)

    def kernel(x_ref: Any, scale_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        *dout_refs, dx_ref, dscale_ref = refs
        scale_a, scale_b = scale_ref[0, :][None, None], scale_ref[1, :][None, None]

        def body(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            here, at = pl.ds(lax.div(n, groups) * rows, rows), pl.ds(lax.rem(n, groups) * heads, heads)
            a, b = _halves(x_ref, here, at)
            da, db = (add_up(halves) for halves in zip(*(_halves(ref, here, at) for ref in dout_refs), strict=True))
            cos, sin = cos_ref[here, :][:, None], sin_ref[here, :][:, None]
            inverse = lax.rsqrt(_mean(a * a, b * b) + eps)
            a, b = a * inverse, b * inverse
            # The transpose of a rotation is the inverse rotation, with the same amplitude.
            da, db = da * cos + db * sin, db * cos - da * sin
            sums = sums[0] + da * a, sums[1] + db * b
            da, db = da * scale_a, db * scale_b
            along = _mean(da * a, db * b)
            dx_ref[here, at, 0, :] = ((da - a * along) * inverse).astype(dx_ref.dtype)
            dx_ref[here, at, 1, :] = ((db - b * along) * inverse).astype(dx_ref.dtype)
            return sums

        zero = jnp.zeros((rows, heads, half), wide)
        for i, total in enumerate(lax.fori_loop(0, tiles * groups, body, (zero, zero))):
            dscale_ref[i, :] = jnp.sum(jnp.sum(total, axis=0), axis=0)

    of_heads, in_specs = _blocks(rows * tiles, N, half)
    dx, dscale = run_kernel(
        "norm_and_rope_back", kernel, (*args, *(dout.reshape(args[0].shape) for dout in douts_BTNH)),
        [(args[0].shape, x_BTNH.dtype), ((blocks, 2, half), wide)], grid=(blocks,), warps=_WARPS, interpret=interpret,
        in_specs=[*in_specs, *[of_heads] * len(douts_BTNH)],
        out_specs=[of_heads, pl.BlockSpec((None, 2, half), lambda i: (i, 0, 0))],
    )  # fmt: skip
    return dx.reshape(x_BTNH.shape), jnp.sum(dscale, axis=0).reshape(scale_H.shape).astype(scale_H.dtype)
