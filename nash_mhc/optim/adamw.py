"""AdamW in one pass: bit-equal to optax's transformations in `optimizers.py`, in less memory.

In optax's form, a bad step restores the old moments after the update. Both versions are then alive, and the compiler
copies the whole state. Here a bad step computes its update from the old moments, so no array is read after its new
value is written. Moments may be bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from nash_mhc.optim.rounding import MakeSalt, Salt, round_to, salt_of, to_float32
from nash_mhc.optim.schedule import Hyperparameters, decays, learning_rate, rates
from nash_mhc.parallel.params import map_declared


class Updated(NamedTuple):
    params: PyTree
    opt_state: PyTree
    norm: Float[Array, ""]  # of the update


class Gradients(NamedTuple):
    """Gradients from the backward pass: sums over tokens, in the dtype of the weights.

    They are scaled where they are used, which avoids a float32 copy of all of them.
    """

    sums: PyTree
    scale: Float[Array, ""]
    norm: Float[Array, ""]  # of the scaled gradients

    def scaled(self) -> PyTree:
        return jax.tree.map(lambda g: to_float32(g) * self.scale, self.sums)


class Shared(NamedTuple):
    """Numbers that all parameters share."""

    scale: Float[Array, ""]  # factor of the gradients, with clipping
    bias: tuple[Float[Array, ""], Float[Array, ""]]  # corrections of the moments, which began at 0
    rate: Float[Array, ""]
    good: Bool[Array, ""]


def cast_moments(opt_state: PyTree, dtype: str) -> PyTree:
    """Return an initial optimizer state with the moments of large parameters in this dtype."""
    if dtype == "float32":
        return opt_state
    cast = lambda moments: map_declared(moments, lambda declared, x: x.astype(dtype) if declared.is_large else x)
    clip, adam, *rest = opt_state
    return (clip, adam._replace(mu=cast(adam.mu), nu=cast(adam.nu)), *rest)


def update(
    h: Hyperparameters, params: PyTree, gradients: Gradients, opt_state: PyTree, good: Bool[Array, ""], salt: Salt
) -> Updated:
    """Return parameters and state (in optax's form) after a step; if it is not `good`, they stay the same."""
    clip, adam, decay, schedule = opt_state
    count = optax.safe_increment(adam.count)
    shared = Shared(
        scale=gradients.scale * jnp.where(gradients.norm < h.max_grad_norm, 1.0, h.max_grad_norm / gradients.norm),
        bias=(1 - h.b1**count, 1 - h.b2**count),
        rate=learning_rate(h, schedule.count),
        good=good,
    )
    columns = [jax.tree.leaves(tree) for tree in (params, gradients.sums, adam.mu, adam.nu, rates(params), decays(params))]
    salt_for = lambda index: lambda purpose: salt_of(salt_of(salt, index), purpose)
    updated = [update_leaf(h, shared, *row, salt=salt_for(i)) for i, row in enumerate(zip(*columns, strict=True))]
    new_params, mu, nu, squares = zip(*updated, strict=True)
    like_params = lambda leaves: jax.tree.unflatten(jax.tree.structure(params), leaves)
    counted = lambda old: jnp.where(good, optax.safe_increment(old), old)
    adam = adam._replace(count=counted(adam.count), mu=like_params(mu), nu=like_params(nu))
    schedule = schedule._replace(count=counted(schedule.count))
    return Updated(like_params(new_params), (clip, adam, decay, schedule), jnp.sqrt(jnp.sum(jnp.stack(squares))))


def update_leaf(
    h: Hyperparameters, shared: Shared, p: Array, g: Array, m: Array, v: Array, rate: Any, decays: bool, *, salt: MakeSalt
) -> tuple[Array, Array, Array, Array]:
    """Return the parameter, its moments, and the sum of the update's squares; `rate` is relative to the run's."""
    select = lambda purpose, new, old: jnp.where(shared.good, round_to(new, old.dtype, lambda: salt(purpose)), old)
    g = to_float32(g) * shared.scale
    m = select(0, (1 - h.b1) * g + h.b1 * to_float32(m), m)
    v = select(1, (1 - h.b2) * g**2 + h.b2 * to_float32(v), v)

    step = rate * (to_float32(m) / shared.bias[0]) / (jnp.sqrt(to_float32(v) / shared.bias[1]) + h.eps)
    change = -shared.rate * (step + h.weight_decay * to_float32(p) if decays else step)
    return select(2, to_float32(p) + change, p), m, v, jnp.sum(change**2)
