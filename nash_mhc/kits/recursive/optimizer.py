"""Adam-atan2 (arXiv 2407.05872)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from nash_mhc.optim.roles import rates
from nash_mhc.optim.schedule import Hyperparameters


def adam_atan2(h: Hyperparameters, model: PyTree) -> optax.GradientTransformation:
    """Make Adam with an angle for its quotient: bounded, without epsilon, independent of the gradients' scale.

    The factor makes a parameter with a constant gradient move as far as Adam moves it.
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
