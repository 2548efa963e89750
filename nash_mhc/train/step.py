"""The train step: pure (state, batch, hyperparameters) -> (state, metrics)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from nash_mhc.model.lora import drops, with_dropout
from nash_mhc.model.protocol import after_update
from nash_mhc.objectives.base import Aux, Batch, Objective, means
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import averaged
from nash_mhc.optim.rounding import Salt, map_numbered, salt_of, stored, wide
from nash_mhc.optim.schedule import Hyperparameters, learning_rate
from nash_mhc.optim.trainable import Training
from nash_mhc.train import spikes
from nash_mhc.train.state import TrainState

Metrics = dict[str, Float[Array, "..."]]


def summed_gradients(
    objective: Objective, trained: Any, frozen: Any, batch: Batch, key: Array | None, salt: Salt
) -> tuple[Any, Aux]:
    """Return gradients and reports summed over the A microbatches of a batch [A, B, T], in the memory of one.

    Dropout is seeded per microbatch, from `key`. Gradients have the dtype of their weights. The carry of each
    microbatch is stacked, not summed.
    """

    def of_trained(trained: Any, part: Batch, number: Array) -> tuple[Array, tuple[Aux, Any]]:
        model = eqx.combine(trained, frozen)
        loss, aux = objective(model if key is None else with_dropout(model, jax.random.fold_in(key, number)), part)
        return loss, (aux._replace(carry=None), aux.carry)

    grad = jax.grad(of_trained, has_aux=True)
    parts, numbers = batch.inputs.shape[0], jnp.arange(batch.inputs.shape[0])
    first = jax.tree.map(lambda a: a[0], batch)
    if parts == 1:
        gradients, (reports, carried) = grad(trained, first, numbers[0])
        return gradients, reports._replace(carry=jax.tree.map(lambda a: a[None], carried))

    def add(sums: tuple[Any, Aux], part: tuple[Batch, Array]) -> tuple[tuple[Any, Aux], Any]:
        gradients, (reports, carried) = grad(trained, *part)
        kept = lambda i, a, b: stored(wide(a) + wide(b), a.dtype, lambda: salt_of(salt, part[1], i))
        added = map_numbered(kept, sums[0], gradients)
        return (added, jax.tree.map(jnp.add, sums[1], reports)), carried

    shapes = jax.eval_shape(lambda: of_trained(trained, first, numbers[0])[1][0])
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    (gradients, reports), carried = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, trained), zero), (batch, numbers))
    return gradients, reports._replace(carry=carried)


def make_train_step(
    objective: Objective, training: Training = Training()
) -> Callable[[TrainState, Batch, Hyperparameters], tuple[TrainState, Metrics]]:
    def train_step(state: TrainState, batch: Batch, h: Hyperparameters) -> tuple[TrainState, Metrics]:
        trained, frozen = training.split(state.model)
        key = jax.random.fold_in(jax.random.key(h.seed), state.step) if drops(state.model) else None
        salts = [salt_of(h.seed, state.step, purpose) for purpose in range(2)]
        batch = batch._replace(carry=state.carry)
        grads, (sums, health, carried) = summed_gradients(objective, trained, frozen, batch, key, salts[0])
        weight = sums["loss"].weight
        # Divided at the end: every token weighs the same, whichever microbatch it is in.
        scale = 1.0 / jnp.maximum(weight, 1.0)
        gradients = Gradients(grads, scale, scale * optax.tree.norm(jax.tree.map(wide, grads)))
        health = {name: total / batch.inputs.shape[0] for name, total in health.items()}
        metrics = means(sums) | {f"health/{name}": mean for name, mean in health.items()}
        metrics |= {"lr": learning_rate(h, state.step), "grad_norm": gradients.norm}
        empty = weight == 0  # no target counts in the loss
        measured_M = jnp.stack([metrics[name] for name in spikes.MEASURES])
        scores_M = spikes.scores(state.recent, measured_M)
        spike = (jnp.max(scores_M) > h.spike_score) & ~empty
        recent = spikes.remember(state.recent, jnp.where(empty, jnp.nan, measured_M), spike)
        # A step whose loss or gradients are not finite changes nothing; nor does a spike, with --on-spike skip.
        good = jnp.isfinite(measured_M).all() & ~(spike & (h.skip_spikes > 0))
        metrics |= {f"spike_score/{name}": score for name, score in zip(spikes.MEASURES, scores_M, strict=True)}
        metrics |= {"skipped": 1.0 * ~(good | empty), "empty": 1.0 * empty, "spike": 1.0 * spike, "spikes": recent.spikes}
        changes = good & ~empty
        with jax.named_scope("optimizer"):
            trained, opt_state, update_norm = training.update(h, trained, gradients, state.opt_state, changes, salts[1])
            ema = state.ema
            if ema is not None:
                average = averaged(h, ema, trained, state.step)
                ema = jax.tree.map(lambda new, old: jnp.where(changes, new, old), average, ema)
        metrics |= {"update_norm": update_norm, "param_norm": optax.tree.norm(jax.tree.map(wide, trained))}
        step = state.step + changes.astype(state.step.dtype)
        model = after_update(eqx.combine(trained, frozen), step, changes, health)
        # A bad step carries nothing: a value that is not finite would return in every later step.
        carry = jax.tree.map(lambda new, old: jnp.where(good, new, old), carried, state.carry)
        return TrainState(step, model, opt_state, ema, recent, carry), metrics

    return train_step
