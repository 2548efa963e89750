"""The game of the scales: each is paid for agreeing with the consensus of all, and they settle on weights.

For each token and head, the outputs O_c of C scales meet in their Gram matrix G = O O^T / H. Scale c's error against the
consensus is e_c(w) = G_cc - 2 (G w)_c + w^T G w = |O_c - sum_m w_m O_m|^2 / H, and its best response is softmax(p - tau e(w)).
The wide arrays are read once for G and once for the weighted sum; the game itself runs on C numbers a token and head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from nash_mhc.ops import nash_gpu
from nash_mhc.ops.platform import on_platform
from nash_mhc.ops.pyramid import upsample, upsample_transposed

GRAM = "gram"  # checkpoint name of the Gram matrix: C x C numbers a token and head, a pass over all scales to get
Scales = tuple[Array, ...]  # one array a scale, over tokens and heads
Gram = tuple[Scales, ...]  # C x C of them


class Rules(NamedTuple):
    """How weights are found: `nash` plays, `convex` takes the prior as it is, `mean` treats the scales present alike."""

    aggregation: str = "nash"
    iterations: int = 3


def _sum(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _softmax(logits: Scales, present: Scales) -> Scales:
    """Over the scales that are there; the others get exactly 0."""
    masked = [jnp.where(there, x, -jnp.inf) for x, there in zip(logits, present, strict=True)]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, masked))
    grown = [jnp.exp(x - top) for x in masked]
    total = _sum(grown)
    return tuple(x / total for x in grown)


# A value that is computed once a token and head and used many times over: without this, a compiler may compute it again in
# every loop that uses it, with all that it depends on (a CPU played the whole game once a channel and entry of G: ten times
# the step). On an accelerator, what lies between two of these is one fused pass.
_kept = jax.lax.optimization_barrier


class Round(NamedTuple):
    """One best response: from `before`, through the errors it saw, to `after`."""

    before: Scales
    gw: Scales  # G w
    errors: Scales
    after: Scales


Keep = Callable[[Any], Any]


def best_response(gram: Gram, prior: Scales, tau: Array, present: Scales, w: Scales, keep: Keep = _kept) -> Round:
    gw = tuple(_sum([g * x for g, x in zip(row, w, strict=True)]) for row in gram)
    consensus = _sum([x * y for x, y in zip(w, gw, strict=True)])
    errors = tuple(gram[c][c] - 2.0 * gw[c] + consensus for c in range(len(w)))
    answer = _softmax(tuple(p - tau * e for p, e in zip(prior, errors, strict=True)), present)
    return Round(*keep((w, gw, errors, answer)))


def play(
    gram: Gram, prior: Scales, tau: Array, present: Scales, rules: Rules, keep: Keep = _kept
) -> tuple[Scales, list[Round]]:
    """The weights that the scales settle on, and how they got there."""
    even = rules.aggregation == "mean"
    w = keep(_softmax(tuple(jnp.zeros_like(p) for p in prior) if even else prior, present))
    rounds = []
    for _ in range(rules.iterations if rules.aggregation == "nash" else 0):
        rounds.append(best_response(gram, prior, tau, present, w, keep))
        w = rounds[-1].after
    return w, rounds


def _through_softmax(w: Scales, dw: Scales) -> Scales:
    """The gradient of the logits of a softmax that came to `w`; exactly 0 for absent scales."""
    mean = _sum([x * d for x, d in zip(w, dw, strict=True)])
    return tuple(x * (d - mean) for x, d in zip(w, dw, strict=True))


def play_backward(
    gram: Gram, tau: Array, rules: Rules, w: Scales, rounds: list[Round], dw: Scales, keep: Keep = _kept
) -> tuple[Gram, Scales, Array]:
    """Gradients of G, of the prior and of tau (still one number a token), through every round of the game."""
    C = len(dw)
    zero = jnp.zeros_like(dw[0])
    dgram, dprior, dtau = [[zero] * C for _ in range(C)], [zero] * C, zero
    if rules.aggregation == "mean":
        return tuple(tuple(row) for row in dgram), tuple(dprior), dtau
    for r in reversed(rounds):
        dlogits = _through_softmax(r.after, dw)
        derrors = tuple(-tau * d for d in dlogits)
        total = _sum(derrors)
        dgw = tuple(total * x - 2.0 * d for x, d in zip(r.before, derrors, strict=True))
        dlogits, derrors, total, dgw = keep((dlogits, derrors, total, dgw))
        dprior = [a + d for a, d in zip(dprior, dlogits, strict=True)]
        dtau = dtau - _sum([e * d for e, d in zip(r.errors, dlogits, strict=True)])
        dw = tuple(total * r.gw[m] + _sum([dgw[c] * gram[c][m] for c in range(C)]) for m in range(C))
        dgram = [[dgram[c][m] + dgw[c] * r.before[m] + (derrors[c] if c == m else 0.0) for m in range(C)] for c in range(C)]
        dprior, dtau, dw, dgram = keep((dprior, dtau, dw, dgram))
    first = rounds[0].before if rounds else w
    dprior = [a + d for a, d in zip(dprior, _through_softmax(first, dw), strict=True)]
    return keep((tuple(tuple(row) for row in dgram), tuple(dprior), dtau))


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _half_gram(outs: Sequence[Array]) -> list[Array]:
    """G_ab for a <= b: the matrix is symmetric."""
    H, C = outs[0].shape[-1], len(outs)
    return [jnp.sum(outs[a] * outs[b], axis=-1) / H for a in range(C) for b in range(a, C)]


def _whole(half: Sequence[Array], C: int) -> Gram:
    places = {(a, b): i for i, (a, b) in enumerate((a, b) for a in range(C) for b in range(a, C))}
    return tuple(tuple(half[places[min(a, b), max(a, b)]] for b in range(C)) for a in range(C))


def _at_tokens(outs: Sequence[Array]) -> list[Array]:
    """Every scale's output at full resolution, float32."""
    T = outs[0].shape[1]
    return [_wide(upsample(o, T // o.shape[1])) for o in outs]


def _settle(
    rules: Rules, keep: Keep, at: list[Array], prior: Scales, tau: Array, present: Scales
) -> tuple[Array, Scales, Array, list[Array]]:
    """(y, w, residual, half of G) for tokens of any shape; `at` are the scales' outputs there, one more axis behind."""
    half = keep(_half_gram(at))
    gram = _whole(half, len(at))
    w, _ = play(gram, prior, tau, present, rules, keep)
    answer = best_response(gram, prior, tau, present, w, keep).after if rules.aggregation == "nash" else w
    residual = _sum([jnp.abs(a - b) for a, b in zip(answer, w, strict=True)])
    return _sum([x[..., None] * o for x, o in zip(w, at, strict=True)]), w, residual, half


def _unsettle(
    rules: Rules,
    keep: Keep,
    at: list[Array],
    prior: Scales,
    tau: Array,
    present: Scales,
    half: Sequence[Array],
    dy: Array,
    dw: Scales,
) -> tuple[list[Array], Scales, Array]:
    """Gradients of `at`, of the prior and of tau. The game is played again: cheaper than to keep its rounds."""
    C, H = len(at), dy.shape[-1]
    gram = _whole(half, C)
    w, rounds = play(gram, prior, tau, present, rules, keep)
    dw = keep(tuple(jnp.sum(dy * o, axis=-1) + d for o, d in zip(at, dw, strict=True)))
    dgram, dprior, dtau = play_backward(gram, tau, rules, w, rounds, dw, keep)
    # G_cm depends on O_c through both of its places; the two halves of dG came in separately.
    through = [_sum([((dgram[c][m] + dgram[m][c]) / H)[..., None] * at[m] for m in range(C)]) for c in range(C)]
    return [x[..., None] * dy + d for x, d in zip(w, through, strict=True)], dprior, dtau


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def aggregate(
    outs: Scales,
    prior_BTCN: Float[Array, "B T C N"],
    tau_N: Float[Array, "N"],
    present_BTC: Bool[Array, "B T C"],
    rules: Rules,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T C N"], Float[Array, "B T N"]]:
    """(sum_c w_c O_c at every token, the weights w, the residual of the game). `outs[c]` is [B, T / r^c, N, H], finest first.

    Rows are handed to tokens by `upsample`; `present` says which scales have one that belongs to the token's document.
    The residual, |BR(w) - w|_1, carries no gradient.
    """
    return _aggregate(outs, prior_BTCN, tau_N, present_BTC, rules)[:3]


def _unstacked(x_BTCN: Array) -> Scales:
    return tuple(x_BTCN[:, :, c] for c in range(x_BTCN.shape[2]))


def _aggregate(outs, prior_BTCN, tau_N, present_BTC, rules):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": functools.partial(_aggregate_in_xla, rules)}
    if nash_gpu.fits(outs):
        forms["cuda"] = functools.partial(_aggregate_in_kernel, rules)
    y, w, residual, half = on_platform(outs, prior_BTCN, tau_N, present_BTC, **forms)
    return _kept(y), w, residual, [checkpoint_name(g, GRAM) for g in half]


def _aggregate_in_xla(rules: Rules, outs: Scales, prior_BTCN: Array, tau_N: Array, present_BTC: Array) -> tuple[Any, ...]:
    present = _unstacked(present_BTC[..., None])
    y, w, residual, half = _settle(rules, _kept, _at_tokens(outs), _unstacked(prior_BTCN), tau_N[None, None], present)
    return y.astype(outs[0].dtype), jnp.stack(w, axis=2), residual, half


def _aggregate_in_kernel(
    rules: Rules, outs: Scales, prior_BTCN: Array, tau_N: Array, present_BTC: Array, *, interpret: bool = False
) -> tuple[Any, ...]:
    settle = functools.partial(_settle, rules, lambda x: x)
    return nash_gpu.forward(outs, prior_BTCN, tau_N, present_BTC, settle, interpret=interpret)


def _aggregate_fwd(outs, prior_BTCN, tau_N, present_BTC, rules):  # type: ignore[no-untyped-def]
    *results, half = _aggregate(outs, prior_BTCN, tau_N, present_BTC, rules)
    return tuple(results), (outs, prior_BTCN, tau_N, present_BTC, half)


def _aggregate_bwd(rules, saved, cotangents):  # type: ignore[no-untyped-def]
    dy_BTNH, dw_BTCN, _ = cotangents
    forms: dict[str, Any] = {"default": functools.partial(_backward_in_xla, rules)}
    if nash_gpu.fits(saved[0]):
        forms["cuda"] = functools.partial(_backward_in_kernel, rules)
    douts, dprior, dtau = on_platform(*saved, dy_BTNH, dw_BTCN, **forms)
    return _kept(tuple(douts)), dprior, jnp.sum(dtau, axis=(0, 1)), None


def _backward_in_xla(rules, outs, prior_BTCN, tau_N, present_BTC, half, dy_BTNH, dw_BTCN):  # type: ignore[no-untyped-def]
    """(d outs, d prior, d tau of each token and head)."""
    game = _unstacked(prior_BTCN), tau_N[None, None], _unstacked(present_BTC[..., None])
    dat, dprior, dtau = _unsettle(rules, _kept, _at_tokens(outs), *game, half, _wide(dy_BTNH), _unstacked(dw_BTCN))
    T = dy_BTNH.shape[1]
    douts = [upsample_transposed(d, T // o.shape[1]).astype(o.dtype) for d, o in zip(dat, outs, strict=True)]
    return douts, jnp.stack(dprior, axis=2), dtau


def _backward_in_kernel(rules, outs, prior_BTCN, tau_N, present_BTC, half, dy_BTNH, dw_BTCN, *, interpret=False):  # type: ignore[no-untyped-def]
    unsettle = functools.partial(_unsettle, rules, lambda x: x)
    return nash_gpu.backward(outs, prior_BTCN, tau_N, present_BTC, half, dy_BTNH, dw_BTCN, unsettle, interpret=interpret)


aggregate.defvjp(_aggregate_fwd, _aggregate_bwd)


def aggregate_reference(
    outs: Scales,
    prior_BTCN: Float[Array, "B T C N"],
    tau_N: Float[Array, "N"],
    present_BTC: Bool[Array, "B T C"],
    rules: Rules,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T C N"]]:
    """The same by its definition: errors as squared distances from the consensus, no Gram matrix, ordinary gradients."""
    o_BTCNH = jnp.stack([_wide(upsample(o, outs[0].shape[1] // o.shape[1])) for o in outs], axis=2)
    masked_softmax = lambda x: jax.nn.softmax(jnp.where(present_BTC[..., None], x, -jnp.inf), axis=2)
    consensus = lambda w: jnp.sum(w[..., None] * o_BTCNH, axis=2)
    prior = jnp.zeros_like(prior_BTCN) if rules.aggregation == "mean" else prior_BTCN
    w = masked_softmax(prior)
    for _ in range(rules.iterations if rules.aggregation == "nash" else 0):
        e = jnp.mean((o_BTCNH - consensus(w)[:, :, None]) ** 2, axis=-1)
        w = masked_softmax(prior_BTCN - tau_N[None, None, None] * e)
    return consensus(w).astype(outs[0].dtype), w
