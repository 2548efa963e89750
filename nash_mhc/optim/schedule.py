"""Hyperparameters, which are arguments of the compiled step (changing them compiles nothing), and the learning rate."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from nash_mhc.config.sections import RATE_FACTORS, OptimConfig, TrainConfig

_SCHEDULES = ("cosine", "wsd", "constant")
GROUPS = tuple(RATE_FACTORS)  # of parameters, with learning rates of their own under `normuon`
# Weight decay of matrices under `normuon`, as a factor on --weight-decay: at most the first number. In a long run, the
# decay summed over the steps is constant: the second number is that of a run of 2,500 steps at a rate of 0.02.
_MATRIX_DECAY, _SUMMED_DECAY = 2.8, 139.0
Number = Float[Array, ""] | np.float32
Seed = UInt32[Array, ""] | np.uint32


class Hyperparameters(NamedTuple):
    """Numbers that may change at every start of a run."""

    peak: Number  # learning rate at the end of the warm-up
    floor: Number  # learning rate at the last step
    warmup: Number  # steps
    total: Number
    decay_start: Number  # step where wsd starts to fall
    schedule: Number  # index in _SCHEDULES
    weight_decay: Number
    matrix_decay: Number  # at the first step, under normuon
    groups: Float[Array, "G"] | np.ndarray  # factors on the learning rate, in the order of GROUPS
    b1: Number
    b2: Number
    eps: Number
    max_grad_norm: Number  # infinite: no clipping
    ema_decay: Number
    spike_score: Number  # infinite: no spikes
    skip_spikes: Number  # 0 or 1
    seed: Seed  # of random numbers in the step

    @staticmethod
    def of(optim: OptimConfig, train: TrainConfig) -> Hyperparameters:
        factors = optim.group_rates
        steps = optim.learning_rate * factors["matrix"] * train.total_steps
        values = {
            "peak": optim.learning_rate,
            "floor": optim.learning_rate * optim.min_lr_ratio,
            "warmup": optim.warmup_steps,
            "total": train.total_steps,
            "decay_start": max(optim.warmup_steps, round(train.total_steps * (1 - optim.decay_fraction))),
            "schedule": _SCHEDULES.index(optim.schedule),
            "weight_decay": optim.weight_decay,
            "matrix_decay": optim.weight_decay * min(_MATRIX_DECAY, _SUMMED_DECAY / steps),
            "b1": optim.b1,
            "b2": optim.b2,
            "eps": optim.eps,
            "max_grad_norm": optim.max_grad_norm or math.inf,
            "ema_decay": optim.ema_decay,
            "spike_score": math.inf if train.on_spike == "ignore" else train.spike_score,
            "skip_spikes": train.on_spike == "skip",
        }
        groups = np.asarray([factors[group] for group in GROUPS], np.float32)
        numbers = {name: np.float32(value) for name, value in values.items()}
        return Hyperparameters(**numbers, groups=groups, seed=np.uint32(train.seed))


def learning_rate(h: Hyperparameters, count: Int[Array, ""] | int) -> Float[Array, ""]:
    """Return the rate of update number `count` (from 0): the peak after the warm-up, the floor at the last step."""
    done = jnp.asarray(count, jnp.float32) + 1  # updates after this one
    share_of = lambda start: jnp.clip((done - start) / jnp.maximum(h.total - start, 1), 0, 1)
    cosine = h.floor + (h.peak - h.floor) * 0.5 * (1 + jnp.cos(jnp.pi * share_of(h.warmup)))
    wsd = h.peak + (h.floor - h.peak) * share_of(h.decay_start)
    after = jnp.select([h.schedule == 0, h.schedule == 1], [cosine, wsd], h.peak)
    return jnp.where(done < h.warmup, h.peak * done / jnp.maximum(h.warmup, 1), after)


def momentum(h: Hyperparameters, count: Int[Array, ""]) -> Float[Array, ""]:
    """Return the momentum of matrices: from 0.85 to 0.97 in the first 400 steps, to 0.90 while the rate decays."""
    rise = jnp.clip(count / jnp.minimum(400.0, jnp.maximum(h.decay_start, 1)), 0, 1)
    fall = jnp.clip((count - h.decay_start) / jnp.maximum(h.total - h.decay_start, 1), 0, 1)
    return 0.85 + 0.12 * rise - 0.07 * fall


def matrix_decay(h: Hyperparameters, count: Int[Array, ""]) -> Float[Array, ""]:
    """Return the weight decay of matrices, relative to their rate: it falls to 0 by half a cosine."""
    return h.matrix_decay * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(count / h.total, 0, 1)))
