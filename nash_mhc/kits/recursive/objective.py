"""Puzzles: every cell has its answer, and a recursive model makes one pass after another over the same grid.

After each pass there are an answer and a loss, and what the model had in mind is carried to the next one, which is
part of the next step. A puzzle stays until the model holds it for solved, or has had all the passes that there are;
then its place takes the next row. What is carried is part of the run's state: it is saved and restored with it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.kits.recursive.model import Recursive, States
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.parts import logits_of
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum
from nash_mhc.objectives.registry import ObjectiveKind

EXAMPLES = "puzzles"  # the kind of rows that the objective takes
_STOPPING = 0.5  # weight of the loss of "is it solved?"


class Carry(NamedTuple):
    """Of the puzzles that are being solved, one a row of the batch."""

    upper: Float[Array, "*A B T D"]
    lower: Float[Array, "*A B T D"]
    inputs: Int[Array, "*A B T"]
    targets: Int[Array, "*A B T"]
    weights: Float[Array, "*A B T"]
    passes: Int[Array, "*A B"]  # made so far
    at_least: Int[Array, "*A B"]  # to be made whatever the model says
    done: Bool[Array, "*A B"]  # the next row takes its place
    place: Int[Array, "*A B"]  # of this row in a step, and ...
    taken: Int[Array, "*A B"]  # ... puzzles that were here: what is drawn at random follows from both


def fresh_carry(cfg: RunConfig) -> Carry:
    """Before the first step, every place waits for a puzzle."""
    if not isinstance(cfg.model, RecursiveConfig) or cfg.model.causal:
        raise ConfigError(
            "--objective puzzle needs a model that sees the whole grid: --model-kind recursive --no-model-causal, or its "
            "--model-size sudoku4"
        )
    A, B, T, D = cfg.train.grad_accum, cfg.data.batch_size, cfg.data.seq_len, cfg.model.width
    whole = lambda *shape, dtype=jnp.int32: jnp.zeros((A, B, *shape), dtype)
    state = lambda: whole(T, D, dtype=jnp.float32)
    return Carry(
        state(), state(), whole(T), whole(T), whole(T, dtype=jnp.float32), whole(), whole(),
        jnp.ones((A, B), bool), jnp.arange(A * B, dtype=jnp.int32).reshape(A, B), whole(),
    )  # fmt: skip


def log_stablemax(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Return log of s(x) / sum s(x), with s(x) = x + 1 from 0 on and 1 / (1 - x) below, in float32.

    Stablemax grows linearly, not exponentially, so that a logit need not run away for a confident answer.
    Computed as log s = +-log1p(+-x): s itself would lose precision far below 0.
    """
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Both sides of `where` are finite everywhere, and so are their gradients.
    log_s = jnp.where(x >= 0, jnp.log1p(jnp.maximum(x, 0.0)), -jnp.log1p(jnp.maximum(-x, 0.0)))
    return log_s - jnp.log(jnp.sum(jnp.exp(log_s), axis=-1, keepdims=True))


class Answer(NamedTuple):
    """Of one pass: the loss of each cell, what was right, and whether the model holds the whole for solved."""

    ce_BT: Float[Array, "B T"]
    right_BT: Bool[Array, "B T"]
    solved_B: Float[Array, "B"]

    def exact(self, weights_BT: Array) -> Bool[Array, "B"]:
        """Whether every cell that counts is right."""
        return jnp.all(self.right_BT | (weights_BT == 0), axis=1)


def answer(model: Recursive, upper_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"]) -> Answer:
    # A few symbols: no need for the large vocabulary's pieces.
    logits_BTV = logits_of(model.norm(upper_BTD), model.unembed_VD, model.cfg.vocab_size)
    log_p_BTV = log_stablemax(logits_BTV)
    ce_BT = -jnp.take_along_axis(log_p_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return Answer(ce_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT, model.solved(upper_BTD))


def _begun(carry: Carry, batch: Batch, cfg: RecursiveConfig) -> Carry:
    """With the next rows where puzzles are done."""
    if carry is None:
        raise ConfigError("--objective puzzle carries what it thinks from step to step, and there is nothing carried here")
    keys = jax.vmap(lambda place, taken: jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.state_seed), place), taken))
    first, second = jax.vmap(lambda key: tuple(jax.random.split(key)), out_axes=0)(keys(carry.place, carry.taken))
    stays_B = jax.vmap(jax.random.uniform)(first) < cfg.explore
    passes_B = jax.vmap(lambda key: jax.random.randint(key, (), 2, max(3, cfg.most_passes + 1)))(second)
    at_least_B = jnp.where(stays_B, passes_B, 1)
    new = lambda fresh, old: jnp.where(carry.done.reshape(-1, *(1,) * (old.ndim - 1)), fresh, old)
    return carry._replace(
        inputs=new(batch.inputs, carry.inputs), targets=new(batch.targets, carry.targets),
        weights=new(batch.weights, carry.weights), passes=new(0, carry.passes), at_least=new(at_least_B, carry.at_least),
        taken=carry.taken + carry.done,
    )  # fmt: skip


