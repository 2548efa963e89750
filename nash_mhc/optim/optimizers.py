"""The optimizers by name. Each is made anew in every trace, from numbers that are arguments of the program."""

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
from nash_mhc.optim.roles import REFERENCE_WIDTH, decays, is_orthogonal, matrix_axes, rates
from nash_mhc.optim.schedule import Hyperparameters, learning_rate

# How far Muon moves a matrix at a learning rate of 1, in singular values, so that rates of the size that suits Adam
# suit it: a square one of the reference width by 0.8 in the root of its mean square.
# docs/experiments.md has what came of 0.2 to 1.6.
_MUON_STEP = 0.8 * math.sqrt(REFERENCE_WIDTH)


def _adam(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Adam with float32 moments; each array's rate follows from its role and its width."""
    adam = optax.scale_by_adam(h.b1, h.b2, h.eps)

    def update(gradients: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        updates, state = adam.update(gradients, state, params)
        return _map_present(lambda u, factor: factor * u, updates, rates(model)), state

    return optax.GradientTransformation(adam.init, update)


def _muon(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Matrices by Muon, all else by Adam.

    An orthogonal update changes the length of what comes out by the same factor whatever the width, if it is scaled by
    the root of (outputs / inputs): the rate needs no other rule.
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
    parts = {"muon": optax.GradientTransformation(orthogonal.init, update), "adam": _adam(h, model)}
    return optax.partition(parts, lambda _: kinds)


def _map_present(fn: Callable[..., Any], tree: PyTree, values: PyTree) -> PyTree:
    """fn(leaf, value) over the leaves of a part of a model; optax has put a MaskedNode where the others were."""
    is_gone = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda x, value: x if is_gone(x) else fn(x, value), tree, values, is_leaf=is_gone)


# From numbers, which may be traced, and a model, whose leaves may be shapes, to updates that neither the learning rate
# nor weight decay is part of. What it keeps of a parameter is laid on the mesh as the parameter is.
Make = Callable[[Hyperparameters, Any], optax.GradientTransformation]

OPTIMIZERS: Registry[Make] = Registry("optimizers", {"adamw": _adam, "muon": _muon})


def is_plain_adamw() -> bool:
    """Whether adamw is ours, which `adamw.py` has a faster form of."""
    return OPTIMIZERS["adamw"] is _adam


def register(name: str, make: Make) -> None:
    """Makes an optimizer known as `--optimizer NAME`."""
    OPTIMIZERS[name] = make


def make_optimizer(h: Hyperparameters, model: PyTree, name: str = "adamw") -> optax.GradientTransformation:
    """Clips by the global norm, then as `name` says; decay on matrices only, alike for all of them. ConfigError."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"--optimizer {name}: there is no such optimizer{name_hint(name, OPTIMIZERS)}")
    return optax.chain(
        optax.clip_by_global_norm(h.max_grad_norm),
        OPTIMIZERS[name](h, model),
        optax.add_decayed_weights(h.weight_decay, mask=decays(model)),
        optax.scale_by_learning_rate(lambda count: learning_rate(h, count)),
    )


def averaged(h: Hyperparameters, ema: PyTree, model: PyTree, count: Int[Array, ""]) -> PyTree:
    """The averaged weights after update number `count` (from 0).

    The first updates are averaged over fewer: a long average would hold on to the weights that nothing has taught yet.
    """
    decay = jnp.minimum(h.ema_decay, (1.0 + count) / (10.0 + count))
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, model)
