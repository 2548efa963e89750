"""Passes over residual streams as GPU kernels (Pallas, Triton): each loads a token's coefficients and streams once.

XLA's fusions load up to 24 coefficients for every element, and split the reductions of the backward pass into many
kernels that each read the streams. `residual_streams.py` has the plain forms. Inside the kernels, streams are
[tokens, D], and a token's coefficients one row of [tokens, M]: pre, post, then res by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from nash_mhc.ops.arithmetic import add_up, product, wide_dtype, widen
from nash_mhc.ops.platform import run_kernel

_ROWS, _COLUMNS, _WARPS = 4, 256, 4  # of a block: the fastest on an H200 at D 2048 (docs/experiments.md)
_MATRIX_COLUMNS = 32  # columns of a matmul operand, padded to a power of two for Triton (24 with four streams)
_MAP_TOKENS = 128  # tokens per block of the maps: one per thread


class Tiles(NamedTuple):
    """Tokens and columns of a tile, tokens and warps of a block, pipeline stages."""

    rows: int
    columns: int
    block: int
    warps: int
    stages: int


# The fastest on an H200 at D 640 and 2048 (docs/experiments.md).
_GRADIENT = Tiles(rows=32, columns=64, block=2048, warps=4, stages=3)
_FEWEST_BLOCKS = 1000  # of the gradient: with fewer, most of the device idles during the last ones
_WIDEST, _BLOCK = 1024, 16  # columns per chunk and tokens per block of kernels that hold all columns of a token
_MOST_CHUNKS = 8


def _gradient_tiles(tokens: int, width: int) -> Tiles:
    columns, block = min(width & -width, _GRADIENT.columns), math.gcd(tokens, _GRADIENT.block)
    while block > 256 and tokens // block * (width // columns) < _FEWEST_BLOCKS:
        block //= 2
    return _GRADIENT._replace(columns=columns, block=block)


def _norm_tiles(width: int, warps: int) -> Tiles:
    """Return tiles with at least 128 columns per warp: with fewer, warps wait for their loads."""
    columns = min(width & -width, _WIDEST)
    return Tiles(rows=max(1, min(4, 128 * warps // columns)), columns=columns, block=_BLOCK, warps=warps, stages=1)


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether an array of shape [..., D] divides into whole blocks."""
    return math.prod(shape[:-1]) % _ROWS == 0 and shape[-1] % 32 == 0


def _chunk(width: int) -> int:
    """Return the columns per chunk: the largest power of two up to the limit that divides the width."""
    return min(width & -width, _COLUMNS)


def _flat(arrays: Sequence[Array]) -> list[Array]:
    """Merge batch and time into one axis."""
    return [a.reshape(-1, a.shape[-1]) for a in arrays]


