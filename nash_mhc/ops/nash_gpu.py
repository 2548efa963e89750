"""The game of the scales as GPU kernels (Pallas, Triton): one pass over the scales' outputs forward, and one backward.

A block of threads follows a few heads through the tokens that share a row of the coarsest scale. Rows of coarser scales are
loaded when they begin to count and held until they no longer do; the sums of their gradients are held alike. XLA reads
and writes what lies between its fusions, some sixty of them. The arithmetic is `nash.py`'s, handed in as functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_HEADS, _WARPS = 4, 2  # of a block


def _strides(outs: Sequence[Array]) -> list[int]:
    return [outs[0].shape[1] // o.shape[1] for o in outs]


def fits(outs: Sequence[Array]) -> bool:
    """Whether these are outputs of whole rows, each scale some times coarser than the one below, and heads fill threads."""
    H, strides = outs[0].shape[-1], _strides(outs)
    nested = all(b > a and b % a == 0 for a, b in itertools.pairwise(strides))
    return strides[0] == 1 and nested and outs[0].shape[1] % strides[-1] == 0 and H in (16, 32, 64, 128, 256)


def _call(
    name: str,
    C: int,
    token: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    outs: Sequence[Any],
    *,
    summed: bool,
    interpret: bool,
) -> list[Array]:
    """Runs `token(at, tiles, arguments, results)` for every token of every block.

    The first C arguments are the scales' outputs: those above the finest reach `token` as tiles, the rows that it uses. If
    `summed`, it returns a tile for each of them, and results 1 .. C-1 are filled with their sums over the tokens that use a
    row. `at` picks a token's part of any other array [B, T, ..., N, ...]; see `_At`.
    """
    (B, T, N, H), strides = args[0].shape, _strides(args[:C])
    heads = min(N & -N, _HEADS)
    wide = jnp.promote_types(args[0].dtype, jnp.float32)

    def kernel(*refs: Any) -> None:
        batch, block, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * heads
        at_heads = pl.ds(first, heads)
        ins = refs[: len(args)]
        results = refs[len(args) :]

        def row_of(ref: Any, i: Array) -> tuple[Any, ...]:
            return batch, jnp.clip(i, 0, ref.shape[1] - 1), at_heads

        def visit(c: int, q: Array, tiles: list[Array]) -> tuple[Array, ...]:
            """Group q of scale c, the tokens q s - 1 .. q s + s - 2, which use row q - 1: gradient sums of the scales above."""
            if c == 0:
                t = q - 1
                there = (t >= 0) & (t < T)
                at = _At(batch, jnp.clip(t, 0, T - 1), at_heads, there)
                sums = token(at, tiles, ins, results)
                return tuple(jnp.where(there, x, 0.0) for x in sums)
            tile = jnp.where(q > 0, ins[c][row_of(ins[c], q - 1)].astype(wide), 0.0)  # before the first block: nothing
            ratio = strides[c] // strides[c - 1]

            def child(n: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                return tuple(a + b for a, b in zip(sums, visit(c - 1, q * ratio + n, [tile, *tiles]), strict=True))

            above = C - c if summed else 0  # sums of this scale and of those above it
            sums = lax.fori_loop(0, ratio, child, (jnp.zeros((heads, H), wide),) * above)
            if not summed:
                return ()
            ref, i = results[c], q - 1
            inside = jnp.broadcast_to((i >= 0) & (i < ref.shape[1]), (heads, H))
            plgpu.store(ref.at[row_of(ref, i)], sums[0].astype(ref.dtype), mask=inside)
            return sums[1:]

        visit(C - 1, block, [])

    return list(pl.pallas_call(
        kernel, out_shape=list(outs), grid=(B, T // strides[-1] + 1, N // heads),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name=name, interpret=interpret,
    )(*args))  # fmt: skip


class _At(NamedTuple):
    """One token and a few heads of a batch."""

    batch: Array
    t: Array
    heads: Any
    there: Array  # whether it is one of the row's tokens

    def _index(self, between: Sequence[int]) -> tuple[Any, ...]:
        # Not as plain integers, which the interpreter's masked store cannot take.
        return self.batch, self.t, *(jnp.full((), c, jnp.int32) for c in between), self.heads

    def load(self, ref: Any, *between: int) -> Array:
        """[heads] or [heads, H], float32; `between` are indices of the axes between time and heads."""
        x = ref[self._index(between)]
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def store(self, x: Array, ref: Any, *between: int) -> None:
        plgpu.store(ref.at[self._index(between)], x.astype(ref.dtype), mask=jnp.broadcast_to(self.there, x.shape))


def forward(
    outs: Sequence[Array],
    prior_BTCN: Array,
    tau_N: Array,
    present_BTC: Array,
    settle: Callable[..., Any],
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, list[Array]]:
    """(y, w, residual, half of the Gram matrix): `settle(tiles, prior, tau, present)` gives them for one token."""
    C, (B, T, N, _) = len(outs), outs[0].shape
    pairs = C * (C + 1) // 2

    def token(at: _At, tiles: list[Array], ins: Sequence[Any], results: Sequence[Any]) -> Sequence[Array]:
        fine_ref, prior_ref, tau_ref, present_ref = ins[0], *ins[C:]
        y_ref, w_ref, residual_ref, *gram_refs = results
        prior = tuple(at.load(prior_ref, c) for c in range(C))
        present = tuple(present_ref[at.batch, at.t, c] != 0 for c in range(C))
        y, w, residual, gram = settle([at.load(fine_ref), *tiles], prior, tau_ref[at.heads], present)
        at.store(y, y_ref)
        for c in range(C):
            at.store(w[c], w_ref, c)
        at.store(residual, residual_ref)
        for g, ref in zip(gram, gram_refs, strict=True):
            at.store(g, ref)
        return ()

    one = jax.ShapeDtypeStruct((B, T, N), prior_BTCN.dtype)
    shapes = [jax.ShapeDtypeStruct(outs[0].shape, outs[0].dtype), jax.ShapeDtypeStruct(prior_BTCN.shape, one.dtype)]
    args = [*outs, prior_BTCN, tau_N, present_BTC.astype(jnp.int32)]
    results = _call("nash_forward", C, token, args, [*shapes, one, *[one] * pairs], summed=False, interpret=interpret)
    return results[0], results[1], results[2], results[3:]


def backward(
    outs: Sequence[Array],
    prior_BTCN: Array,
    tau_N: Array,
    present_BTC: Array,
    gram: Sequence[Array],
    dy_BTNH: Array,
    dw_BTCN: Array,
    unsettle: Callable[..., Any],
    *,
    interpret: bool = False,
) -> tuple[list[Array], Array, Array]:
    """(d outs, d prior, d tau of each token): `unsettle(tiles, prior, tau, present, gram, dy, dw)` for one token."""
    C, (B, T, N, _) = len(outs), outs[0].shape

    def token(at: _At, tiles: list[Array], ins: Sequence[Any], results: Sequence[Any]) -> Sequence[Array]:
        fine_ref, (prior_ref, tau_ref, present_ref, dy_ref, dw_ref, *gram_refs) = ins[0], ins[C:]
        dfine_ref, (dprior_ref, dtau_ref) = results[0], results[C:]
        prior, dw = (tuple(at.load(ref, c) for c in range(C)) for ref in (prior_ref, dw_ref))
        present = tuple(present_ref[at.batch, at.t, c] != 0 for c in range(C))
        gram = [at.load(ref) for ref in gram_refs]
        douts, dprior, dtau = unsettle(
            [at.load(fine_ref), *tiles], prior, tau_ref[at.heads], present, gram, at.load(dy_ref), dw
        )
        at.store(douts[0], dfine_ref)
        for c in range(C):
            at.store(dprior[c], dprior_ref, c)
        at.store(dtau, dtau_ref)
        return douts[1:]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*outs, prior_BTCN)]
    args = [*outs, prior_BTCN, tau_N, present_BTC.astype(jnp.int32), dy_BTNH, dw_BTCN, *gram]
    each = jax.ShapeDtypeStruct((B, T, N), prior_BTCN.dtype)
    *douts, dprior, dtau = _call("nash_backward", C, token, args, [*shapes, each], summed=True, interpret=interpret)
    return douts, dprior, dtau
