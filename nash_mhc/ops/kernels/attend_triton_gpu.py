"""Attention with evidence where few keys are seen, as GPU kernels (Pallas, Triton).

With few keys, queries and results are much of what takes time, so each is read and written once and never moved. The
gradient of the evidence costs nothing here. `attend_triton.py` has the same functions in plain arrays, and says what
the arguments are.
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

from nash_mhc.ops.arithmetic import product

_LOG2_E = math.log2(math.e)  # a GPU has powers of two


class Tiles(NamedTuple):
    """How a kernel cuts its work: queries and keys at a time, its warps, loads that go ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# The fastest tiles on an H200 for sequences of 2,048 to 32,768 tokens, by the largest number of visible keys.
_FORWARD = {1024: Tiles(128, 64, 4, 2), 512: Tiles(64, 64, 4, 3), 0: Tiles(64, 32, 4, 2)}
_QUERIES = {512: Tiles(64, 64, 4, 2), 0: Tiles(64, 32, 4, 2)}
_KEYS = Tiles(64, 64, 4, 2)
_WIDE_HEADS = 128  # whose tiles leave no room for a third stage
# The first keys of a long document are seen by all of it. So that no block of threads works while all others are done,
# several share the queries of a tile of keys, each at least so many tiles of them.
_LEAST_SHARE, _MOST_SHARES = 128, 4
_FEWEST = 16  # of anything in a matrix product
# Scores of what is not seen, far below the highest score of nothing at all, so that their weights are 0 even then. Not
# the same number: a GPU does not round a product from which something is taken away, and the rounding error of 1e30 is
# far more than what a power of two can stand.
_UNSEEN, _NOTHING = -1e30, -1e20


