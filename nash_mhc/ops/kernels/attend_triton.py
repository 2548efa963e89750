"""Attention with its log-sum-exp where few keys are visible: summaries of blocks, or the tokens of a window.

There is a row of keys for each block of tokens. A token sees the rows up to its own block within its document. With few
keys, reading queries and writing outputs dominates, so the GPU kernels (Pallas, Triton) do each once and move nothing.
Gradients also flow through the log-sum-exp. Results are deterministic, for any number of documents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import product, wide_dtype
from nash_mhc.ops.attention_io import ATTENDED, AttentionInput, AttentionOutput, Bounds, bounds_of
from nash_mhc.ops.platform import on_platform, run_kernel

_LOG2_E = math.log2(math.e)  # GPUs compute exp2, not exp


class Tiles(NamedTuple):
    """Tile sizes of a kernel, its warps per block, and its pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# The fastest tiles on an H200 for sequences of 2,048 to 32,768 tokens, by the largest number of visible keys.
_FORWARD = {1024: Tiles(128, 64, 4, 2), 512: Tiles(64, 64, 4, 3), 0: Tiles(64, 32, 4, 2)}
_QUERIES = {512: Tiles(64, 64, 4, 2), 0: Tiles(64, 32, 4, 2)}
_KEYS = Tiles(64, 64, 4, 2)
_WIDE_HEADS = 128  # heads this wide leave no shared memory for a third stage
# All tokens of a long document see its first keys. To balance the load, several blocks of threads share the queries of
# such a tile of keys. Each gets at least _LEAST_SHARE tiles of queries.
_LEAST_SHARE, _MOST_SHARES = 128, 4
_FEWEST = 16  # smallest dimension of a tensor-core matmul
# The score of a masked key, and the initial maximum. They differ because a GPU fuses the product and the subtraction
# before exp2: with equal values, the unrounded product would leave an error that overflows exp2.
_MASKED, _INITIAL_MAX = -1e30, -1e20


def fits_triton(inputs: AttentionInput) -> bool:
    """Return whether queries and keys divide into whole tiles for the tensor cores."""
    (_, T, _, H), count = inputs.q_BTNH.shape, inputs.k_BIKH.shape[1]
    divides = H in (16, 32, 64, 128) and min(T & -T, count & -count) >= _FEWEST
    return divides and jnp.dtype(inputs.q_BTNH.dtype) == jnp.bfloat16


def attend_triton_with_lse(inputs: AttentionInput, window: int | None = None) -> AttentionOutput:
    B, count = inputs.k_BIKH.shape[:2]
    segments_BI = jnp.zeros((B, count), jnp.int32) if inputs.segments_BI is None else inputs.segments_BI
    bounds = bounds_of(segments_BI) if inputs.documents is None else inputs.documents.bounds
    return AttentionOutput(*_attend(window or count, inputs.q_BTNH, inputs.k_BIKH, inputs.v_BIKH, bounds))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    window: int,  # visible rows of keys, including the token's own
    q_BTNH: Float[Array, "B T N H"],
    k_BIKH: Float[Array, "B I K H"],
    v_BIKH: Float[Array, "B I K H"],
    bounds: Bounds,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    return _attend_fwd(window, q_BTNH, k_BIKH, v_BIKH, bounds)[0]


def _attend_fwd(window, q, k, v, bounds):  # type: ignore[no-untyped-def]
    forms = [functools.partial(form, window=window) for form in (attend_reference, _attend_in_kernel)]
    out, lse = on_platform(q, k, v, *bounds, default=forms[0], cuda=forms[1])
    out, lse = checkpoint_name(out, ATTENDED), checkpoint_name(lse, ATTENDED)
    return (out, lse), (q, k, v, bounds, out, lse)


