"""The optimizers by name. Each is built when a step is traced, from hyperparameters that are traced arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from nash_mhc.config.commands import name_hint
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError
from nash_mhc.optim.schedule import REFERENCE_WIDTH, Hyperparameters, decays, is_orthogonal, learning_rate, matrix_axes, rates

# Singular values of Muon's update of a matrix at a learning rate of 1. For a square matrix of the reference width, the
# root mean square of the update is 0.8, so that rates for Adam suit Muon. docs/experiments.md compares 0.2 to 1.6.
_MUON_STEP = 0.8 * math.sqrt(REFERENCE_WIDTH)


def _adam(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Adam with float32 moments; each array's rate depends on its role and width."""
    adam = optax.scale_by_adam(h.b1, h.b2, h.eps)

    def update(gradients: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        updates, state = adam.update(gradients, state, params)
        return _map_present(lambda u, factor: factor * u, updates, rates(model)), state

    return optax.GradientTransformation(adam.init, update)


def _muon(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest.

    Scaled by the root of (outputs / inputs), an orthogonal update changes the norm of outputs by the same factor at
    every width, so the rate needs no other rule.
    """
    axes = matrix_axes(model)
    orthogonal = scale_by_muon(weight_dimension_numbers=lambda params: _map_present(lambda _, numbers: numbers, params, axes))

    def scaled(update: Array, numbers: MuonDimensionNumbers) -> Array:
        size = lambda some: math.prod(update.shape[axis] for axis in some)
        return _MUON_STEP * math.sqrt(size(numbers.output_axis) / size(numbers.reduction_axis)) * update

    def update(gradients: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        updates, state = orthogonal.update(gradients, state, params)
        return _map_present(scaled, updates, axes), state

    kinds = jax.tree.map(lambda yes: "muon" if yes else "adam", is_orthogonal(model))
    transforms = {"muon": optax.GradientTransformation(orthogonal.init, update), "adam": _adam(h, model)}
    return optax.partition(transforms, lambda _: kinds)


def _map_present(fn: Callable[..., Any], tree: PyTree, values: PyTree) -> PyTree:
    """Map fn(leaf, value) over a tree in which optax has masked some leaves."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda x, value: x if is_masked(x) else fn(x, value), tree, values, is_leaf=is_masked)


# Makes an optimizer from hyperparameters, which may be traced, and a model, whose leaves may be shapes. Its updates
# exclude learning rate and weight decay. Its state of a parameter is sharded like the parameter.
Make = Callable[[Hyperparameters, Any], optax.GradientTransformation]

OPTIMIZERS: Registry[Make] = Registry("optimizers", {"adamw": _adam, "muon": _muon})


def is_plain_adamw() -> bool:
    """Return whether `adamw` is ours, so that `adamw.py` can replace it."""
    return OPTIMIZERS["adamw"] is _adam


def register(name: str, make: Make) -> None:
    """Register an optimizer as `--optimizer NAME`."""
    OPTIMIZERS[name] = make


def make_optimizer(h: Hyperparameters, model: PyTree, name: str = "adamw") -> optax.GradientTransformation:
    """Return the named optimizer with clipping and weight decay; raise ConfigError if the name is unknown."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"--optimizer {name}: unknown optimizer{name_hint(name, [*OPTIMIZERS, 'normuon'])}")
    return optax.chain(
        optax.clip_by_global_norm(h.max_grad_norm),
        OPTIMIZERS[name](h, model),
        optax.add_decayed_weights(h.weight_decay, mask=decays(model)),
        optax.scale_by_learning_rate(lambda count: learning_rate(h, count)),
    )


def updated_average(h: Hyperparameters, ema: PyTree, model: PyTree, count: Int[Array, ""]) -> PyTree:
    """Return the averaged weights after update number `count` (from 0).

    The average is shorter at the start, so that it soon forgets the initial weights.
    """
    decay = jnp.minimum(h.ema_decay, (1.0 + count) / (10.0 + count))
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, model)
