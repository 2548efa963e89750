"""Hyperparameters, which are arguments of the compiled step (changing them compiles nothing), and learning rates.

The schedules give a number per step; the role and the axes of a parameter say what applies to it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32
from optax.contrib import MuonDimensionNumbers

from nash_mhc.config.optim import RATE_FACTORS, OptimConfig
from nash_mhc.config.sections import TrainConfig
from nash_mhc.parallel.params import ADAPTER, TABLE, Declared, map_declared

_SCHEDULES = ("cosine", "wsd", "constant")
GROUPS = tuple(RATE_FACTORS)  # the parameter groups of `normuon`
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


# --- by parameter ----------------------------------------------------------------------------------------------------

# Width of the model on which learning rates were tuned: the rate of its matrices is --learning-rate.
REFERENCE_WIDTH = 640


def decays(module: PyTree) -> PyTree:
    """Return the module's tree with True where weight decay applies: matrices and tables, not norms or biases."""
    return map_declared(module, lambda declared, _: declared.decays)


def rates(module: PyTree) -> PyTree:
    """Return the module's tree with each array's factor of the learning rate under Adam.

    Adam moves every entry of a matrix by about the rate, in directions that agree with the input, so outputs move by
    the rate times the width. Arrays with the width among their axes therefore have a rate of one over the width, and
    the same --learning-rate suits every width. Scales, biases and taps move outputs by the rate itself.
    """

    return map_declared(module, lambda declared, array: by_width(declared, array) * declared.role.rate)


def by_width(declared: Declared, array: Any) -> float:
    """Return the reference width over the width, for an array whose rate under Adam falls with the width; else 1."""
    if not declared.role.by_width or "embed" not in declared.axes:
        return 1.0
    return REFERENCE_WIDTH / array.shape[declared.axes.index("embed")]


def group_of(declared: Declared, *, tied: bool) -> str:
    """Return the group whose learning rate a parameter has under `normuon`.

    tied: one table is both embedding and head.
    """
    if declared.role == ADAPTER:
        return "adapter"
    if declared.role == TABLE:
        return "tied" if tied else "embedding"
    return declared.role.name if declared.role.name in GROUPS else "vector"


def is_orthogonal(module: PyTree) -> PyTree:
    """Return the module's tree with True where Muon makes updates orthogonal."""
    return map_declared(module, lambda declared, _: declared.role.orthogonal and declared.is_matrix)


def matrix_axes(module: PyTree) -> PyTree:
    """Return the module's tree with the input and output axes of each matrix; a stack is several matrices."""

    def numbers(declared: Declared, _: Any) -> MuonDimensionNumbers:
        _, inputs, outputs = declared.split(tuple(range(len(declared.axes))))
        return MuonDimensionNumbers(inputs, outputs)

    return map_declared(module, numbers)
