"""Learning from a teacher of whom the K likeliest tokens of each place are known, and all others as one.

    loss = sum over the K of p log(p / q)  +  p_rest log(p_rest / q_rest)

p is the teacher's, from its logits and the log-sum-exp over its whole vocabulary; q the student's, from its own. What
is left over counts as one token more: a student that puts too much or too little there is corrected, which a softmax
over the K alone (`renormalised`) does not see (arXiv 2503.16870). At temperature t both are softmaxes of logits / t,
and the loss is times t^2.

Where some of the others are known as well, drawn at random, they stand for all of them instead of the rest: each
counts (V - K) / R times, which on average is the whole divergence.

Walked in chunks along T, as in `xent.py`: gradients are formed where the logits of a chunk are, and [B, T, V] never is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.xent import chunk_length

_LEAST = 1e-7  # of a share that is left over: below it, a difference of two numbers near 1 says nothing


class Teacher(NamedTuple):
    """What is known of a teacher at every place."""

    ids: Int[Array, "*A B T K"]  # its likeliest tokens, the likeliest first; then those drawn at random, none of them again
    logits: Float[Array, "*A B T K"]
    lse: Float[Array, "*A B T"]  # log-sum-exp of its logits over the temperature, all tokens
    layers: Float[Array, "*A L B T D"] | None = None  # its stream after each layer, where that is compared


_NORMALISED = 0.8  # of what layers are compared by; the rest is their plain difference


class Weights(NamedTuple):
    """Of the parts of the loss; what is distilled, `1 - hard - text`, is the rest."""

    text: float = 0.0  # cross-entropy of the text itself
    hard: float = 0.0  # cross-entropy of the teacher's first choice
    temperature: float = 1.0
    renormalised: bool = False  # for comparison: both softmaxes over the K alone
    random: int = 0  # of the tokens that are known, the last so many were drawn at random

    @property
    def soft(self) -> float:
        return (1.0 - self.text - self.hard) * self.temperature**2

    def counts(self, known: int, vocab_size: int) -> np.ndarray:
        """How many tokens each of the known ones stands for."""
        likeliest = known - self.random
        each = np.ones(known, np.float32)
        each[likeliest:] = (vocab_size - likeliest) / max(self.random, 1)
        return each


class DistillSums(NamedTuple):
    """Sums over tokens, each weighted by the token's weight; divide by `weight` for means."""

    loss: Float[Array, ""]
    kl: Float[Array, ""]  # nats, of the K and the rest, at the temperature
    ce: Float[Array, ""]  # nats, of the text
    hard: Float[Array, ""]  # nats, of the teacher's first choice
    agree: Float[Array, ""]  # tokens whose best guess is the teacher's
    correct: Float[Array, ""]
    weight: Float[Array, ""]


def distill_reference(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: Teacher,
    *,
    vocab_size: int,
    parts: Weights,
) -> DistillSums:
    """The plain form: all logits at once."""
    z_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    t = parts.temperature
    logp_BTK = teacher.logits.astype(jnp.float32) / t - teacher.lse[..., None]
    logq_BTK = jnp.take_along_axis(jax.nn.log_softmax(z_BTV / t), teacher.ids, axis=-1)
    if parts.renormalised:
        K = teacher.ids.shape[-1] - parts.random
        logp_BTK, logq_BTK = logp_BTK[..., :K], logq_BTK[..., :K]
        logp_BTK, logq_BTK = (a - jax.nn.logsumexp(a, axis=-1, keepdims=True) for a in (logp_BTK, logq_BTK))
    counts_K = jnp.asarray(parts.counts(teacher.ids.shape[-1], vocab_size))[: logp_BTK.shape[-1]]
    kl_BT = jnp.sum(counts_K[None, None] * jnp.exp(logp_BTK) * (logp_BTK - logq_BTK), axis=-1)
    if not parts.renormalised and not parts.random:
        p_rest_BT, q_rest_BT = (1 - jnp.sum(jnp.exp(a), axis=-1) for a in (logp_BTK, logq_BTK))
        kl_BT += _rest(p_rest_BT, q_rest_BT)
    log_probs_BTV = jax.nn.log_softmax(z_BTV)
    at = lambda ids_BT: -jnp.take_along_axis(log_probs_BTV, ids_BT[..., None], axis=-1)[..., 0]
    first_BT, best_BT = teacher.ids[..., 0], jnp.argmax(z_BTV, axis=-1)
    ce_BT, hard_BT = at(targets_BT), at(first_BT)
    measured = (kl_BT, ce_BT, hard_BT, 1.0 * (best_BT == first_BT), 1.0 * (best_BT == targets_BT))
    kl, ce, hard, agree, correct = (jnp.sum(a * weights_BT) for a in measured)
    loss = parts.soft * kl + parts.text * ce + parts.hard * hard
    return DistillSums(loss, kl, ce, hard, agree, correct, jnp.sum(weights_BT))


