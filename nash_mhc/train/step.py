"""The train step: a pure function (state, batch, hyperparameters) -> (state, metrics), and its compiled form."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.model.lora import has_dropout, with_dropout
from nash_mhc.model.protocol import Execution, after_update
from nash_mhc.objectives.base import Aux, Batch, Objective, means
from nash_mhc.objectives.registry import named_objective
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import updated_average
from nash_mhc.optim.rounding import Salt, map_with_index, round_to, salt_of, to_float32
from nash_mhc.optim.schedule import Hyperparameters, learning_rate
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train import spikes
from nash_mhc.train.state import CACHED, ProgramKey, TrainState, state_shardings

Metrics = dict[str, Float[Array, "..."]]
_ATTENTION_BLOCK = 128  # the padded length of attention is a multiple of this


def make_train_step(
    objective: Objective, training: Training = Training()
) -> Callable[[TrainState, Batch, Hyperparameters], tuple[TrainState, Metrics]]:
    """Return the train step for an objective; `training` says what is trained and with which optimizer.

    Hyperparameters are an argument of the step; `compile_train_step` binds those of a run.
    """

    def train_step(state: TrainState, batch: Batch, h: Hyperparameters) -> tuple[TrainState, Metrics]:
        # Gradients, summed over the tokens of all microbatches and divided once: every token has the same weight.
        trained, frozen = training.split(state.model)
        dropout_key = jax.random.fold_in(jax.random.key(h.seed), state.step) if has_dropout(state.model) else None
        # Salts of the stochastic rounding of gradient sums and of the update.
        sum_salt, update_salt = (salt_of(h.seed, state.step, purpose) for purpose in range(2))
        batch = batch._replace(carry=state.carry)  # None for most objectives
        summed, (sums, health, carry) = summed_gradients(objective, trained, frozen, batch, dropout_key, sum_salt)
        tokens = sums["loss"].weight
        scale = 1.0 / jnp.maximum(tokens, 1.0)
        gradients = Gradients(summed, scale, scale * optax.tree.norm(jax.tree.map(to_float32, summed)))
        health = {name: total / batch.inputs.shape[0] for name, total in health.items()}
        metrics = means(sums) | {f"health/{name}": mean for name, mean in health.items()}
        metrics |= {"lr": learning_rate(h, state.step), "grad_norm": gradients.norm}

        # A step with a non-finite loss or gradient changes nothing. With --on-spike skip, neither does a spike.
        is_empty = tokens == 0
        measured_M = jnp.stack([metrics[name] for name in spikes.MEASURES])
        scores_M = spikes.scores(state.recent, measured_M)
        is_spike = (jnp.max(scores_M) > h.spike_score) & ~is_empty  # spike_score is infinite to ignore spikes
        # `remember` ignores NaN.
        recent = spikes.remember(state.recent, jnp.where(is_empty, jnp.nan, measured_M), is_spike)
        is_good = jnp.isfinite(measured_M).all() & ~(is_spike & (h.skip_spikes > 0))
        metrics |= {f"spike_score/{name}": score for name, score in zip(spikes.MEASURES, scores_M, strict=True)}
        metrics |= {"skipped": 1.0 * ~(is_good | is_empty), "empty": 1.0 * is_empty}
        metrics |= {"spike": 1.0 * is_spike, "spikes": recent.spikes}
        # An empty batch has no gradient and is not counted as skipped; its carry is still valid and passes on.
        applies = is_good & ~is_empty

        with jax.named_scope("optimizer"):
            trained, opt_state, update_norm = training.update(h, trained, gradients, state.opt_state, applies, update_salt)
            ema = state.ema
            if ema is not None:
                average = updated_average(h, ema, trained, state.step)
                ema = jax.tree.map(lambda new, old: jnp.where(applies, new, old), average, ema)
        metrics |= {"update_norm": update_norm, "param_norm": optax.tree.norm(jax.tree.map(to_float32, trained))}
        step = state.step + applies.astype(state.step.dtype)
        model = after_update(eqx.combine(trained, frozen), step, applies, health)
        # A bad step passes nothing on: a non-finite carry would return in every later step.
        carry = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), carry, state.carry)
        return TrainState(step, model, opt_state, ema, recent, carry), metrics

    return train_step


def summed_gradients(
    objective: Objective, trained: Any, frozen: Any, batch: Batch, dropout_key: Array | None, salt: Salt
) -> tuple[Any, Aux]:
    """Return gradients and reports summed over the A microbatches of a batch [A, B, T], in the memory of one.

    Dropout is seeded per microbatch. Gradients have the dtype of their weights. The carries of the microbatches are
    stacked, not summed.
    """

    def loss_of(trained: Any, microbatch: Batch, index: Array) -> tuple[Array, tuple[Aux, Any]]:
        model = eqx.combine(trained, frozen)
        if dropout_key is not None:
            model = with_dropout(model, jax.random.fold_in(dropout_key, index))
        loss, aux = objective(model, microbatch)
        return loss, (aux._replace(carry=None), aux.carry)

    grad = jax.grad(loss_of, has_aux=True)
    count, indices = batch.inputs.shape[0], jnp.arange(batch.inputs.shape[0])
    first = jax.tree.map(lambda a: a[0], batch)
    if count == 1:
        gradients, (reports, carry) = grad(trained, first, indices[0])
        return gradients, reports._replace(carry=jax.tree.map(lambda a: a[None], carry))

    def add(total: tuple[Any, Aux], microbatch: tuple[Batch, Array]) -> tuple[tuple[Any, Aux], Any]:
        gradients, (reports, carry) = grad(trained, *microbatch)
        add_leaf = lambda i, a, b: round_to(to_float32(a) + to_float32(b), a.dtype, lambda: salt_of(salt, microbatch[1], i))
        return (map_with_index(add_leaf, total[0], gradients), jax.tree.map(jnp.add, total[1], reports)), carry

    shapes = jax.eval_shape(lambda: loss_of(trained, first, indices[0])[1][0])
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    (gradients, reports), carries = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, trained), zero), (batch, indices))
    return gradients, reports._replace(carry=carries)


# --- the compiled step -----------------------------------------------------------------------------------------------


def compile_train_step(
    cfg: RunConfig,
    mesh: Mesh,
    source: RowSource | None = None,
    *,
    most_documents: int | None = None,
) -> CompiledStep:
    """Return the train step that runs, benchmarks and tests use: jitted, with a donated state of fixed sharding.

    Later runs of this process with the same `ProgramKey` share its programs. `most_documents` is for batches that no
    `source` yields.
    """
    most_documents = source.most_documents if source is not None else most_documents
    shared = _train_step(ProgramKey.of(cfg), mesh, most_documents, padded_attention_length(cfg.model.alignment, source))
    # Passed as arguments at each call, not compiled in.
    return shared.with_constants([Hyperparameters.of(cfg.optim, cfg.train)])


@functools.lru_cache(CACHED)
def _train_step(key: ProgramKey, mesh: Mesh, most_documents: int | None, length: int | None) -> CompiledStep:
    cfg = key.cfg  # only settings that `ProgramKey.of` lists: all others are defaults here
    out = (state_shardings(key, mesh), named_sharding(mesh))  # metrics are replicated: every process reads them
    objective = objective_for(key, most_documents, length, unroll=cfg.train.unroll == "yes")
    step = make_train_step(objective, Training.of(cfg))
    return CompiledStep(step, mesh, donate=True, out_shardings=out, deterministic=cfg.train.deterministic)


def make_objective(cfg: RunConfig, source: RowSource | None = None, *, most_documents: int | None = None) -> Objective:
    """Return the objective of a run for sequences of `source`, with at most `most_documents` documents in each."""
    return objective_for(ProgramKey.of(cfg), most_documents, padded_attention_length(cfg.model.alignment, source))


def objective_for(
    key: ProgramKey, most_documents: int | None, length: int | None, *, unroll: bool = False, evaluates: bool = False
) -> Objective:
    """Return the objective, with its model executed as the settings say; `length` is the padded attention length."""
    train = key.cfg.train  # only settings that `ProgramKey.of` lists
    execution = Execution(
        train.dtype, train.kept, train.attention, most_documents, length,
        unroll=unroll, evaluates=evaluates, float8=train.matmul_dtype == "float8",
    )  # fmt: skip
    return named_objective(key.cfg.objective.name).make(key.cfg, execution)


def padded_attention_length(stride: int, source: RowSource | None) -> int | None:
    """Return the length that attention pads sequences to, so that every document begins at a multiple of `stride`.

    `stride` is the coarsest one of the model. None: the documents of `source` begin at such multiples already.
    """
    if source is None or source.padded_length is None:
        return None
    # Whole strides, and whole blocks of attention if one divides the other; else their lcm would pad too much.
    divides = _ATTENTION_BLOCK % stride == 0 or stride % _ATTENTION_BLOCK == 0
    unit = math.lcm(_ATTENTION_BLOCK, stride) if divides else stride
    return -(-source.padded_length // unit) * unit
