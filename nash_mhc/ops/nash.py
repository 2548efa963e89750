"""The game of the scales: iterated best responses that weight each scale by its agreement with the consensus.

For each token and head, the outputs O_c of C scales have the Gram matrix G = O O^T / H. Scale c's error against the
consensus is e_c(w) = G_cc - 2 (G w)_c + w^T G w = |O_c - sum_m w_m O_m|^2 / H, and its best response is
softmax(b - tau e(w)) with bids b. A scale that bids -inf is absent: its weight is exactly 0. The outputs are read once
for G and once for the weighted sum; the game itself runs on C numbers per token and head.

XLA on a GPU would use some sixty fusions with intermediate arrays. In the GPU kernels (Pallas, Triton), a block of
threads computes everything for some tokens and heads: one pass over the outputs forward, and one backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import add_up, widen
from nash_mhc.ops.platform import on_platform, run_kernel

Scales = tuple[Array, ...]  # one array per scale, over tokens and heads
Gram = tuple[Scales, ...]  # C x C arrays


class Rules(NamedTuple):
    """How to weight the scales: `nash` plays the game, `convex` is softmax(bids), `mean` is equal for all present."""

    aggregation: str = "nash"
    iterations: int = 3


def _softmax(logits: Scales) -> Scales:
    """Return the softmax over the present scales. Absent scales get exactly 0; the finest is always present."""
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, logits))
    grown = [jnp.exp(x - top) for x in logits]
    total = add_up(grown)
    return tuple(x / total for x in grown)


# Without a barrier, XLA may recompute a small value in every loop that uses it: on a CPU, the whole game ran once per
# channel and entry of G, and the step took ten times as long. On accelerators, code between two barriers is one fusion.
_materialize = jax.lax.optimization_barrier


class Round(NamedTuple):
    """One best response: weights before, their errors, weights after."""

    before: Scales
    gw: Scales  # G w
    errors: Scales
    after: Scales


Barrier = Callable[[Any], Any]


def _best_response(gram: Gram, bids: Scales, tau: Array, w: Scales, barrier: Barrier) -> Round:
    gw = tuple(add_up([g * x for g, x in zip(row, w, strict=True)]) for row in gram)
    consensus = add_up([x * y for x, y in zip(w, gw, strict=True)])
    errors = tuple(gram[c][c] - 2.0 * gw[c] + consensus for c in range(len(w)))
    response = _softmax(tuple(b - tau * e for b, e in zip(bids, errors, strict=True)))
    return Round(*barrier((w, gw, errors, response)))


def _iterate(gram: Gram, bids: Scales, tau: Array, rules: Rules, barrier: Barrier) -> tuple[Scales, list[Round]]:
    """Return the final weights and all rounds."""
    w = barrier(_softmax(_equal_bids(bids) if rules.aggregation == "mean" else bids))
    rounds = []
    for _ in range(rules.iterations if rules.aggregation == "nash" else 0):
        rounds.append(_best_response(gram, bids, tau, w, barrier))
        w = rounds[-1].after
    return w, rounds


def _equal_bids(bids: Scales) -> Scales:
    return tuple(jnp.where(b > -jnp.inf, 0.0, -jnp.inf).astype(b.dtype) for b in bids)


def _softmax_backward(w: Scales, dw: Scales) -> Scales:
    """Return the gradient of the logits of a softmax with result `w`; exactly 0 for absent scales."""
    mean = add_up([x * d for x, d in zip(w, dw, strict=True)])
    return tuple(x * (d - mean) for x, d in zip(w, dw, strict=True))


def _iterate_backward(
    gram: Gram, tau: Array, rules: Rules, w: Scales, rounds: list[Round], dw: Scales, barrier: Barrier
) -> tuple[Gram, Scales, Array]:
    """Return the gradients of G, of the bids and of tau (per token), through every round."""
    C = len(dw)
    zero = jnp.zeros_like(dw[0])
    dgram, dbids, dtau = [[zero] * C for _ in range(C)], [zero] * C, zero
    if rules.aggregation == "mean":
        return tuple(tuple(row) for row in dgram), tuple(dbids), dtau
    for r in reversed(rounds):
        dlogits = _softmax_backward(r.after, dw)
        derrors = tuple(-tau * d for d in dlogits)
        total = add_up(derrors)
        dgw = tuple(total * x - 2.0 * d for x, d in zip(r.before, derrors, strict=True))
        dlogits, derrors, total, dgw = barrier((dlogits, derrors, total, dgw))
        dbids = [a + d for a, d in zip(dbids, dlogits, strict=True)]
        dtau = dtau - add_up([e * d for e, d in zip(r.errors, dlogits, strict=True)])
        dw = tuple(total * r.gw[m] + add_up([dgw[c] * gram[c][m] for c in range(C)]) for m in range(C))
        dgram = [[dgram[c][m] + dgw[c] * r.before[m] + (derrors[c] if c == m else 0.0) for m in range(C)] for c in range(C)]
        dbids, dtau, dw, dgram = barrier((dbids, dtau, dw, dgram))
    first = rounds[0].before if rounds else w
    dbids = [a + d for a, d in zip(dbids, _softmax_backward(first, dw), strict=True)]
    return barrier((tuple(tuple(row) for row in dgram), tuple(dbids), dtau))


def _gram(outs: Sequence[Array], barrier: Barrier) -> Gram:
    H, C = outs[0].shape[-1], len(outs)
    half = barrier({(a, b): jnp.sum(outs[a] * outs[b], axis=-1) / H for a in range(C) for b in range(a, C)})
    return tuple(tuple(half[min(a, b), max(a, b)] for b in range(C)) for a in range(C))


def _solve(rules: Rules, barrier: Barrier, outs: Sequence[Array], bids: Scales, tau: Array) -> tuple[Array, Scales, Array]:
    """Return (y, w, residual) for tokens of any shape; `outs` have a channel axis at the end."""
    gram = _gram(outs, barrier) if rules.aggregation == "nash" else ()
    w, _ = _iterate(gram, bids, tau, rules, barrier)
    response = _best_response(gram, bids, tau, w, barrier).after if rules.aggregation == "nash" else w
    residual = add_up([jnp.abs(a - b) for a, b in zip(response, w, strict=True)])
    return add_up([x[..., None] * o for x, o in zip(w, outs, strict=True)]), w, residual


def _solve_backward(
    rules: Rules, barrier: Barrier, outs: Sequence[Array], bids: Scales, tau: Array, dy: Array, dw: Scales
) -> tuple[list[Array], Scales, Array]:
    """Return the gradients of `outs`, bids and tau. Replaying the game is cheaper than saving its rounds."""
    C, H, is_game = len(outs), dy.shape[-1], rules.aggregation == "nash"
    gram = _gram(outs, barrier) if is_game else ()
    w, rounds = _iterate(gram, bids, tau, rules, barrier)
    dw = barrier(tuple(jnp.sum(dy * o, axis=-1) + d for o, d in zip(outs, dw, strict=True)))
    dgram, dbids, dtau = _iterate_backward(gram, tau, rules, w, rounds, dw, barrier)
    douts = [x[..., None] * dy for x in w]
    if is_game:
        # G_cm depends on O_c through both factors; dG holds the two halves separately.
        through = [add_up([((dgram[c][m] + dgram[m][c]) / H)[..., None] * outs[m] for m in range(C)]) for c in range(C)]
        douts = [a + b for a, b in zip(douts, through, strict=True)]
    return douts, dbids, dtau


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def aggregate(
    outs: Scales, bids: Scales, tau_N: Float[Array, "N"], rules: Rules
) -> tuple[Float[Array, "B T N H"], Scales, Float[Array, "B T N"]]:
    """Return (sum_c w_c O_c, weights w, residual) of outputs [B, T, N, H] and bids [B, T, N], finest scale first.

    The finest scale is always present. The residual of the game, |BR(w) - w|_1, has no gradient.
    """
    return _aggregate_fwd(outs, bids, tau_N, rules)[0]


def _aggregate_fwd(outs, bids, tau_N, rules):  # type: ignore[no-untyped-def]
    in_xla, in_kernel = (functools.partial(form, rules) for form in (_aggregate_in_xla, _aggregate_in_kernel))
    results = on_platform(outs, bids, tau_N, default=in_xla, cuda=in_kernel, fits=fits_kernel(outs))
    return _materialize(results), (outs, bids, tau_N)


def _aggregate_bwd(rules, saved, cotangents):  # type: ignore[no-untyped-def]
    dy_BTNH, dw, _ = cotangents
    in_xla, in_kernel = (functools.partial(form, rules) for form in (_backward_in_xla, _backward_in_kernel))
    results = on_platform(*saved, dy_BTNH, dw, default=in_xla, cuda=in_kernel, fits=fits_kernel(saved[0]))
    douts, dbids, dtau = _materialize(results)
    return tuple(douts), tuple(dbids), jnp.sum(dtau, axis=(0, 1))


aggregate.defvjp(_aggregate_fwd, _aggregate_bwd)


def _aggregate_in_xla(rules: Rules, outs: Scales, bids: Scales, tau_N: Array) -> tuple[Any, ...]:
    y, w, residual = _solve(rules, _materialize, [widen(o) for o in outs], bids, tau_N[None, None])
    return y.astype(outs[0].dtype), w, residual


def _backward_in_xla(rules, outs, bids, tau_N, dy_BTNH, dw):  # type: ignore[no-untyped-def]
    """Return (d outs, d bids, d tau per token and head)."""
    wide = [widen(o) for o in outs]
    douts, dbids, dtau = _solve_backward(rules, _materialize, wide, bids, tau_N[None, None], widen(dy_BTNH), dw)
    return [d.astype(o.dtype) for d, o in zip(douts, outs, strict=True)], list(dbids), dtau


def aggregate_reference(
    outs: Scales, bids: Scales, tau_N: Float[Array, "N"], rules: Rules
) -> tuple[Float[Array, "B T N H"], Scales]:
    """Compute `aggregate` by its definition: squared distances from the consensus, automatic gradients."""
    o_CBTNH, b_CBTN = jnp.stack([widen(o) for o in outs]), jnp.stack(bids)
    present_CBTN = b_CBTN > -jnp.inf
    softmax = lambda x: jax.nn.softmax(jnp.where(present_CBTN, x, -jnp.inf), axis=0)
    consensus = lambda w: jnp.sum(w[..., None] * o_CBTNH, axis=0)
    w = softmax(jnp.zeros_like(b_CBTN) if rules.aggregation == "mean" else b_CBTN)
    for _ in range(rules.iterations if rules.aggregation == "nash" else 0):
        e = jnp.mean((o_CBTNH - consensus(w)[None]) ** 2, axis=-1)
        w = softmax(b_CBTN - tau_N[None, None, None] * e)
    return consensus(w).astype(outs[0].dtype), tuple(w)


# --- GPU kernels -----------------------------------------------------------------------------------------------------

_BLOCK_SIZE, _WARPS = 2048, 4  # elements of one scale's output in a block: 16 per thread


def _rows(x: Array) -> int:
    """Return the rows per block of x [B, T, N, H]."""
    return max(1, _BLOCK_SIZE // x.shape[-1])


def fits_kernel(outs: Sequence[Array]) -> bool:
    """Return whether heads fill whole threads, and tokens and heads divide into whole blocks."""
    H = outs[0].shape[-1]
    return H in (16, 32, 64, 128, 256) and math.prod(outs[0].shape[:3]) % _rows(outs[0]) == 0


def _aggregate_in_kernel(rules: Rules, outs: Scales, bids: Scales, tau_N: Array, *, interpret: bool = False) -> tuple[Any, ...]:
    solve, args = functools.partial(_solve, rules, lambda x: x), (outs, bids, _per_token(tau_N, bids))
    return _call("nash_forward", solve, args, (outs[0], bids, bids[0]), interpret)


def _backward_in_kernel(rules, outs, bids, tau_N, dy_BTNH, dw, *, interpret=False):  # type: ignore[no-untyped-def]
    solve, args = functools.partial(_solve_backward, rules, lambda x: x), (outs, bids, _per_token(tau_N, bids), dy_BTNH, dw)
    return _call("nash_backward", solve, args, ([*outs], [*bids], bids[0]), interpret)


def _per_token(tau_N: Array, bids: Scales) -> Array:
    return jnp.broadcast_to(tau_N.astype(bids[0].dtype), bids[0].shape)


def _call(name: str, solve: Callable[..., Any], args: tuple[Any, ...], results: Any, interpret: bool) -> Any:
    """Call `solve` on blocks of tokens and heads, and return a tree of arrays like `results`.

    Every array is [B, T, N] or [B, T, N, H].
    """
    (ins, in_form), (outs, out_form) = jax.tree.flatten(args), jax.tree.flatten(results)
    rows, count = _rows(ins[0]), math.prod(ins[0].shape[:3])
    block = lambda a: pl.BlockSpec((rows, *a.shape[3:]), lambda i: (i, *[0] * len(a.shape[3:])))

    def kernel(*refs: Any) -> None:
        values = solve(*jax.tree.unflatten(in_form, [widen(ref[...]) for ref in refs[: len(ins)]]))
        for ref, value in zip(refs[len(ins) :], jax.tree.leaves(values), strict=True):
            ref[...] = value.astype(ref.dtype)

    flat = run_kernel(
        name, kernel, [a.reshape(count, *a.shape[3:]) for a in ins], [((count, *a.shape[3:]), a.dtype) for a in outs],
        grid=(count // rows,), warps=_WARPS, in_specs=[block(a) for a in ins], out_specs=[block(a) for a in outs],
        interpret=interpret,
    )  # fmt: skip
    return jax.tree.unflatten(out_form, [x.reshape(a.shape) for x, a in zip(flat, outs, strict=True)])