def _logits(x_BcD: Array, w_VD: Array, real_11V: Array) -> Array:
    """Of a chunk; padding columns take no probability."""
    z_BcV = jnp.einsum("bcd,vd->bcv", x_BcD, w_VD, preferred_element_type=jnp.float32)
    return jnp.where(real_11V, z_BcV, -jnp.inf)


def _own(ids: Array, first: Array | int, count: int) -> tuple[Array, Array]:
    """(their columns on this device, or 0; whether they have one here)."""
    own = ids - first
    here = (own >= 0) & (own < count)
    return jnp.where(here, own, 0), here


def _rest(p_rest: Array, q_rest: Array) -> Array:
    """p log(p / q) of all other tokens together; nothing where the teacher has none of them."""
    p = jnp.maximum(p_rest, _LEAST)
    return jnp.where(p_rest > _LEAST, p * (jnp.log(p) - jnp.log(jnp.maximum(q_rest, _LEAST))), 0.0)


def distill(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: Teacher,
    *,
    vocab_size: int,
    parts: Weights,
    vocab_axes: tuple[str, ...] = (),
) -> DistillSums:
    """As `distill_reference`, in chunks. Inside shard_map, w_VD is this device's rows of the table."""
    return _walk(x_BTD, w_VD, targets_BT, weights_BT, teacher, vocab_size, parts, vocab_axes, with_grads=False)[0]


def distill_and_grads(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: Teacher,
    *,
    vocab_size: int,
    parts: Weights,
    vocab_axes: tuple[str, ...] = (),
) -> tuple[DistillSums, Float[Array, "B T D"], Float[Array, "V D"]]:
    """The sums, d loss / d x and d loss / d w (float32).
    With `vocab_axes`, d x is this device's part of a sum over them."""
    return _walk(x_BTD, w_VD, targets_BT, weights_BT, teacher, vocab_size, parts, vocab_axes, with_grads=True)


