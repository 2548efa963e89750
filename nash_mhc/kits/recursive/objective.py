"""The puzzle objective, `generate --puzzle`, and the optimizer Adam-atan2.

In training, a recursive model makes one pass per step over the same grids, and carries its states along. A puzzle stays
in its slot of the batch until the model considers it solved or has made all passes. Then the next row takes the slot.
The carry is part of the training state, so it is saved and restored.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.kits.recursive.model import Recursive, States
from nash_mhc.kits.recursive.puzzles import sudoku
from nash_mhc.kits.recursive.puzzles.csv_file import kind_of_text
from nash_mhc.kits.recursive.puzzles.rows import CellTokenizer, find_kind, is_puzzle
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.loading.load import Loaded
from nash_mhc.model.parts import logits_of
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Aux, Batch, Sum
from nash_mhc.objectives.registry import ObjectiveKind
from nash_mhc.optim.schedule import Hyperparameters, rates

_SOLVED_WEIGHT = 0.5  # of the loss that predicts whether a puzzle is solved
_BAD_SUDOKU = {0: "it has no solution", 2: "it has more than one solution, and models are trained on puzzles with one"}


class Carry(NamedTuple):
    """The puzzles in progress, one per row of the batch."""

    upper: Float[Array, "*A B T D"]
    lower: Float[Array, "*A B T D"]
    inputs: Int[Array, "*A B T"]
    targets: Int[Array, "*A B T"]
    weights: Float[Array, "*A B T"]
    passes: Int[Array, "*A B"]  # made so far
    at_least: Int[Array, "*A B"]  # minimum number of passes
    done: Bool[Array, "*A B"]  # the next row takes the slot
    place: Int[Array, "*A B"]  # slot number, and ...
    taken: Int[Array, "*A B"]  # ... puzzles so far in this slot: together they seed the random numbers


def fresh_carry(cfg: RunConfig) -> Carry:
    """Return the carry before the first step: every slot is free."""
    if not isinstance(cfg.model, RecursiveConfig) or cfg.model.causal:
        raise ConfigError(
            "--objective puzzle needs a model that sees the whole grid: --model-kind recursive with --no-model-causal, or "
            "with the preset --model-size sudoku4"
        )
    A, B, T, D = cfg.train.grad_accum, cfg.data.batch_size, cfg.data.seq_len, cfg.model.width
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((A, B, *shape), dtype)
    return Carry(
        upper=zeros(T, D, dtype=jnp.float32),
        lower=zeros(T, D, dtype=jnp.float32),
        inputs=zeros(T),
        targets=zeros(T),
        weights=zeros(T, dtype=jnp.float32),
        passes=zeros(),
        at_least=zeros(),
        done=jnp.ones((A, B), bool),
        place=jnp.arange(A * B, dtype=jnp.int32).reshape(A, B),
        taken=zeros(),
    )


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
    """The loss and correctness of each cell after a pass, and the model's own verdict."""

    ce_BT: Float[Array, "B T"]
    right_BT: Bool[Array, "B T"]
    solved_B: Float[Array, "B"]  # logit

    def exact(self, weights_BT: Array) -> Bool[Array, "B"]:
        """Return whether every cell with a weight is right."""
        return jnp.all(self.right_BT | (weights_BT == 0), axis=1)


