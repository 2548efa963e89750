"""Sinkhorn's iteration and all else that makes a token's maps as one GPU kernel (Pallas, Triton).

A token's few numbers stay in registers from start to end; XLA would launch each of the 20 rounds as a kernel of its
own. The arithmetic is that of `sinkhorn.py`, on tuples of numbers: R x R of them are no array that Triton knows. As a
form for XLA it would be costly: a compiler writes each of the tuple's results as a function of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from nash_mhc.ops.sinkhorn import LOWEST, Matrix, Vector

_TOKENS = 128  # in a block: one a thread


def fits(shape: tuple[int, ...]) -> bool:
    """Whether tokens of this shape can be cut into whole blocks."""
    return math.prod(shape) % _TOKENS == 0


class Aside(NamedTuple):
    """Room for R numbers a token, many times over, in the device's memory: a thread reads back what it wrote itself."""

    ref: Any
    size: int

    def write(self, n: Any, vector: Sequence[Array]) -> None:
        for i, x in enumerate(vector):
            self.ref[n * self.size + i, :] = x

    def read(self, n: Any) -> tuple[Array, ...]:
        return tuple(self.ref[n * self.size + i, :] for i in range(self.size))


def over_tokens(
    body: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    outs: Sequence[int],
    *,
    aside: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> list[Array]:
    """`body(numbers, aside) -> numbers` for every token:
    `args` are arrays [..., m], whose columns it gets one after another.

    Its results fill arrays [..., m] of the widths `outs`.
    `aside` is (how many vectors, how long each) there is room for.
    """
    shape = args[0].shape[:-1]
    tokens = math.prod(shape)

    def kernel(*refs: Any) -> None:
        in_refs, out_refs, aside_ref = refs[: len(args)], refs[len(args) : -1], refs[-1]
        # Column by column: neighbours share a cache line, so that memory is still read once.
        columns = [ref[:, m] for ref in in_refs for m in range(ref.shape[1])]
        places = [(ref, m) for ref in out_refs for m in range(ref.shape[1])]
        for (ref, m), x in zip(places, body(columns, Aside(aside_ref, aside[1])), strict=True):
            ref[:, m] = x

    block = lambda width: pl.BlockSpec((_TOKENS, width), lambda i: (i, 0))
    shapes = [jax.ShapeDtypeStruct((tokens, width), args[0].dtype) for width in outs]
    room = jax.ShapeDtypeStruct((aside[0] * aside[1], tokens), args[0].dtype)
    *results, _ = pl.pallas_call(
        kernel, out_shape=[*shapes, room], grid=(tokens // _TOKENS,), in_specs=[block(a.shape[-1]) for a in args],
        out_specs=[*[block(width) for width in outs], pl.BlockSpec((room.shape[0], _TOKENS), lambda i: (0, i))],
        compiler_params=plgpu.CompilerParams(num_warps=_TOKENS // 32, num_stages=1), name="stream_maps", interpret=interpret,
    )(*(a.reshape(tokens, a.shape[-1]) for a in args))  # fmt: skip
    return [r.reshape(*shape, r.shape[-1]) for r in results]


def _kernel(logits: Matrix) -> Matrix:
    # The first step divides columns, so a column may be scaled at will: here by its largest entry.
    top = [functools.reduce(jnp.maximum, column) for column in _transposed(logits)]
    return tuple(tuple(jnp.exp(jnp.maximum(x - t, LOWEST)) for x, t in zip(row, top, strict=True)) for row in logits)


def _dot(a: Vector, b: Vector) -> Array:
    return functools.reduce(jnp.add, (x * y for x, y in zip(a, b, strict=True)))


def _transposed(k: Matrix) -> Matrix:
    return tuple(zip(*k, strict=True))


def _columns(k: Matrix, u: Vector) -> Vector:
    """v such that the columns of diag(u) k diag(v) sum to 1."""
    return tuple(1.0 / _dot(column, u) for column in _transposed(k))


def _row_scales(k: Matrix, v: Vector) -> Vector:
    return tuple(1.0 / _dot(row, v) for row in k)


def _ones(k: Matrix) -> Vector:
    return tuple(jnp.ones_like(row[0]) for row in k)


def _outer(a: Vector, b: Vector) -> Matrix:
    return tuple(tuple(x * y for y in b) for x in a)


def _times(a: Matrix, b: Matrix) -> Matrix:
    return tuple(tuple(x * y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


def _plus(a: Matrix, b: Matrix) -> Matrix:
    return tuple(tuple(x + y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


def _round(k: Matrix, pair: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
    """(u, the u before it) after one more iteration."""
    return _row_scales(k, _columns(k, pair[0])), pair[0]


def _last_gradients(k: Matrix, grad: Matrix, u: Vector, v: Vector) -> tuple[Vector, Vector, Matrix]:
    """Of the result diag(u) k diag(v): (du, dv, dk)."""
    gk = _times(grad, k)
    du = tuple(_dot(row, v) for row in gk)
    dv = tuple(_dot(column, u) for column in _transposed(gk))
    return du, dv, _times(grad, _outer(u, v))


Backward = tuple[Vector, Vector, Matrix, Vector]  # du, dv, dk, and the u that they belong to


def _back(k: Matrix, carry: Backward, u: Vector) -> Backward:
    """One iteration in reverse, `u` being what it began with; the v on the way is computed again."""
    du, dv, dk, after = carry
    v = _columns(k, u)
    at_rows = tuple(-d * s * s for d, s in zip(du, after, strict=True))  # of the sums that `after` is 1 over
    dv = tuple(d + _dot(column, at_rows) for d, column in zip(dv, _transposed(k), strict=True))
    at_columns = tuple(-d * s * s for d, s in zip(dv, v, strict=True))
    dk = _plus(_plus(dk, _outer(at_rows, v)), _outer(u, at_columns))
    du = tuple(_dot(row, at_columns) for row in k)
    return du, tuple(jnp.zeros_like(d) for d in dv), dk, u


def iterate(logits: Matrix, iterations: int) -> Matrix:
    """`sinkhorn`."""
    k = _kernel(logits)
    u, before = lax.fori_loop(0, iterations, lambda _, pair: _round(k, pair), (_ones(k), _ones(k)))
    return _times(k, _outer(u, _columns(k, before)))


Pull = Callable[[Matrix], Matrix]  # from the result of an iteration to its gradient


def _last(k: Matrix, pull: Pull, u: Vector, before: Vector) -> Backward:
    """Where the way back begins: at the result, which came from the last u and the one before it."""
    v = _columns(k, before)
    return *_last_gradients(k, pull(_times(k, _outer(u, v))), u, v), u


def reverse(logits: Matrix, pull: Pull, iterations: int, aside: Aside) -> Matrix:
    """The gradient of `iterate`. A kernel has no scan: every u is written aside and read again."""
    k = _kernel(logits)

    def ahead(n: Array, u: Vector) -> Vector:
        aside.write(n, u)
        return _round(k, (u, u))[0]

    u = lax.fori_loop(0, iterations, ahead, _ones(k))
    carry = _last(k, pull, u, aside.read(iterations - 1))
    back = lambda n, carry: _back(k, carry, aside.read(iterations - 1 - n))
    _, _, dk, _ = lax.fori_loop(0, iterations, back, carry)
    return _times(dk, k)


def balanced(p: Matrix) -> Matrix:
    """`balance`."""
    column_sums = [functools.reduce(jnp.add, column) for column in _transposed(p)]
    down = [1.0 / jnp.maximum(s, 1.0) for s in column_sums]
    lack = [jnp.maximum(1.0 - s, 0.0) for s in column_sums]
    # Where nothing lacks, nothing is given either, and the floor keeps 0 / 0 away, from the gradient too.
    total = jnp.maximum(functools.reduce(jnp.add, lack), 1e-12)
    out = []
    for row in p:
        kept = [x * d for x, d in zip(row, down, strict=True)]
        # Not 1 - sum(kept), which would drown in rounding: exactly what the scaling took away.
        taken = functools.reduce(jnp.add, (x - y for x, y in zip(row, kept, strict=True)))
        out.append(tuple(x + taken * (s / total) for x, s in zip(kept, lack, strict=True)))
    return tuple(out)