def _walk(x, w, targets, weights, teacher, vocab_size, parts, vocab_axes, *, with_grads):  # type: ignore[no-untyped-def]
    B, T, D = x.shape
    V, c, t = w.shape[0], chunk_length(B, T, w.shape[0]), parts.temperature
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    total = lambda a: lax.psum(a, vocab_axes) if vocab_axes else a
    counts_11K = jnp.asarray(parts.counts(teacher.ids.shape[-1], vocab_size))[None, None]

    def chunk(carry, inputs):  # type: ignore[no-untyped-def]
        sums, dw = carry
        x_BcD, y_Bc, m_Bc, known = inputs
        z_BcV = _logits(x_BcD, w, column_11V < vocab_size)
        own_BcK, here_BcK = _own(known.ids, first, V)
        at_ids = jnp.take_along_axis(z_BcV, own_BcK, axis=-1)  # of logits that are here anyway, not of the table
        z_BcK = total(jnp.where(here_BcK, at_ids, 0.0))
        top_Bc = jnp.max(z_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        exp_BcV = jnp.exp((z_BcV - top_Bc[..., None]) / t)
        sum_Bc = total(jnp.sum(exp_BcV, axis=-1))
        logp_BcK = known.logits.astype(jnp.float32) / t - known.lse[..., None]
        logq_BcK = (z_BcK - top_Bc[..., None]) / t - jnp.log(sum_Bc)[..., None]
        if parts.renormalised:
            likeliest_1K = (jnp.arange(logp_BcK.shape[-1]) < logp_BcK.shape[-1] - parts.random)[None, None]
            logp_BcK = jax.nn.log_softmax(logp_BcK, where=likeliest_1K)
            renormalised_BcK = jax.nn.log_softmax(logq_BcK, where=likeliest_1K)
            p_BcK, q_BcK = (jnp.where(likeliest_1K, jnp.exp(a), 0.0) for a in (logp_BcK, renormalised_BcK))
            kl_Bc = jnp.sum(jnp.where(likeliest_1K, p_BcK * (logp_BcK - renormalised_BcK), 0.0), axis=-1)
            all_Bc, some_BcK = jnp.zeros_like(kl_Bc), q_BcK - p_BcK
        elif parts.random:
            p_BcK = counts_11K * jnp.exp(logp_BcK)
            kl_Bc = jnp.sum(p_BcK * (logp_BcK - logq_BcK), axis=-1)
            all_Bc, some_BcK = jnp.sum(p_BcK, axis=-1), -p_BcK
        else:
            p_BcK, q_BcK = jnp.exp(logp_BcK), jnp.exp(logq_BcK)
            p_rest_Bc, q_rest_Bc = 1 - jnp.sum(p_BcK, axis=-1), 1 - jnp.sum(q_BcK, axis=-1)
            kl_Bc = jnp.sum(p_BcK * (logp_BcK - logq_BcK), axis=-1) + _rest(p_rest_Bc, q_rest_Bc)
            # d kl / d z: q - p of the K, and of the others q (1 - p_rest / q_rest), as if they were one token. Where
            # the teacher leaves none for them, their term is not there, and what it adds up to is not quite 1.
            counts_Bc = p_rest_Bc > _LEAST
            ratio_Bc = jnp.where(counts_Bc & (q_rest_Bc > _LEAST), p_rest_Bc / jnp.maximum(q_rest_Bc, _LEAST), 0.0)
            whole_Bc = jnp.sum(p_BcK, axis=-1) + jnp.where(counts_Bc & (q_rest_Bc > _LEAST), p_rest_Bc, 0.0)
            all_Bc, some_BcK = whole_Bc - ratio_Bc, q_BcK * ratio_Bc[..., None] - p_BcK
        # At temperature 1, for the text and the teacher's first choice.
        lse_Bc, exp1_BcV = top_Bc + jnp.log(sum_Bc), exp_BcV
        if t != 1.0:
            exp1_BcV = jnp.exp(z_BcV - top_Bc[..., None])
            lse_Bc = top_Bc + jnp.log(total(jnp.sum(exp1_BcV, axis=-1)))
        is_target_BcV = column_11V == y_Bc[..., None]
        target_Bc = total(jnp.sum(jnp.where(is_target_BcV, z_BcV, 0.0), axis=-1))
        ce_Bc, hard_Bc = lse_Bc - target_Bc, lse_Bc - z_BcK[..., 0]
        measured = (kl_Bc, ce_Bc, hard_Bc, z_BcK[..., 0] >= top_Bc, target_Bc >= top_Bc)
        kl, ce, hard, agree, correct = (jnp.sum(m_Bc * a) for a in measured)
        loss = parts.soft * kl + parts.text * ce + parts.hard * hard
        sums = jax.tree.map(jnp.add, sums, DistillSums(loss, kl, ce, hard, agree, correct, jnp.sum(m_Bc)))
        if not with_grads:
            return (sums, dw), None
        soft_Bc = m_Bc * (parts.soft / t)
        dz_BcV = exp_BcV * (soft_Bc * all_Bc / sum_Bc)[..., None]
        if parts.text or parts.hard:
            exact_Bc = (parts.text + parts.hard) * m_Bc * jnp.exp(top_Bc - lse_Bc)
            dz_BcV += exp1_BcV * exact_Bc[..., None] - jnp.where(is_target_BcV, parts.text * m_Bc[..., None], 0.0)
        some_BcK = some_BcK * soft_Bc[..., None]
        some_BcK = some_BcK.at[..., 0].add(-parts.hard * m_Bc)
        b_B11, c_1c1 = jnp.arange(B)[:, None, None], jnp.arange(c)[None, :, None]
        dz_BcV = dz_BcV.at[b_B11, c_1c1, own_BcK].add(jnp.where(here_BcK, some_BcK, 0.0))
        dz_BcV = dz_BcV.astype(x.dtype)
        dx_BcD = jnp.einsum("bcv,vd->bcd", dz_BcV, w)
        dw = dw + jnp.einsum("bcv,bcd->vd", dz_BcV, x_BcD, preferred_element_type=jnp.float32)
        return (sums, dw), dx_BcD

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, *a.shape[2:]), 1, 0)
    zero = DistillSums(*(jnp.zeros((), jnp.float32) for _ in DistillSums._fields))
    start = (zero, jnp.zeros((V, D), jnp.float32) if with_grads else jnp.zeros(()))
    (sums, dw), dx = lax.scan(chunk, start, jax.tree.map(split, (x, targets, weights, teacher)))
    if not with_grads:
        return sums, None, None
    return sums, jnp.moveaxis(dx, 0, 1).reshape(B, T, D), dw


def layer_difference(student_LBTD: Float[Array, "L B T D"], teacher_LBTD: Float[Array, "L B T D"]) -> Float[Array, "B T"]:
    """How far the layers of a student are from a teacher's of the same shape, on average over them: mostly of what is
    normalised, as the next layer reads it, and a little of the streams themselves, by the teacher's size."""
    s, t = student_LBTD.astype(jnp.float32), jax.lax.stop_gradient(teacher_LBTD.astype(jnp.float32))
    power = lambda x: jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6
    alike = power(s * jax.lax.rsqrt(power(s)) - t * jax.lax.rsqrt(power(t)))
    return jnp.mean(_NORMALISED * alike + (1 - _NORMALISED) * power(s - t) / power(t), axis=(0, -1))


