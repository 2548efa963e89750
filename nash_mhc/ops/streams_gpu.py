"""Passes over residual streams as GPU kernels (Pallas, Triton): each loads a token's coefficients and its streams once.

XLA's own fusions load up to 24 coefficients again for every element, and split the reductions of the backward pass over many
kernels that each read the streams anew. `streams.py` has the same functions in plain arrays; the tests hold them together.
Streams are [tokens, D] here, coefficients [tokens], each an array of its own.
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


def write(
    xs: Sequence[Array], y: Array, res: Sequence[Array], post: Sequence[Array], *, interpret: bool = False
) -> list[Array]:
    """Stream i becomes sum_j res[i R + j] stream j + post[i] y."""
    R, chunk = len(xs), _chunk(y.shape[1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, out_refs = refs[:R], refs[R], refs[-R:]
        res, post = ([ref[:][:, None] for ref in part] for part in (refs[R + 1 : -2 * R], refs[-2 * R : -R]))

        def body(k: Array, _: None) -> None:
            x, y = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk)
            for i, out_ref in enumerate(out_refs):
                mixed = _sum([res[i * R + j] * x[j] for j in range(R)]) + post[i] * y
                out_ref[:, pl.ds(k * chunk, chunk)] = mixed.astype(out_ref.dtype)

        lax.fori_loop(0, y.shape[1] // chunk, body, None)

    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
    return _call(kernel, outs, [*xs, y, *res, *post], "streams_write", interpret)


def write_backward(
    xs: Sequence[Array], y: Array, post: Sequence[Array], douts: Sequence[Array], *, interpret: bool = False
) -> tuple[Array, list[Array], list[Array]]:
    """(dy, d res row by row, d post) in one pass over the streams and their gradients."""
    R, (tokens, width), chunk = len(xs), y.shape, _chunk(y.shape[1])

    def kernel(*refs: Any) -> None:
        x_refs, y_ref, post_refs, d_refs = refs[:R], refs[R], refs[R + 1 : 2 * R + 1], refs[2 * R + 1 : 3 * R + 1]
        dy_ref, sum_refs = refs[3 * R + 1], refs[3 * R + 2 :]
        post = [ref[:][:, None] for ref in post_refs]

        def body(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x, y, d = [_tile(ref, k, chunk) for ref in x_refs], _tile(y_ref, k, chunk), [_tile(ref, k, chunk) for ref in d_refs]
            dy_ref[:, pl.ds(k * chunk, chunk)] = _sum([p * g for p, g in zip(post, d, strict=True)]).astype(dy_ref.dtype)
            products = [g * o for g in d for o in x] + [g * y for g in d]
            return tuple(s + jnp.sum(p, axis=1) for s, p in zip(sums, products, strict=True))

        sums = lax.fori_loop(0, width // chunk, body, (jnp.zeros(_ROWS, _wide(y.dtype)),) * (R * R + R))
        for ref, total in zip(sum_refs, sums, strict=True):
            ref[:] = total

    outs = [jax.ShapeDtypeStruct(y.shape, y.dtype), *[jax.ShapeDtypeStruct((tokens,), _wide(y.dtype))] * (R * R + R)]
    dy, *sums = _call(kernel, outs, [*xs, y, *post, *douts], "streams_write_backward", interpret)
    return dy, sums[: R * R], sums[R * R :]
