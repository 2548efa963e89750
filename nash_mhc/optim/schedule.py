"""Hyperparameters, which are arguments of the compiled step (changing them compiles nothing), and the learning rate."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from nash_mhc.config.schema import OptimConfig, TrainConfig

_SCHEDULES = ("cosine", "wsd", "constant")
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
        values = {
            "peak": optim.learning_rate,
            "floor": optim.learning_rate * optim.min_lr_ratio,
            "warmup": optim.warmup_steps,
            "total": train.total_steps,
            "decay_start": max(optim.warmup_steps, round(train.total_steps * (1 - optim.decay_fraction))),
            "schedule": _SCHEDULES.index(optim.schedule),
            "weight_decay": optim.weight_decay,
            "b1": optim.b1,
            "b2": optim.b2,
            "eps": optim.eps,
            "max_grad_norm": optim.max_grad_norm or math.inf,
            "ema_decay": optim.ema_decay,
            "spike_score": math.inf if train.on_spike == "ignore" else train.spike_score,
            "skip_spikes": train.on_spike == "skip",
        }
        return Hyperparameters(**{name: np.float32(value) for name, value in values.items()}, seed=np.uint32(train.seed))


def learning_rate(h: Hyperparameters, count: Int[Array, ""] | int) -> Float[Array, ""]:
    """Return the rate of update number `count` (from 0): the peak after the warm-up, the floor at the last step."""
    done = jnp.asarray(count, jnp.float32) + 1  # updates after this one
    share_of = lambda start: jnp.clip((done - start) / jnp.maximum(h.total - start, 1), 0, 1)
    cosine = h.floor + (h.peak - h.floor) * 0.5 * (1 + jnp.cos(jnp.pi * share_of(h.warmup)))
    wsd = h.peak + (h.floor - h.peak) * share_of(h.decay_start)
    after = jnp.select([h.schedule == 0, h.schedule == 1], [cosine, wsd], h.peak)
    return jnp.where(done < h.warmup, h.peak * done / jnp.maximum(h.warmup, 1), after)