def puzzle(model: Recursive, batch: Batch, *, execution: Execution) -> tuple[Float[Array, ""], Aux]:
    """One pass over the puzzles that are being solved, with its loss."""
    if execution.evaluates:
        return _evaluated(model, batch, execution)
    now = _begun(batch.carry, batch, model.cfg)
    x_BTD = model.entered(now.inputs, jnp.dtype(execution.dtype))
    begins = now.done[:, None, None]
    states = States(
        *(jnp.where(begins, fresh, old.astype(x_BTD.dtype)) for fresh, old in zip(model.fresh(x_BTD), now[:2], strict=True))
    )
    states, moved = model.think(x_BTD, states, model.layout(now.inputs, None, execution), execution)
    found = answer(model, states.upper_BTD, now.targets)
    exact_B = lax.stop_gradient(found.exact(now.weights))
    cells_B = now.weights.sum(axis=1)
    ce = jnp.sum(now.weights * found.ce_BT)
    # Of the whole puzzle, as much as of all its cells together.
    stopping = jnp.sum(cells_B * _binary(found.solved_B, exact_B))
    loss = ce + _STOPPING * stopping
    passes_B = now.passes + 1
    done_B = (passes_B >= model.cfg.most_passes) | ((found.solved_B > 0) & (passes_B >= now.at_least))
    kept = lambda state: lax.stop_gradient(state).astype(jnp.float32)
    carry = now._replace(
        upper=kept(states.upper_BTD), lower=kept(states.lower_BTD), passes=passes_B, done=lax.stop_gradient(done_B)
    )
    weight, rows = cells_B.sum(), jnp.sum(cells_B > 0).astype(jnp.float32)
    per_cell = {"loss": loss, "loss/ce": ce, "loss/stopping": _STOPPING * stopping}
    per_cell["accuracy"] = jnp.sum(now.weights * found.right_BT)
    sums = {name: Sum(total, weight) for name, total in per_cell.items()}
    sums["exact"] = Sum(jnp.sum(exact_B & (cells_B > 0)).astype(jnp.float32), rows)
    sums["passes"] = Sum(jnp.sum(passes_B * done_B).astype(jnp.float32), jnp.sum(done_B).astype(jnp.float32))
    return loss, Aux(sums, model.health(moved), carry)


def _binary(logit: Array, truth: Array) -> Array:
    """Cross-entropy of yes and no."""
    return jax.nn.softplus(jnp.where(truth, -logit, logit))


def _evaluated(model: Recursive, batch: Batch, execution: Execution) -> tuple[Float[Array, ""], Aux]:
    """All passes, from the beginning: what is right after each, and where the model would have stopped."""
    x_BTD = model.entered(batch.inputs, jnp.dtype(execution.dtype))
    layout = model.layout(batch.inputs, None, execution)

    def one(states: States, _: None) -> tuple[States, Any]:
        states, moved = model.think(x_BTD, states, layout, execution)
        found = answer(model, states.upper_BTD, batch.targets)
        return states, (found.exact(batch.weights), found.solved_B, moved)

    states, (exact_PB, solved_PB, moved_P) = lax.scan(one, model.fresh(x_BTD), length=model.cfg.most_passes)
    last = answer(model, states.upper_BTD, batch.targets)
    P, counts_B = model.cfg.most_passes, batch.weights.sum(axis=1) > 0
    stops_B = jnp.where((solved_PB > 0).any(axis=0), jnp.argmax(solved_PB > 0, axis=0), P - 1)
    at_stop_B = jnp.take_along_axis(exact_PB, stops_B[None], axis=0)[0]
    weight, rows = batch.weights.sum(), counts_B.sum().astype(jnp.float32)
    ce = jnp.sum(batch.weights * last.ce_BT)
    per_cell = {"loss": ce, "loss/ce": ce, "accuracy": jnp.sum(batch.weights * last.right_BT)}
    sums = {name: Sum(total, weight) for name, total in per_cell.items()}
    of_rows = lambda total_B: Sum(jnp.sum(total_B * counts_B).astype(jnp.float32), rows)
    sums |= {"exact": of_rows(exact_PB[-1]), "exact_stopping": of_rows(at_stop_B), "passes": of_rows(stops_B + 1)}
    depths = sorted({min(2**n, P) for n in range(P.bit_length() + 1)})
    sums |= {f"exact_after/{depth}": of_rows(exact_PB[depth - 1]) for depth in depths}
    return ce, Aux(sums, model.health(moved_P[-1]))


def make_puzzle(cfg: RunConfig, execution: Execution) -> Objective:
    return functools.partial(puzzle, execution=execution)


PUZZLE = ObjectiveKind(make_puzzle, fresh_carry, EXAMPLES)
