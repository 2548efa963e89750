"""A short causal depthwise convolution along time, within a document.

XLA needs several passes for the gradients of the taps. The GPU kernels (Pallas, Triton) use one pass forward and one
backward for both gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from nash_mhc.ops.arithmetic import add_up, wide_dtype
from nash_mhc.ops.platform import on_platform, run_kernel

_ROWS, _COLUMNS, _WARPS = 4, 256, 4  # tokens and channels of a tile: 8 numbers a thread, a load of 16 bytes each
_TILES = 32  # tiles that a block of threads processes in sequence


def short_conv_reference(
    x_BTD: Float[Array, "B T D"], taps_JD: Float[Array, "J D"], segments_BT: Int[Array, "B T"] | None = None
) -> Float[Array, "B T D"]:
    """Return y[t] = sum_j taps[j] x[t - j] over the tokens t - j of the same document."""
    mixed = taps_JD[0][None, None] * x_BTD.astype(jnp.float32)
    for j in range(1, taps_JD.shape[0]):
        mixed += taps_JD[j][None, None] * _within_document(_later(x_BTD, j), j, segments_BT).astype(jnp.float32)
    return mixed.astype(x_BTD.dtype)


def _later(x: Array, j: int) -> Array:
    """Shift tokens: token t gets the value of token t - j."""
    T = x.shape[1]
    return jnp.pad(x[:, : max(T - j, 0)], ((0, 0), (min(j, T), 0), (0, 0)))


def _earlier(x: Array, j: int) -> Array:
    return jnp.pad(x[:, j:], ((0, 0), (0, min(j, x.shape[1])), (0, 0)))


def _within_document(x_BTD: Array, j: int, segments_BT: Array | None) -> Array:
    """Zero the tokens t for which token t - j is not in the same document."""
    if segments_BT is None:
        return x_BTD
    same_BT = segments_BT == jnp.where(jnp.arange(segments_BT.shape[1])[None] >= j, jnp.roll(segments_BT, j, axis=1), -1)
    return x_BTD * same_BT[..., None].astype(x_BTD.dtype)


@jax.custom_vjp
def short_conv(
    x_BTD: Float[Array, "B T D"], taps_JD: Float[Array, "J D"], segments_BT: Int[Array, "B T"] | None = None
) -> Float[Array, "B T D"]:
    """Compute `short_conv_reference` in one pass over x, with x as the only residual."""
    operands = x_BTD, taps_JD, segments_BT
    return on_platform(*operands, default=short_conv_reference, cuda=_conv_in_kernel, fits=fits_kernel(x_BTD.shape))


def _forward(x_BTD, taps_JD, segments_BT):  # type: ignore[no-untyped-def]
    return short_conv(x_BTD, taps_JD, segments_BT), (x_BTD, taps_JD, segments_BT)


def _backward(saved, dy_BTD):  # type: ignore[no-untyped-def]
    fits = fits_kernel(dy_BTD.shape)
    return *on_platform(*saved, dy_BTD, default=_backward_in_xla, cuda=_backward_in_kernel, fits=fits), None


def _backward_in_xla(x_BTD: Array, taps_JD: Array, segments_BT: Array | None, dy_BTD: Array) -> tuple[Array, Array]:
    wide = lambda a: a.astype(jnp.float32)
    dx, dtaps = taps_JD[0][None, None] * wide(dy_BTD), [jnp.sum(wide(dy_BTD) * wide(x_BTD), axis=(0, 1))]
    for j in range(1, taps_JD.shape[0]):
        dtap = _within_document(dy_BTD, j, segments_BT)
        dx += taps_JD[j][None, None] * wide(_earlier(dtap, j))
        dtaps.append(jnp.sum(wide(dtap) * wide(_later(x_BTD, j)), axis=(0, 1)))
    return dx.astype(x_BTD.dtype), jnp.stack(dtaps).astype(taps_JD.dtype)


short_conv.defvjp(_forward, _backward)


# --- GPU kernels, with tokens in one axis: [tokens, D] ---------------------------------------------------------------


def fits_kernel(shape: tuple[int, ...]) -> bool:
    """Return whether an array of shape [B, T, D] divides into whole tiles."""
    B, T, D = shape
    return B * T % (_ROWS * _TILES) == 0 and D % _columns(D) == 0 and _columns(D) >= 32


def _columns(width: int) -> int:
    return min(width & -width, _COLUMNS)


def _same(shape: tuple[int, ...], J: int, segments_BT: Array | None) -> Int[Array, "X"]:
    """Return a bit mask per token, all sequences in one axis. Bit j: token t - j is in the document of token t."""
    segments_BT = jnp.ones(shape[:2], jnp.int32) if segments_BT is None else segments_BT
    is_same = lambda j: (jnp.arange(shape[1]) >= j)[None] & (segments_BT == jnp.roll(segments_BT, j, axis=1))
    return functools.reduce(jnp.bitwise_or, (is_same(j).astype(jnp.int32) << j for j in range(J))).reshape(-1)


def _shifted(ref: Any, at: Array, by: int, tokens: int, here: Any) -> Array:
    """Return rows `at + by` in float32, clipped to the array; the caller masks clipped rows."""
    rows = jnp.clip(at + by, 0, tokens - 1) if by else at
    return ref[rows, here].astype(wide_dtype(ref.dtype))


def _is_same(same_ref: Any, at: Array, j: int, tokens: int) -> Array:
    """Return whether tokens `at` and the tokens j before them are in the same document."""
    return ((same_ref[jnp.clip(at, 0, tokens - 1)] >> j) & 1 != 0)[:, None]


def _conv_in_kernel(x_BTD: Array, taps_JD: Array, segments_BT: Array | None, *, interpret: bool = False) -> Array:
    J, D = taps_JD.shape
    tokens, columns = x_BTD.size // D, _columns(D)

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

    args = x_BTD.reshape(tokens, D), taps_JD, _same(x_BTD.shape, J, segments_BT)
    grid = tokens // (_ROWS * _TILES), D // columns
    (out,) = run_kernel("short_conv", kernel, args, [((tokens, D), x_BTD.dtype)], grid=grid, warps=_WARPS, interpret=interpret)
    return out.reshape(x_BTD.shape)


def _backward_in_kernel(
    x_BTD: Array, taps_JD: Array, segments_BT: Array | None, dy_BTD: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    J, D = taps_JD.shape
    tokens, columns, wide = x_BTD.size // D, _columns(D), wide_dtype(x_BTD.dtype)
    blocks = tokens // (_ROWS * _TILES)

    def kernel(x_ref: Any, taps_ref: Any, same_ref: Any, dy_ref: Any, dx_ref: Any, dtaps_ref: Any) -> None:
        block, here = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        taps = [taps_ref[j, here][None] for j in range(J)]

        def body(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = (block * _TILES + n) * _ROWS + jnp.arange(_ROWS)
            dy = _shifted(dy_ref, at, 0, tokens, here)
            terms, products = [taps[0] * dy], [dy * _shifted(x_ref, at, 0, tokens, here)]
            for j in range(1, J):
                ahead = (at + j < tokens)[:, None] & _is_same(same_ref, at + j, j, tokens)
                terms.append(taps[j] * jnp.where(ahead, _shifted(dy_ref, at, j, tokens, here), 0.0))
                before = jnp.where(_is_same(same_ref, at, j, tokens), _shifted(x_ref, at, -j, tokens, here), 0.0)
                products.append(dy * before)
            dx_ref[at, here] = add_up(terms).astype(dx_ref.dtype)
            return tuple(s + p for s, p in zip(sums, products, strict=True))

        zero = jnp.zeros((_ROWS, columns), wide)
        for j, total in enumerate(lax.fori_loop(0, _TILES, body, (zero,) * J)):
            dtaps_ref[block, j, here] = jnp.sum(total, axis=0)

    args = x_BTD.reshape(tokens, D), taps_JD, _same(x_BTD.shape, J, segments_BT), dy_BTD.reshape(tokens, D)
    outs = [((tokens, D), x_BTD.dtype), ((blocks, J, D), wide)]
    grid = blocks, D // columns
    dx, dtaps = run_kernel("short_conv_back", kernel, args, outs, grid=grid, warps=_WARPS, interpret=interpret)
    return dx.reshape(x_BTD.shape), jnp.sum(dtaps, axis=0).astype(taps_JD.dtype)