def fits(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether queries and keys can be cut into whole tiles, for whose products a GPU has units."""
    (_, T, _, H), count = q_shape, k_shape[1]
    return H in (16, 32, 64, 128) and min(T & -T, count & -count) >= _FEWEST and jnp.dtype(dtype) == jnp.bfloat16


def _chosen(choices: dict[int, Tiles], most: int) -> Tiles:
    return choices[max(least for least in choices if most >= least)]


def _fitted(tiles: Tiles, T: int, count: int) -> Tiles:
    return tiles._replace(queries=min(T & -T, tiles.queries), keys=min(count & -count, tiles.keys))


def _call(
    kernel: Callable[..., None], grid: tuple[int, ...], outs: Sequence[Any], tiles: Tiles, name: str, interpret: bool
) -> Callable[..., list[Array]]:
    return pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(*out) for out in outs], grid=grid, name=name, interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
    )  # fmt: skip


class _Range(NamedTuple):
    """Tiles by number, from low to high, of which those from begin to end are seen as a whole."""

    low: Array
    high: Array
    begin: Array
    end: Array

    @staticmethod
    def of(low: Array, high: Array, begin: Array, end: Array) -> _Range:
        begin = jnp.clip(begin, low, high)
        return _Range(low, high, begin, jnp.clip(end, begin, high))


class _Queries(NamedTuple):
    """Some queries of a row: where they lie, the first and last row that each may see, and the tiles of these."""

    at: Any
    first: Array
    last: Array
    tiles: _Range

    @staticmethod
    def of(number: Array, first_ref: Any, b: Array, stride: int, window: int, tiles: Tiles) -> _Queries:
        begin = number * tiles.queries
        first_of = lambda row: jnp.maximum(first_ref[b, row], row - window + 1)
        last = (begin + jnp.arange(tiles.queries, dtype=jnp.int32)) // stride
        newest = (begin + tiles.queries - 1) // stride
        seen = _Range.of(
            first_of(begin // stride) // tiles.keys, newest // tiles.keys + 1,
            pl.cdiv(first_of(newest), tiles.keys), (begin // stride + 1) // tiles.keys,
        )  # fmt: skip
        return _Queries(pl.ds(begin, tiles.queries), first_of(last), last, seen)

    def see(self, key: Array) -> Array:
        """[queries, keys]"""
        return (key[None, :] <= self.last[:, None]) & (key[None, :] >= self.first[:, None])


def _over(numbers: _Range, body: Callable[..., Any], carry: Any) -> Any:
    """`body(tile, whether all of it is seen, carry)`, first for the tiles that need no mask, then for the rest."""
    carry = lax.fori_loop(numbers.begin, numbers.end, lambda j, c: body(j, True, c), carry)
    before = numbers.begin - numbers.low
    place = lambda i: numbers.low + i + jnp.where(i < before, 0, numbers.end - numbers.begin)
    return lax.fori_loop(0, before + numbers.high - numbers.end, lambda i, c: body(place(i), False, c), carry)


def forward(q: Array, k: Array, v: Array, first: Array, *, window: int, interpret: bool = False) -> tuple[Array, Array]:
    """(what was found, [B, T, N, H]; the evidence, [B, T, N])."""
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_chosen(_FORWARD, min(window, count)), T, count)
    to_power = H**-0.5 * _LOG2_E

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, out_ref: Any, evidence_ref: Any) -> None:
        n, b = pl.program_id(1), pl.program_id(2)
        queries = _Queries.of(pl.program_id(0), first_ref, b, T // count, window, tiles)
        q = q_ref[b, queries.at, n, :]

        def body(j: Array, all_seen: bool, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            mixed, top, total = carry
            keys, key = pl.ds(j * tiles.keys, tiles.keys), j * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            scores = product(q, k_ref[b, keys, n // (N // K), :], (1, 1))
            scores = scores if all_seen else jnp.where(queries.see(key), scores, _UNSEEN)
            higher = jnp.maximum(top, jnp.max(scores, axis=1) * to_power)
            weights = jnp.exp2(scores * to_power - higher[:, None])
            shrunk = jnp.exp2(top - higher)
            found = product(weights.astype(v_ref.dtype), v_ref[b, keys, n // (N // K), :], (1, 0))
            return mixed * shrunk[:, None] + found, higher, total * shrunk + jnp.sum(weights, axis=1)

        rows = tiles.queries
        nothing = jnp.zeros((rows, H), jnp.float32), jnp.full(rows, _NOTHING, jnp.float32), jnp.zeros(rows, jnp.float32)
        mixed, top, total = _over(queries.tiles, body, nothing)
        out_ref[b, queries.at, n, :] = (mixed / total[:, None]).astype(out_ref.dtype)
        evidence_ref[b, queries.at, n] = (top + jnp.log2(total)) / _LOG2_E

    outs = [(q.shape, q.dtype), ((B, T, N), jnp.float32)]
    out, evidence = _call(kernel, (T // tiles.queries, N, B), outs, tiles, "attend_forward", interpret)(q, k, v, first)
    return out, evidence


def backward(
    q: Array, k: Array, v: Array, first: Array, end: Array, out: Array, evidence: Array, dout: Array, devidence: Array, *,
    window: int, interpret: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients (of queries, of keys, of values)."""
    dq, less = _queries_backward(q, k, v, first, out, evidence, dout, devidence, window, interpret)
    return dq, *_keys_backward(q, k, v, first, end, evidence, dout, less, window, interpret)


def _queries_backward(
    q: Array, k: Array, v: Array, first: Array, out: Array, evidence: Array, dout: Array, devidence: Array,
    window: int, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """(gradient of the queries; what is taken from the gradient of each weight of a query, [B, T, N])."""
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_chosen(_QUERIES, min(window, count)), T, count)
    scale = H**-0.5

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, first_ref, out_ref, evidence_ref, dout_ref, devidence_ref, dq_ref, less_ref = refs
        n, b = pl.program_id(1), pl.program_id(2)
        queries = _Queries.of(pl.program_id(0), first_ref, b, T // count, window, tiles)
        q, dout = q_ref[b, queries.at, n, :], dout_ref[b, queries.at, n, :]
        along = jnp.sum(dout.astype(jnp.float32) * out_ref[b, queries.at, n, :].astype(jnp.float32), axis=1)
        # d score = weight * (dO . v - dO . O + dL): the sum's own gradient is spread by the same weights.
        less = along - devidence_ref[b, queries.at, n]
        less_ref[b, queries.at, n] = less
        power = evidence_ref[b, queries.at, n] * _LOG2_E

        def body(j: Array, all_seen: bool, dq: Array) -> Array:
            keys, key = pl.ds(j * tiles.keys, tiles.keys), j * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            k = k_ref[b, keys, n // (N // K), :]
            scores = product(q, k, (1, 1)) * (scale * _LOG2_E)
            weights = jnp.exp2(scores - power[:, None])
            weights = weights if all_seen else jnp.where(queries.see(key), weights, 0.0)
            dscores = weights * (product(dout, v_ref[b, keys, n // (N // K), :], (1, 1)) - less[:, None])
            return dq + product(dscores.astype(k.dtype), k, (1, 0))

        dq = _over(queries.tiles, body, jnp.zeros((tiles.queries, H), jnp.float32))
        dq_ref[b, queries.at, n, :] = (dq * scale).astype(dq_ref.dtype)

    run = _call(
        kernel, (T // tiles.queries, N, B), [(q.shape, q.dtype), ((B, T, N), jnp.float32)], tiles,
        "attend_backward_queries", interpret,
    )  # fmt: skip
    dq, less = run(q, k, v, first, out, evidence, dout, devidence)
    return dq, less


def _keys_backward(
    q: Array, k: Array, v: Array, first: Array, end: Array, evidence: Array, dout: Array, less: Array,
    window: int, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """A block of threads has some keys, and walks along the queries that may see them, or its share of these: up to the
    end of the last key's window or document."""
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_KEYS if H >= _WIDE_HEADS else _KEYS._replace(stages=3), T, count)
    scale, stride, group = H**-0.5, T // count, N // K
    shares = max(1, min(_MOST_SHARES, min(window, count) * stride // tiles.queries // _LEAST_SHARE))

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, first_ref, end_ref, evidence_ref, dout_ref, less_ref, dk_ref, dv_ref = refs
        number, head, b = pl.program_id(0) // shares, pl.program_id(1), pl.program_id(2)
        share = pl.program_id(0) % shares
        keys, key = pl.ds(number * tiles.keys, tiles.keys), number * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        k, v = k_ref[b, keys, head, :], v_ref[b, keys, head, :]
        low = number * tiles.keys * stride // tiles.queries
        end_of = lambda row: jnp.minimum(end_ref[b, row], row + window)
        high = pl.cdiv(end_of((number + 1) * tiles.keys - 1) * stride, tiles.queries)
        own = pl.cdiv(high - low, shares)
        seeing = _Range.of(
            low + share * own, jnp.minimum(low + (share + 1) * own, high),
            pl.cdiv(((number + 1) * tiles.keys - 1) * stride, tiles.queries),
            end_of(number * tiles.keys) * stride // tiles.queries,
        )  # fmt: skip

        def body(n: Array, i: Array, all_see: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            queries = _Queries.of(i, first_ref, b, stride, window, tiles)
            q, dout = q_ref[b, queries.at, n, :], dout_ref[b, queries.at, n, :]
            power = evidence_ref[b, queries.at, n] * _LOG2_E
            scores = product(k, q, (1, 1)) * (scale * _LOG2_E)
            weights = jnp.exp2(scores - power[None, :])
            seen = (key[:, None] <= queries.last[None, :]) & (key[:, None] >= queries.first[None, :])
            weights = weights if all_see else jnp.where(seen, weights, 0.0)
            dscores = weights * (product(v, dout, (1, 1)) - less_ref[b, queries.at, n][None, :])
            dk, dv = carry
            return dk + product(dscores.astype(q.dtype), q, (1, 0)), dv + product(weights.astype(q.dtype), dout, (1, 0))

        sums = (jnp.zeros((tiles.keys, H), jnp.float32),) * 2
        for n in range(group):
            sums = _over(seeing, functools.partial(body, head * group + n), sums)
        dk_ref[share, b, keys, head, :] = (sums[0] * scale).astype(dk_ref.dtype)
        dv_ref[share, b, keys, head, :] = sums[1].astype(dv_ref.dtype)

    partial = ((shares, *k.shape), jnp.float32 if shares > 1 else k.dtype)
    run = _call(kernel, (count // tiles.keys * shares, K, B), [partial] * 2, tiles, "attend_backward_keys", interpret)
    dk, dv = (jnp.sum(parts, axis=0).astype(k.dtype) for parts in run(q, k, v, first, end, evidence, dout, less))
    return dk, dv