def _attend_bwd(window, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, bounds, *outputs = saved
    forms = [functools.partial(form, window=window) for form in (_backward_reference, _backward_in_kernel)]
    return *on_platform(q, k, v, *bounds, *outputs, *cotangents, default=forms[0], cuda=forms[1]), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend_reference(
    q_BTNH: Array, k_BIKH: Array, v_BIKH: Array, first_BI: Array, end_BI: Array, *, window: int
) -> tuple[Array, Array]:
    """Compute all scores at once; the kernels are tested against this."""
    (B, T, N, H), (count, K) = q_BTNH.shape, k_BIKH.shape[1:3]
    block_T, row_I = jnp.arange(T) // (T // count), jnp.arange(count)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bikh->bkgti", q_BTKGH, k_BIKH, preferred_element_type=wide_dtype(q_BTNH.dtype)) * H**-0.5
    first_BT1 = jnp.maximum(first_BI[:, block_T], block_T[None] - window + 1)[..., None]
    visible_BTI = (row_I[None, None] <= block_T[None, :, None]) & (row_I[None, None] >= first_BT1)
    scores = jnp.where(visible_BTI[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BIKH.dtype)
    out_BTKGH = jnp.einsum("bkgti,bikh->btkgh", weights, v_BIKH, preferred_element_type=wide_dtype(v_BIKH.dtype))
    lse_BTN = jax.nn.logsumexp(scores, axis=-1).transpose(0, 3, 1, 2).reshape(B, T, N)
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), lse_BTN


def _backward_reference(
    q: Array, k: Array, v: Array, first: Array, end: Array, out: Array, lse: Array, dout: Array, dlse: Array,
    *, window: int,
) -> tuple[Array, ...]:  # fmt: skip
    return jax.vjp(lambda q, k, v: attend_reference(q, k, v, first, end, window=window), q, k, v)[1]((dout, dlse))


def _tiles_for(choices: dict[int, Tiles], visible: int) -> Tiles:
    return choices[max(least for least in choices if visible >= least)]


def _fitted(tiles: Tiles, T: int, count: int) -> Tiles:
    return tiles._replace(queries=min(T & -T, tiles.queries), keys=min(count & -count, tiles.keys))


class _Range(NamedTuple):
    """Tile numbers from low to high; those from begin to end need no mask."""

    low: Array
    high: Array
    begin: Array
    end: Array

    @staticmethod
    def of(low: Array, high: Array, begin: Array, end: Array) -> _Range:
        begin = jnp.clip(begin, low, high)
        return _Range(low, high, begin, jnp.clip(end, begin, high))


class _Queries(NamedTuple):
    """A tile of queries, the first and last key row that each query may see, and the tiles of these keys."""

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
        visible = _Range.of(
            first_of(begin // stride) // tiles.keys, newest // tiles.keys + 1,
            pl.cdiv(first_of(newest), tiles.keys), (begin // stride + 1) // tiles.keys,
        )  # fmt: skip
        return _Queries(pl.ds(begin, tiles.queries), first_of(last), last, visible)

    def see(self, key: Array) -> Array:
        """Return the mask [queries, keys]."""
        return (key[None, :] <= self.last[:, None]) & (key[None, :] >= self.first[:, None])


def _over(numbers: _Range, body: Callable[..., Any], carry: Any) -> Any:
    """Loop over tiles with `body(tile, all_visible, carry)`: first those that need no mask, then the rest."""
    carry = lax.fori_loop(numbers.begin, numbers.end, lambda j, c: body(j, True, c), carry)
    before = numbers.begin - numbers.low
    masked = lambda i: numbers.low + i + jnp.where(i < before, 0, numbers.end - numbers.begin)
    return lax.fori_loop(0, before + numbers.high - numbers.end, lambda i, c: body(masked(i), False, c), carry)


def _attend_in_kernel(
    q: Array, k: Array, v: Array, first: Array, end: Array, *, window: int, interpret: bool = False
) -> tuple[Array, Array]:
    """Return (output [B, T, N, H], log-sum-exp [B, T, N])."""
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_tiles_for(_FORWARD, min(window, count)), T, count)
    to_power = H**-0.5 * _LOG2_E

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, out_ref: Any, lse_ref: Any) -> None:
        n, b = pl.program_id(1), pl.program_id(2)
        queries = _Queries.of(pl.program_id(0), first_ref, b, T // count, window, tiles)
        q = q_ref[b, queries.at, n, :]

        def body(j: Array, all_visible: bool, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            mixed, top, total = carry
            keys, key = pl.ds(j * tiles.keys, tiles.keys), j * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            scores = product(q, k_ref[b, keys, n // (N // K), :], (1, 1))
            scores = scores if all_visible else jnp.where(queries.see(key), scores, _MASKED)
            higher = jnp.maximum(top, jnp.max(scores, axis=1) * to_power)
            weights = jnp.exp2(scores * to_power - higher[:, None])
            rescale = jnp.exp2(top - higher)
            values = product(weights.astype(v_ref.dtype), v_ref[b, keys, n // (N // K), :], (1, 0))
            return mixed * rescale[:, None] + values, higher, total * rescale + jnp.sum(weights, axis=1)

        rows = tiles.queries
        start = jnp.zeros((rows, H), jnp.float32), jnp.full(rows, _INITIAL_MAX, jnp.float32), jnp.zeros(rows, jnp.float32)
        mixed, top, total = _over(queries.tiles, body, start)
        out_ref[b, queries.at, n, :] = (mixed / total[:, None]).astype(out_ref.dtype)
        lse_ref[b, queries.at, n] = (top + jnp.log2(total)) / _LOG2_E

    out, lse = run_kernel(
        "attend_forward", kernel, [q, k, v, first], [(q.shape, q.dtype), ((B, T, N), jnp.float32)],
        grid=(T // tiles.queries, N, B), warps=tiles.warps, stages=tiles.stages, interpret=interpret,
    )  # fmt: skip
    return out, lse


def _backward_in_kernel(
    q: Array, k: Array, v: Array, first: Array, end: Array, out: Array, lse: Array, dout: Array, dlse: Array, *,
    window: int, interpret: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    dq, delta = _queries_backward(q, k, v, first, out, lse, dout, dlse, window, interpret)
    return dq, *_keys_backward(q, k, v, first, end, lse, dout, delta, window, interpret)


def _queries_backward(
    q: Array, k: Array, v: Array, first: Array, out: Array, lse: Array, dout: Array, dlse: Array,
    window: int, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return (gradient of the queries, delta = dO . O - dL [B, T, N])."""
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_tiles_for(_QUERIES, min(window, count)), T, count)
    scale = H**-0.5

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, first_ref, out_ref, lse_ref, dout_ref, dlse_ref, dq_ref, delta_ref = refs
        n, b = pl.program_id(1), pl.program_id(2)
        queries = _Queries.of(pl.program_id(0), first_ref, b, T // count, window, tiles)
        q, dout = q_ref[b, queries.at, n, :], dout_ref[b, queries.at, n, :]
        along = jnp.sum(dout.astype(jnp.float32) * out_ref[b, queries.at, n, :].astype(jnp.float32), axis=1)
        # d score = weight * (dO . v - dO . O + dL): the gradient of the lse is spread by the same weights.
        delta = along - dlse_ref[b, queries.at, n]
        delta_ref[b, queries.at, n] = delta
        power = lse_ref[b, queries.at, n] * _LOG2_E

        def body(j: Array, all_visible: bool, dq: Array) -> Array:
            keys, key = pl.ds(j * tiles.keys, tiles.keys), j * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
            k = k_ref[b, keys, n // (N // K), :]
            scores = product(q, k, (1, 1)) * (scale * _LOG2_E)
            weights = jnp.exp2(scores - power[:, None])
            weights = weights if all_visible else jnp.where(queries.see(key), weights, 0.0)
            dscores = weights * (product(dout, v_ref[b, keys, n // (N // K), :], (1, 1)) - delta[:, None])
            return dq + product(dscores.astype(k.dtype), k, (1, 0))

        dq = _over(queries.tiles, body, jnp.zeros((tiles.queries, H), jnp.float32))
        dq_ref[b, queries.at, n, :] = (dq * scale).astype(dq_ref.dtype)

    dq, delta = run_kernel(
        "attend_backward_queries", kernel, [q, k, v, first, out, lse, dout, dlse],
        [(q.shape, q.dtype), ((B, T, N), jnp.float32)],
        grid=(T // tiles.queries, N, B), warps=tiles.warps, stages=tiles.stages, interpret=interpret,
    )  # fmt: skip
    return dq, delta


def _keys_backward(
    q: Array, k: Array, v: Array, first: Array, end: Array, lse: Array, dout: Array, delta: Array,
    window: int, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the gradients of keys and values.

    A block of threads holds a tile of keys and loops over its share of the queries that may see them, up to the end of
    the last key's window or document.
    """
    (B, T, N, H), (count, K) = q.shape, k.shape[1:3]
    tiles = _fitted(_KEYS if H >= _WIDE_HEADS else _KEYS._replace(stages=3), T, count)
    scale, stride, group = H**-0.5, T // count, N // K
    shares = max(1, min(_MOST_SHARES, min(window, count) * stride // tiles.queries // _LEAST_SHARE))

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, first_ref, end_ref, lse_ref, dout_ref, delta_ref, dk_ref, dv_ref = refs
        number, head, b = pl.program_id(0) // shares, pl.program_id(1), pl.program_id(2)
        share = pl.program_id(0) % shares
        keys, key = pl.ds(number * tiles.keys, tiles.keys), number * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        k, v = k_ref[b, keys, head, :], v_ref[b, keys, head, :]
        low = number * tiles.keys * stride // tiles.queries
        end_of = lambda row: jnp.minimum(end_ref[b, row], row + window)
        high = pl.cdiv(end_of((number + 1) * tiles.keys - 1) * stride, tiles.queries)
        own = pl.cdiv(high - low, shares)
        query_tiles = _Range.of(
            low + share * own, jnp.minimum(low + (share + 1) * own, high),
            pl.cdiv(((number + 1) * tiles.keys - 1) * stride, tiles.queries),
            end_of(number * tiles.keys) * stride // tiles.queries,
        )  # fmt: skip

        def body(n: Array, i: Array, all_visible: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            queries = _Queries.of(i, first_ref, b, stride, window, tiles)
            q, dout = q_ref[b, queries.at, n, :], dout_ref[b, queries.at, n, :]
            power = lse_ref[b, queries.at, n] * _LOG2_E
            scores = product(k, q, (1, 1)) * (scale * _LOG2_E)
            weights = jnp.exp2(scores - power[None, :])
            visible = (key[:, None] <= queries.last[None, :]) & (key[:, None] >= queries.first[None, :])
            weights = weights if all_visible else jnp.where(visible, weights, 0.0)
            dscores = weights * (product(v, dout, (1, 1)) - delta_ref[b, queries.at, n][None, :])
            dk, dv = carry
            return dk + product(dscores.astype(q.dtype), q, (1, 0)), dv + product(weights.astype(q.dtype), dout, (1, 0))

        sums = (jnp.zeros((tiles.keys, H), jnp.float32),) * 2
        for n in range(group):
            sums = _over(query_tiles, functools.partial(body, head * group + n), sums)
        dk_ref[share, b, keys, head, :] = (sums[0] * scale).astype(dk_ref.dtype)
        dv_ref[share, b, keys, head, :] = sums[1].astype(dv_ref.dtype)

    partial = ((shares, *k.shape), jnp.float32 if shares > 1 else k.dtype)
    sums = run_kernel(
        "attend_backward_keys", kernel, [q, k, v, first, end, lse, dout, delta], [partial] * 2,
        grid=(count // tiles.keys * shares, K, B), warps=tiles.warps, stages=tiles.stages, interpret=interpret,
    )  # fmt: skip
    dk, dv = (jnp.sum(shared, axis=0).astype(k.dtype) for shared in sums)
    return dk, dv