def _draws(rows_BT: Int[Array, "B T"], count: int, below: int) -> Int[Array, "B T R"]:
    """Numbers for each place: the same for the same row of text, wherever it stands and whatever the mesh is."""
    T = rows_BT.shape[1]
    # Of its tokens and their places, a seed.
    places_T = jnp.arange(1, T + 1, dtype=jnp.uint32) * jnp.uint32(2654435761)
    seeds_B = jnp.sum(rows_BT.astype(jnp.uint32) * places_T[None], axis=1, dtype=jnp.uint32)
    return jax.vmap(lambda seed: jax.random.randint(jax.random.key(seed), (T, count), 0, below))(seeds_B)


def besides(ids_BTK: Int[Array, "B T K"], numbers_BTR: Int[Array, "B T R"]) -> Int[Array, "B T R"]:
    """The tokens of these numbers among those that are none of the K."""
    K = ids_BTK.shape[-1]
    # The n-th of those that are left: n, and one more for each of the K that stand before it.
    before_BTK = jnp.sort(ids_BTK, axis=-1) - jnp.arange(K)[None, None]
    find = lambda before_K, numbers_R: numbers_R + jnp.searchsorted(before_K, numbers_R, side="right")
    return jax.vmap(jax.vmap(find))(before_BTK, numbers_BTR).astype(ids_BTK.dtype)


def likeliest(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    rows_BT: Int[Array, "B T"],
    *,
    vocab_size: int,
    k: int,
    tokens: int | None = None,
    random: int = 0,
    temperature: float = 1.0,
    vocab_axes: tuple[str, ...] = (),
) -> Teacher:
    """Return what is to be known of a teacher, in chunks: its k likeliest tokens, `random` others, their logits, and
    the log-sum-exp over all `vocab_size` columns of its table.

    `tokens`: only the first so many may be among the k (None: all). A table may have more columns than its tokenizer
    has tokens; they take part in the log-sum-exp, as in the student's. `rows_BT` is what the teacher has read.
    """
    B, T, _ = x_BTD.shape
    V, c = w_VD.shape[0], chunk_length(B, T, w_VD.shape[0])
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    column_11V = (first + jnp.arange(V))[None, None]
    numbers_BTR = _draws(rows_BT, random, vocab_size - k) if random else jnp.zeros((B, T, 0), jnp.int32)

    def chunk(_: None, inputs: tuple[Array, Array]) -> tuple[None, Teacher]:
        x_BcD, numbers_BcR = inputs
        z_BcV = _logits(x_BcD, w_VD, column_11V < vocab_size)
        top_Bc = jnp.max(z_BcV, axis=-1)
        top_Bc = lax.pmax(top_Bc, vocab_axes) if vocab_axes else top_Bc
        sum_Bc = jnp.sum(jnp.exp((z_BcV - top_Bc[..., None]) / temperature), axis=-1)
        chosen_BcV = z_BcV if tokens is None else jnp.where(column_11V < tokens, z_BcV, -jnp.inf)
        logits, ids = lax.top_k(chosen_BcV, min(k, V))
        ids += first
        if vocab_axes:  # the likeliest of all are among the likeliest of each device
            sum_Bc = lax.psum(sum_Bc, vocab_axes)
            logits, ids = (lax.all_gather(a, vocab_axes, axis=2, tiled=True) for a in (logits, ids))
            logits, places = lax.top_k(logits, k)
            ids = jnp.take_along_axis(ids, places, axis=-1)
        if random:
            others_BcR = besides(ids, numbers_BcR)
            own_BcR, here_BcR = _own(others_BcR, first, V)
            found = jnp.where(here_BcR, jnp.take_along_axis(z_BcV, own_BcR, axis=-1), 0.0)
            found = lax.psum(found, vocab_axes) if vocab_axes else found
            ids, logits = jnp.concatenate([ids, others_BcR], axis=-1), jnp.concatenate([logits, found], axis=-1)
        return None, Teacher(ids, logits, top_Bc / temperature + jnp.log(sum_Bc))

    split = lambda a: jnp.moveaxis(a.reshape(B, T // c, c, a.shape[-1]), 1, 0)
    _, found = lax.scan(chunk, None, (split(x_BTD), split(numbers_BTR)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(B, T, *a.shape[3:]), found)
