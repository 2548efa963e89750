"""The game of the scales as GPU kernels (Pallas, Triton): one pass over the scales' outputs forward, and one backward.

Tokens and heads are independent, so a block of threads computes everything for some of them. XLA would use some sixty
fusions with intermediate arrays. The arithmetic is passed in as functions from `nash.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_NUMBERS, _WARPS = 2048, 4  # elements of one scale's output in a block: 16 per thread


def _rows(x: Array) -> int:
    """Return the rows per block of x [B, T, N, H]."""
    return max(1, _NUMBERS // x.shape[-1])


def fits(outs: Sequence[Array]) -> bool:
    """Return whether heads fill whole threads, and tokens and heads divide into whole blocks."""
    H = outs[0].shape[-1]
    return H in (16, 32, 64, 128, 256) and math.prod(outs[0].shape[:3]) % _rows(outs[0]) == 0


def _call(
    name: str, run: Callable[..., Sequence[Array]], args: Sequence[Array], results: Sequence[Any], rows: int, *, interpret: bool
) -> list[Array]:
    """Call `run` on blocks of `rows` rows; every array is [B, T, N] or [B, T, N, H]."""
    flat = lambda shape: (math.prod(shape[:3]), *shape[3:])
    of = lambda shape: pl.BlockSpec((rows, *shape[3:]), lambda i: (i, *[0] * len(shape[3:])))

    def kernel(*refs: Any) -> None:
        ins, outs = refs[: len(args)], refs[len(args) :]
        loaded = [ref[...].astype(jnp.promote_types(ref.dtype, jnp.float32)) for ref in ins]
        for ref, value in zip(outs, run(*loaded), strict=True):
            ref[...] = value.astype(ref.dtype)

    flat_results = pl.pallas_call(
        kernel, out_shape=[jax.ShapeDtypeStruct(flat(r.shape), r.dtype) for r in results],
        grid=(math.prod(args[0].shape[:3]) // rows,),
        in_specs=[of(a.shape) for a in args], out_specs=[of(r.shape) for r in results],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name=name, interpret=interpret,
    )(*(a.reshape(flat(a.shape)) for a in args))  # fmt: skip
    return [x.reshape(r.shape) for x, r in zip(flat_results, results, strict=True)]


def _of_tokens(tau_N: Array, like_BTN: Array) -> Array:
    return jnp.broadcast_to(tau_N.astype(like_BTN.dtype), like_BTN.shape)


def forward(
    outs: Sequence[Array], bids: Sequence[Array], tau_N: Array, solve: Callable[..., Any], *, interpret: bool = False
) -> tuple[Array, tuple[Array, ...], Array]:
    """Return (y, w, residual), as `solve(outs, bids, tau)` returns them for the tokens of a block."""
    C = len(outs)

    def run(*loaded: Array) -> Sequence[Array]:
        y, w, residual = solve(list(loaded[:C]), loaded[C : 2 * C], loaded[2 * C])
        return [y, *w, residual]

    args = [*outs, *bids, _of_tokens(tau_N, bids[0])]
    y, *w, residual = _call("nash_forward", run, args, [outs[0], *bids, bids[0]], _rows(outs[0]), interpret=interpret)
    return y, tuple(w), residual


def backward(
    outs: Sequence[Array],
    bids: Sequence[Array],
    tau_N: Array,
    dy_BTNH: Array,
    dw: Sequence[Array],
    solve_backward: Callable[..., Any],
    *,
    interpret: bool = False,
) -> tuple[list[Array], list[Array], Array]:
    """Return (d outs, d bids, d tau per token), as `solve_backward(outs, bids, tau, dy, dw)` does for a block."""
    C = len(outs)

    def run(*loaded: Array) -> Sequence[Array]:
        tau, dy, *dw = loaded[2 * C :]
        douts, dbids, dtau = solve_backward(list(loaded[:C]), loaded[C : 2 * C], tau, dy, tuple(dw))
        return [*douts, *dbids, dtau]

    args = [*outs, *bids, _of_tokens(tau_N, bids[0]), dy_BTNH, *dw]
    results = _call("nash_backward", run, args, [*outs, *bids, bids[0]], _rows(outs[0]), interpret=interpret)
    return results[:C], results[C : 2 * C], results[-1]