def _run_on_blocks(
    name: str, kernel: Callable[..., None], args: Sequence[Array], outs: Sequence[tuple[int, Any]], interpret: bool
) -> list[Array]:
    """Run `kernel` on blocks of tokens. Arguments are [B, T, m], and results too: `outs` are their m and dtype."""
    B, T, _ = args[0].shape
    block = lambda width: pl.BlockSpec((_ROWS, width), lambda i: (i, 0))
    flat = run_kernel(
        name, kernel, _flat(args), [((B * T, m), dtype) for m, dtype in outs], grid=(B * T // _ROWS,), warps=_WARPS, stages=2,
        in_specs=[block(a.shape[-1]) for a in args], out_specs=[block(m) for m, _ in outs], interpret=interpret,
    )  # fmt: skip
    return [a.reshape(B, T, a.shape[-1]) for a in flat]


def _tile(ref: Any, k: Array, chunk: int) -> Array:
    return widen(ref[:, pl.ds(k * chunk, chunk)])


def write(xs: Sequence[Array], y: Array, maps: Array, *, interpret: bool = False) -> tuple[tuple[Array, ...], Array]:
    """Return (new streams, their sums of squares [B, T, R]). Stream i is sum_j res[i, j] stream j + post[i] y."""
    R, width, chunk = len(xs), y.shape[-1], _chunk(y.shape[-1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, maps_ref, out_refs, squares_ref = refs[:R], refs[R], refs[R + 1], refs[R + 2 : -1], refs[-1]
        post, res = _post_and_res(maps_ref, R)

        def body(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x, y = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk)
            out = [(add_up([c * a for c, a in zip(row, x, strict=True)]) + p * y) for row, p in zip(res, post, strict=True)]
            rounded = [a.astype(ref.dtype) for a, ref in zip(out, out_refs, strict=True)]
            for ref, a in zip(out_refs, rounded, strict=True):
                ref[:, pl.ds(k * chunk, chunk)] = a
            wide = [widen(a) for a in rounded]
            return tuple(s + jnp.sum(a * a, axis=1) for s, a in zip(sums, wide, strict=True))

        sums = lax.fori_loop(0, width // chunk, body, (jnp.zeros(_ROWS, wide_dtype(y.dtype)),) * R)
        for r, total in enumerate(sums):
            squares_ref[:, r] = total

    outs = [*((width, x.dtype) for x in xs), (R, wide_dtype(y.dtype))]
    *streams, squares = _run_on_blocks("streams_write", kernel, [*xs, y, maps], outs, interpret)
    return tuple(streams), squares


def _post_and_res(maps_ref: Any, R: int) -> tuple[list[Array], list[list[Array]]]:
    column = lambda m: maps_ref[:, m][:, None]
    return [column(R + i) for i in range(R)], [[column(2 * R + i * R + j) for j in range(R)] for i in range(R)]


def write_sums(
    xs: Sequence[Array], y: Array, maps: Array, douts: Sequence[Array], *, interpret: bool = False
) -> tuple[Array, Array]:
    """Return (dy, d maps with 0 for pre) in one pass over the streams and their gradients."""
    R, width, chunk = len(xs), y.shape[-1], _chunk(y.shape[-1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, maps_ref, d_refs = refs[:R], refs[R], refs[R + 1], refs[R + 2 : 2 * R + 2]
        dy_ref, dmaps_ref = refs[2 * R + 2 :]
        post, _ = _post_and_res(maps_ref, R)

        def body(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x, y = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk)
            d = [_tile(ref, k, chunk) for ref in d_refs]
            dy_ref[:, pl.ds(k * chunk, chunk)] = add_up([p * a for p, a in zip(post, d, strict=True)]).astype(dy_ref.dtype)
            # In the order of the coefficients: d post, then d res row by row.
            products = [*(a * y for a in d), *(a * b for a in d for b in x)]
            return tuple(s + jnp.sum(p, axis=1) for s, p in zip(sums, products, strict=True))

        zero = jnp.zeros(_ROWS, wide_dtype(y.dtype))
        sums = lax.fori_loop(0, width // chunk, body, (zero,) * (R * R + R))
        for m, total in enumerate([*[zero] * R, *sums]):
            dmaps_ref[:, m] = total

    outs = [(width, y.dtype), (maps.shape[-1], wide_dtype(y.dtype))]
    dy, dmaps = _run_on_blocks("streams_write_backward", kernel, [*xs, y, maps, *douts], outs, interpret)
    return dy, dmaps


def _widened(a: Array) -> Array:
    """Pad the columns with zeros for a matmul."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, _MATRIX_COLUMNS - a.shape[-1])])


def fits_gradient(shape: tuple[int, ...], maps: int, dtype: Any) -> bool:
    """Return whether streams of shape [..., D] divide into the tiles of `gradient`, for the tensor cores."""
    whole = math.prod(shape[:-1]) % _GRADIENT.rows == 0 and shape[-1] % 32 == 0
    return whole and maps <= _MATRIX_COLUMNS and jnp.dtype(dtype).itemsize == 2


def gradient(
    xs: Sequence[Array], douts: Sequence[Array], dread: Array, maps: Array, dproducts: Array, along: Array, phi_RDM: Array,
    *, interpret: bool = False,
) -> tuple[tuple[Array, ...], Array]:  # fmt: skip
    """Return the gradients of the streams and of phi in one pass: through writing, reading, projection and norm.

    A block handles some columns of many tokens. Its columns of phi and the sums for their gradient stay in registers.
    """
    R, width, tokens = len(xs), dread.shape[-1], math.prod(dread.shape[:-1])
    tiles = _gradient_tiles(tokens, width)
    chunk, block = tiles.columns, tiles.block

    def kernel(*refs: Any) -> None:
        x_refs, d_refs, others, out_refs = refs[:R], refs[R : 2 * R], refs[2 * R : 2 * R + 5], refs[2 * R + 5 : -1]
        (dread_ref, maps_ref, dproducts_ref, along_ref, phi_ref), dphi_ref = others, refs[-1]
        first, here = pl.program_id(0) * block, pl.ds(pl.program_id(1) * chunk, chunk)
        phi = [phi_ref[r, here, :] for r in range(R)]

        def body(n: Array, dphi: tuple[Array, ...]) -> tuple[Array, ...]:
            at = pl.ds(first + n * tiles.rows, tiles.rows)
            d, dread, dproducts = [ref[at, here] for ref in d_refs], dread_ref[at, here], dproducts_ref[at, :]
            column = lambda m: maps_ref[at, m][:, None]
            sums = []
            for j in range(R):
                x = x_refs[j][at, here]
                mixed = add_up([column(2 * R + i * R + j) * widen(d[i]) for i in range(R)])
                own = mixed + column(j) * widen(dread) + along_ref[at, 0][:, None] * widen(x)
                out_refs[j][at, here] = (own + product(dproducts, phi[j], (1, 1))).astype(out_refs[j].dtype)
                sums.append(dphi[j] + product(x, dproducts, (0, 0)))
            return tuple(sums)

        zero = jnp.zeros((chunk, _MATRIX_COLUMNS), wide_dtype(dread.dtype))
        for r, total in enumerate(lax.fori_loop(0, block // tiles.rows, body, (zero,) * R)):
            dphi_ref[pl.program_id(0), r, here, :] = total

    blocks, wide = tokens // block, wide_dtype(dread.dtype)
    dread_flat, maps_flat, dproducts_flat = _flat([dread, maps, dproducts])
    args = (*_flat(xs), *_flat(douts), dread_flat, maps_flat, _widened(dproducts_flat), along.reshape(-1, 1), _widened(phi_RDM))
    outs = [*(((tokens, width), x.dtype) for x in xs), ((blocks, R, width, _MATRIX_COLUMNS), wide)]
    *dxs, dphi = run_kernel(
        "streams_gradient", kernel, args, outs, grid=(blocks, width // chunk), warps=tiles.warps, stages=tiles.stages,
        interpret=interpret,
    )  # fmt: skip
    return tuple(dx.reshape(dread.shape) for dx in dxs), jnp.sum(dphi, axis=0)[..., : phi_RDM.shape[-1]][None, None]


def fits_norm(shape: tuple[int, ...], devices: int) -> bool:
    """Return whether the columns of an array [..., D] are few chunks, and each device's tokens whole blocks."""
    chunk = min(shape[-1] & -shape[-1], _WIDEST)
    return math.prod(shape[:-1]) % (devices * _BLOCK) == 0 and chunk >= 32 and shape[-1] // chunk <= _MOST_CHUNKS


def _chunks(width: int, columns: int) -> list[Any]:
    return [pl.ds(k * columns, columns) for k in range(width // columns)]


def read_and_norm(
    eps: float, xs: Sequence[Array], maps: Array, scale_D: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Return (x / rms(x) * scale, 1 / rms(x) as [B, T]) of x = sum_r pre[r] stream r, without storing x."""
    R, (B, T, width) = len(xs), xs[0].shape
    tiles = _norm_tiles(width, warps=4)
    chunks = _chunks(width, tiles.columns)

    def kernel(*refs: Any) -> None:
        x_refs, (maps_ref, scale_ref, out_ref, inverse_ref), first = refs[:R], refs[R:], pl.program_id(0) * tiles.block

        def body(n: Array, carry: Array) -> Array:
            at = pl.ds(first + n * tiles.rows, tiles.rows)
            x = [_read(x_refs, maps_ref, at, here)[0] for here in chunks]
            inverse = lax.rsqrt(add_up([jnp.sum(a * a, axis=1) for a in x]) / width + eps)
            inverse_ref[at, 0] = inverse
            for here, a in zip(chunks, x, strict=True):
                out_ref[at, here] = (a * inverse[:, None] * scale_ref[here][None, :]).astype(out_ref.dtype)
            return carry

        lax.fori_loop(0, tiles.block // tiles.rows, body, jnp.int32(0))

    outs = [((B * T, width), xs[0].dtype), ((B * T, 1), wide_dtype(xs[0].dtype))]
    normed, inverse = run_kernel(
        "streams_read_and_norm", kernel, (*_flat([*xs, maps]), scale_D), outs, grid=(B * T // tiles.block,),
        warps=tiles.warps, stages=tiles.stages, interpret=interpret,
    )  # fmt: skip
    return normed.reshape(B, T, width), inverse.reshape(B, T)


def _read(x_refs: Sequence[Any], maps_ref: Any, at: Any, here: Any) -> tuple[Array, list[Array]]:
    """Return (sum_r pre[r] stream r, the streams) of some tokens and columns."""
    x = [widen(ref[at, here]) for ref in x_refs]
    return add_up([maps_ref[at, r][:, None] * a for r, a in enumerate(x)]), x


def read_and_norm_backward(
    xs: Sequence[Array], maps: Array, scale_D: Array, inverse: Array, dnormed: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Return the gradients of x = sum_r pre[r] stream r, of pre [B, T, R] and of the scale [1, 1, D], in one pass.

    dpre is the product of each stream with dx = (g - x * along) / rms, where g is the output gradient times the scale.
    It follows from the products of the stream with g and with x, so no stream is read twice.
    """
    R, (B, T, width) = len(xs), dnormed.shape
    tiles = _norm_tiles(width, warps=2)
    chunks = _chunks(width, tiles.columns)

    def kernel(*refs: Any) -> None:
        x_refs, (maps_ref, scale_ref, inverse_ref, dnormed_ref, dx_ref, dpre_ref, dscale_ref) = refs[:R], refs[R:]
        first = pl.program_id(0) * tiles.block
        zero = jnp.zeros((tiles.rows, width // len(chunks)), wide_dtype(dnormed.dtype))

        def body(n: Array, dscale: tuple[Array, ...]) -> tuple[Array, ...]:
            at = pl.ds(first + n * tiles.rows, tiles.rows)
            inverse = inverse_ref[at, 0]
            held, totals, sums = [], [zero] * (2 * R + 1), []
            for here, total in zip(chunks, dscale, strict=True):
                read, x = _read(x_refs, maps_ref, at, here)
                dnormed_tile = dnormed_ref[at, here].astype(read.dtype)
                sums.append(total + dnormed_tile * read * inverse[:, None])
                g = dnormed_tile * scale_ref[here][None, :]
                held.append((read, g))
                products = [g * read, *(g * a for a in x), *(read * a for a in x)]
                totals = [t + p for t, p in zip(totals, products, strict=True)]
            totals = [jnp.sum(t, axis=1) for t in totals]
            along = totals[0] * inverse * inverse / width
            for r in range(R):
                dpre_ref[at, r] = inverse * (totals[1 + r] - along * totals[1 + R + r])
            for here, (read, g) in zip(chunks, held, strict=True):
                dx_ref[at, here] = ((g - read * along[:, None]) * inverse[:, None]).astype(dx_ref.dtype)
            return tuple(sums)

        sums = lax.fori_loop(0, tiles.block // tiles.rows, body, (zero,) * len(chunks))
        for here, total in zip(chunks, sums, strict=True):
            dscale_ref[pl.program_id(0), here] = jnp.sum(total, axis=0)

    wide, blocks = wide_dtype(dnormed.dtype), B * T // tiles.block
    args = *_flat([*xs, maps]), scale_D, inverse.reshape(-1, 1), dnormed.reshape(-1, width)
    outs = [((B * T, width), dnormed.dtype), ((B * T, R), wide), ((blocks, width), wide)]
    dx, dpre, dscale = run_kernel(
        "streams_read_and_norm_backward", kernel, args, outs, grid=(blocks,), warps=tiles.warps, stages=tiles.stages,
        interpret=interpret,
    )  # fmt: skip
    return dx.reshape(B, T, width), dpre.reshape(B, T, R), jnp.sum(dscale, axis=0)[None, None]


def fits_maps(shape: tuple[int, ...]) -> bool:
    """Return whether tokens of this shape divide into whole blocks of the maps."""
    return math.prod(shape) % _MAP_TOKENS == 0


def maps(body: Callable[[list[Array]], Sequence[Array]], *args: Array, interpret: bool = False) -> Array:
    """Return the array [B, T, M] of `body(columns of all args)` for every token; `args` are arrays [B, T, M], too.

    The doubly stochastic maps would be many kernels in XLA. Triton has no R x R arrays, so `body` works on tuples of
    columns that stay in registers.
    """
    B, T, M = args[0].shape

    def kernel(*refs: Any) -> None:
        *in_refs, out_ref = refs
        # Neighboring columns share a cache line, so memory is still read once.
        columns = [ref[:, m] for ref in in_refs for m in range(ref.shape[1])]
        for m, x in enumerate(body(columns)):
            out_ref[:, m] = x

    block = pl.BlockSpec((_MAP_TOKENS, M), lambda i: (i, 0))
    (out,) = run_kernel(
        "stream_maps", kernel, _flat(args), [((B * T, M), args[0].dtype)], grid=(B * T // _MAP_TOKENS,),
        warps=_MAP_TOKENS // 32, in_specs=[block] * len(args), out_specs=[block], interpret=interpret,
    )  # fmt: skip
    return out.reshape(B, T, M)
