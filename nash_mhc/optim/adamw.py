"""AdamW in one go: the same numbers as optax's parts give one after the other, in less memory.

`optimizers.py` has the plain form. There, moments that a bad step must leave alone are chosen when the update has been
made, and so old and new ones lie beside each other: the compiler copies the whole state. Here the moments that go into
an update are those that are kept, in a bad step the old ones, so that nothing is read after its new value was written.
Moments may be kept in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from nash_mhc.optim.roles import decays, rates
from nash_mhc.optim.rounding import Salt, Salted, salt_of, stored, wide
from nash_mhc.optim.schedule import Hyperparameters, learning_rate
from nash_mhc.parallel.params import map_declared


class Updated(NamedTuple):
    params: PyTree
    opt_state: PyTree
    norm: Float[Array, ""]  # of the update


class Gradients(NamedTuple):
    """As they come out of the backward pass: `sums` over tokens, in the dtype of the weights.

    They are scaled where they are used, so that nobody needs a float32 copy of all of them.
    """

    sums: PyTree
    scale: Float[Array, ""]
    norm: Float[Array, ""]  # of the scaled ones

    def scaled(self) -> PyTree:
        return jax.tree.map(lambda g: wide(g) * self.scale, self.sums)


class _Numbers(NamedTuple):
    """What is the same for every parameter."""

    scale: Float[Array, ""]  # of the gradients, clipped
    bias: tuple[Float[Array, ""], Float[Array, ""]]  # of the moments, which began with 0
    rate: Float[Array, ""]
    good: Bool[Array, ""]


def with_smaller_moments(opt_state: PyTree, model: PyTree, dtype: str) -> PyTree:
    """A fresh state of the plain form with the large parameters' moments in that dtype."""
    if dtype == "float32":
        return opt_state
    halved = lambda moments: map_declared(moments, lambda declared, x: x.astype(dtype) if declared.is_large else x)
    clip, adam, *rest = opt_state
    return (clip, adam._replace(mu=halved(adam.mu), nu=halved(adam.nu)), *rest)


def update(
    h: Hyperparameters, params: PyTree, gradients: Gradients, opt_state: PyTree, good: Bool[Array, ""], salt: Salt
) -> Updated:
    """Parameters and state (that of the plain form) after a step; where it is not a good one, as they were."""
    clip, adam, decay, schedule = opt_state
    count = optax.safe_increment(adam.count)
    shared = _Numbers(
        scale=gradients.scale * jnp.where(gradients.norm < h.max_grad_norm, 1.0, h.max_grad_norm / gradients.norm),
        bias=(1 - h.b1**count, 1 - h.b2**count),
        rate=learning_rate(h, schedule.count),
        good=good,
    )
    columns = [jax.tree.leaves(tree) for tree in (params, gradients.sums, adam.mu, adam.nu, rates(params), decays(params))]
    salted = lambda number: lambda of: salt_of(salt_of(salt, number), of)
    made = [_updated(h, shared, *row, salt=salted(number)) for number, row in enumerate(zip(*columns, strict=True))]
    new_params, mu, nu, squares = zip(*made, strict=True)
    like = lambda leaves: jax.tree.unflatten(jax.tree.structure(params), leaves)
    counted = lambda old: jnp.where(good, optax.safe_increment(old), old)
    adam = adam._replace(count=counted(adam.count), mu=like(mu), nu=like(nu))
    schedule = schedule._replace(count=counted(schedule.count))
    return Updated(like(new_params), (clip, adam, decay, schedule), jnp.sqrt(jnp.sum(jnp.stack(squares))))


def _updated(
    h: Hyperparameters, shared: _Numbers, p: Array, g: Array, m: Array, v: Array, factor: float, decays: bool, *, salt: Salted
) -> tuple[Array, Array, Array, Array]:
    """(parameter, its moments, the sum of the update's squares)."""
    kept = lambda number, new, old: jnp.where(shared.good, stored(new, old.dtype, lambda: salt(number)), old)
    g = wide(g) * shared.scale
    m = kept(0, (1 - h.b1) * g + h.b1 * wide(m), m)
    v = kept(1, (1 - h.b2) * g**2 + h.b2 * wide(v), v)

    step = factor * (wide(m) / shared.bias[0]) / (jnp.sqrt(wide(v) / shared.bias[1]) + h.eps)
    change = -shared.rate * (step + h.weight_decay * wide(p) if decays else step)
    return kept(2, wide(p) + change, p), m, v, jnp.sum(change**2)
