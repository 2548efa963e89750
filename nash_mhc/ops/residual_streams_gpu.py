"""Passes over residual streams as GPU kernels (Pallas, Triton): each loads a token's coefficients and its streams once.

XLA's own fusions load up to 24 coefficients again for every element, and split the reductions of the backward pass over
many kernels that each read the streams anew. `streams.py` has the same functions in plain arrays; the tests hold them
together. Streams are [tokens, D] here, and a token's coefficients one row of a [tokens, M] array:
pre, post, then res row by row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_ROWS, _COLUMNS, _WARPS = 4, 256, 4  # of a block: the best of what was tried on an H200 at D 2048 (docs/log.md)


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a [..., D] array can be cut into whole blocks."""
    return math.prod(shape[:-1]) % _ROWS == 0 and shape[-1] % 32 == 0


def _chunk(width: int) -> int:
    """Columns at a time: the largest power of two, within the limit, that divides the width."""
    return min(width & -width, _COLUMNS)


def _call(kernel: Callable[..., None], outs: Sequence[Any], args: Sequence[Array], name: str, interpret: bool) -> list[Array]:
    """Runs `kernel` on blocks of tokens, which are the first axis of everything."""
    block = lambda a: pl.BlockSpec((_ROWS, *a.shape[1:]), lambda i: (i,) + (0,) * (a.ndim - 1))
    return list(pl.pallas_call(
        kernel, out_shape=list(outs), grid=(args[0].shape[0] // _ROWS,),
        in_specs=[block(a) for a in args], out_specs=[block(o) for o in outs],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=2), name=name, interpret=interpret,
    )(*args))  # fmt: skip


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _tile(ref: Any, k: Array, chunk: int) -> Array:
    return ref[:, pl.ds(k * chunk, chunk)].astype(_wide(ref.dtype))


def _sum(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def write(xs: Sequence[Array], y: Array, maps: Array, *, interpret: bool = False) -> tuple[list[Array], Array]:
    """(stream i becomes sum_j res[i, j] stream j + post[i] y; the sums of squares of the new streams, [tokens, R])."""
    R, (tokens, width), chunk = len(xs), y.shape, _chunk(y.shape[1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, maps_ref, out_refs, squares_ref = refs[:R], refs[R], refs[R + 1], refs[R + 2 : -1], refs[-1]
        post, res = _post_and_res(maps_ref, R)

        def body(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x, y = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk)
            out = [(_sum([c * a for c, a in zip(row, x, strict=True)]) + p * y) for row, p in zip(res, post, strict=True)]
            rounded = [a.astype(ref.dtype) for a, ref in zip(out, out_refs, strict=True)]
            for ref, a in zip(out_refs, rounded, strict=True):
                ref[:, pl.ds(k * chunk, chunk)] = a
            wide = [a.astype(_wide(a.dtype)) for a in rounded]
            return tuple(s + jnp.sum(a * a, axis=1) for s, a in zip(sums, wide, strict=True))

        sums = lax.fori_loop(0, width // chunk, body, (jnp.zeros(_ROWS, _wide(y.dtype)),) * R)
        for r, total in enumerate(sums):
            squares_ref[:, r] = total

    outs = [*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs], jax.ShapeDtypeStruct((tokens, R), _wide(y.dtype))]
    *streams, squares = _call(kernel, outs, [*xs, y, maps], "streams_write", interpret)
    return streams, squares


def _post_and_res(maps_ref: Any, R: int) -> tuple[list[Array], list[list[Array]]]:
    column = lambda m: maps_ref[:, m][:, None]
    return [column(R + i) for i in range(R)], [[column(2 * R + i * R + j) for j in range(R)] for i in range(R)]


def write_backward(
    xs: Sequence[Array], y: Array, maps: Array, douts: Sequence[Array], *, interpret: bool = False
) -> tuple[Array, Array]:
    """(dy, d maps; 0 for pre, which had no part in it) in one pass over the streams and their gradients."""
    R, width, chunk = len(xs), y.shape[1], _chunk(y.shape[1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, maps_ref, d_refs = refs[:R], refs[R], refs[R + 1], refs[R + 2 : 2 * R + 2]
        dy_ref, dmaps_ref = refs[2 * R + 2 :]
        post, _ = _post_and_res(maps_ref, R)

        def body(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x, y = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk)
            d = [_tile(ref, k, chunk) for ref in d_refs]
            dy_ref[:, pl.ds(k * chunk, chunk)] = _sum([p * a for p, a in zip(post, d, strict=True)]).astype(dy_ref.dtype)
            # In the order of the coefficients: d post, then d res row by row.
            products = [*(a * y for a in d), *(a * b for a in d for b in x)]
            return tuple(s + jnp.sum(p, axis=1) for s, p in zip(sums, products, strict=True))

        zero = jnp.zeros(_ROWS, _wide(y.dtype))
        sums = lax.fori_loop(0, width // chunk, body, (zero,) * (R * R + R))
        for m, total in enumerate([*[zero] * R, *sums]):
            dmaps_ref[:, m] = total

    outs = [jax.ShapeDtypeStruct(y.shape, y.dtype), jax.ShapeDtypeStruct(maps.shape, _wide(y.dtype))]
    dy, dmaps = _call(kernel, outs, [*xs, y, maps, *douts], "streams_write_backward", interpret)
    return dy, dmaps