def _answer(model: Recursive, upper_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"]) -> Answer:
    logits_BTV = logits_of(model.norm(upper_BTD), model.unembed_VD, model.cfg.vocab_size)
    log_p_BTV = log_stablemax(logits_BTV)
    ce_BT = -jnp.take_along_axis(log_p_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return Answer(ce_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT, model.solved_logit(upper_BTD))


def _fill_slots(carry: Carry, batch: Batch, cfg: RecursiveConfig) -> Carry:
    """Put the next rows into the slots whose puzzles are done."""
    if carry is None:
        raise ConfigError("--objective puzzle works only with train, whose state holds the puzzles in progress")
    keys = jax.vmap(lambda place, taken: jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.state_seed), place), taken))
    first, second = jax.vmap(lambda key: tuple(jax.random.split(key)), out_axes=0)(keys(carry.place, carry.taken))
    explores_B = jax.vmap(jax.random.uniform)(first) < cfg.explore
    passes_B = jax.vmap(lambda key: jax.random.randint(key, (), 2, max(3, cfg.most_passes + 1)))(second)
    at_least_B = jnp.where(explores_B, passes_B, 1)
    replace = lambda new, old: jnp.where(carry.done.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    return carry._replace(
        inputs=replace(batch.inputs, carry.inputs),
        targets=replace(batch.targets, carry.targets),
        weights=replace(batch.weights, carry.weights),
        passes=replace(0, carry.passes),
        at_least=replace(at_least_B, carry.at_least),
        taken=carry.taken + carry.done,
    )


def puzzle(model: Recursive, batch: Batch, *, execution: Execution) -> tuple[Float[Array, ""], Aux]:
    """Return the loss of one pass over the puzzles in progress, and the new carry."""
    if execution.evaluates:
        return _evaluate(model, batch, execution)
    old = _fill_slots(batch.carry, batch, model.cfg)
    x_BTD = model.embed_tokens(old.inputs, jnp.dtype(execution.dtype))
    is_new = old.done[:, None, None]
    initial = model.initial_states(x_BTD)
    states = States(
        *(jnp.where(is_new, new, state.astype(x_BTD.dtype)) for new, state in zip(initial, old[:2], strict=True))
    )  # fmt: skip
    states, moved = model.run_pass(x_BTD, states, model.layout(old.inputs, None, execution), execution)
    answer = _answer(model, states.upper_BTD, old.targets)
    exact_B = lax.stop_gradient(answer.exact(old.weights))
    cells_B = old.weights.sum(axis=1)
    ce = jnp.sum(old.weights * answer.ce_BT)
    # The binary cross-entropy is weighted by cells, so that the verdict on a puzzle counts as much as all of its cells.
    stopping = jnp.sum(cells_B * jax.nn.softplus(jnp.where(exact_B, -answer.solved_B, answer.solved_B)))
    loss = ce + _SOLVED_WEIGHT * stopping
    passes_B = old.passes + 1
    done_B = (passes_B >= model.cfg.most_passes) | ((answer.solved_B > 0) & (passes_B >= old.at_least))
    detached = lambda state: lax.stop_gradient(state).astype(jnp.float32)
    carry = old._replace(
        upper=detached(states.upper_BTD), lower=detached(states.lower_BTD), passes=passes_B, done=lax.stop_gradient(done_B)
    )
    weight, rows = cells_B.sum(), jnp.sum(cells_B > 0).astype(jnp.float32)
    per_cell = {"loss": loss, "loss/ce": ce, "loss/stopping": _SOLVED_WEIGHT * stopping}
    per_cell["accuracy"] = jnp.sum(old.weights * answer.right_BT)
    sums = {name: Sum(total, weight) for name, total in per_cell.items()}
    sums["exact"] = Sum(jnp.sum(exact_B & (cells_B > 0)).astype(jnp.float32), rows)
    sums["passes"] = Sum(jnp.sum(passes_B * done_B).astype(jnp.float32), jnp.sum(done_B).astype(jnp.float32))
    return loss, Aux(sums, model.health(moved), carry)


def _evaluate(model: Recursive, batch: Batch, execution: Execution) -> tuple[Float[Array, ""], Aux]:
    """Make all passes from the initial states. Measure each, and where the model would have stopped."""
    x_BTD = model.embed_tokens(batch.inputs, jnp.dtype(execution.dtype))
    layout = model.layout(batch.inputs, None, execution)

    def one_pass(states: States, _: None) -> tuple[States, Any]:
        states, moved = model.run_pass(x_BTD, states, layout, execution)
        answer = _answer(model, states.upper_BTD, batch.targets)
        return states, (answer.exact(batch.weights), answer.solved_B, moved)

    P = model.cfg.most_passes
    states, (exact_PB, solved_PB, moved_P) = lax.scan(one_pass, model.initial_states(x_BTD), length=P)
    last = _answer(model, states.upper_BTD, batch.targets)
    counts_B = batch.weights.sum(axis=1) > 0
    stops_B = jnp.where((solved_PB > 0).any(axis=0), jnp.argmax(solved_PB > 0, axis=0), P - 1)
    at_stop_B = jnp.take_along_axis(exact_PB, stops_B[None], axis=0)[0]
    weight, rows = batch.weights.sum(), counts_B.sum().astype(jnp.float32)
    ce = jnp.sum(batch.weights * last.ce_BT)
    per_cell = {"loss": ce, "loss/ce": ce, "accuracy": jnp.sum(batch.weights * last.right_BT)}
    sums = {name: Sum(total, weight) for name, total in per_cell.items()}
    per_row = lambda total_B: Sum(jnp.sum(total_B * counts_B).astype(jnp.float32), rows)
    sums |= {"exact": per_row(exact_PB[-1]), "exact_stopping": per_row(at_stop_B), "passes": per_row(stops_B + 1)}
    depths = sorted({min(2**n, P) for n in range(P.bit_length() + 1)})
    sums |= {f"exact_after/{depth}": per_row(exact_PB[depth - 1]) for depth in depths}
    return ce, Aux(sums, model.health(moved_P[-1]))


PUZZLE = ObjectiveKind(lambda cfg, execution: functools.partial(puzzle, execution=execution), fresh_carry, "puzzles")


def solve(loaded: Loaded, text: str) -> str:
    """Solve the puzzle in `text`, one character per cell, and return the grid in lines and the verdict."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, Recursive) or model.cfg.causal or not isinstance(tokenizer, CellTokenizer):
        raise ConfigError("--puzzle: this model generates text; use a run with --objective puzzle")
    cells_N, size = tokenizer.encode("".join(text.splitlines())), loaded.config.data.seq_len
    if len(cells_N) != size:
        raise ConfigError(f"--puzzle: has {len(cells_N)} cells, but this model solves grids of {size}")
    dataset = loaded.config.data.dataset
    kind = find_kind(dataset) if is_puzzle(dataset) else kind_of_text(tokenizer.decode(cells_N))
    if kind.symmetry == "sudoku" and (count := int(sudoku.solve(cells_N[None]).solutions[0])) != 1:
        raise ConfigError(f"--puzzle: {_BAD_SUDOKU[count]}; change its cells")
    execution = Execution(loaded.dtype, "none", evaluates=True)

    @jax.jit
    def run(model: Recursive, cells_BN: Array) -> Array:
        x_BND, layout = model.embed_tokens(cells_BN, jnp.dtype(loaded.dtype)), model.layout(cells_BN, None, execution)
        one_pass = lambda states, _: (model.run_pass(x_BND, states, layout, execution)[0], None)
        states, _ = lax.scan(one_pass, model.initial_states(x_BND), length=model.cfg.most_passes)
        logits_BNV = logits_of(model.norm(states.upper_BTD), model.unembed_VD, model.cfg.vocab_size)
        return jnp.argmax(logits_BNV[..., : len(tokenizer.symbols)], axis=-1)

    answer_N = np.asarray(run(model, jnp.asarray(cells_N[None]))[0])
    error = kind.mistake(cells_N, answer_N)
    verdict = f"not valid: {error}" if error else "valid"
    return f"{tokenizer.grid_text(answer_N, kind.width)}\n{verdict}"


def adam_atan2(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Make Adam with arctan2 for its quotient: bounded, without epsilon, invariant to the gradients' scale.

    The factor 4 / pi gives a parameter with a constant gradient the step size of Adam (arXiv 2407.05872).
    """
    zeros = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def init(params: PyTree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(params), zeros(params))

    def update(gradients: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        assert isinstance(state, optax.ScaleByAdamState)
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(gradients, state.mu, h.b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(gradients, state.nu, h.b2, 2)
        means, squares = optax.tree.bias_correction(mu, h.b1, count), optax.tree.bias_correction(nu, h.b2, count)
        angle = lambda m, v, factor: factor * (4 / math.pi) * jnp.arctan2(m, jnp.sqrt(v))
        return jax.tree.map(angle, means, squares, rates(model)), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)
