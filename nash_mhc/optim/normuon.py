"""NorMuon for matrices, Adam for everything else, with one learning rate for each group of parameters.

A matrix moves by its momentum, made orthogonal by the Polar Express iteration (arXiv 2505.16932), after its rows were
brought to the same norm (2603.28254). NorMuon (2510.05491) then divides by the root mean square of each neuron.
Gradients are not clipped: the update of a matrix does not depend on the size of its gradient, nor does Adam's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from nash_mhc.optim.adamw import Gradients, Shared, Updated, update_leaf
from nash_mhc.optim.rounding import MakeSalt, Salt, round_to, salt_of, to_float32
from nash_mhc.optim.schedule import GROUPS, Hyperparameters, by_width, group_of, learning_rate, matrix_decay, momentum
from nash_mhc.parallel.params import HEAD, Declared, map_declared
from nash_mhc.parallel.sharding import constrain, to_whole_matrices

# Coefficients of the five steps of Polar Express, for singular values from 1e-3, as the paper gives them.
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_NEURON_DECAY = 0.9  # of the running mean square of a neuron's updates
_TINY = 1e-30


class State(NamedTuple):
    steps: Int[Array, ""]
    mu: PyTree  # momentum of matrices, first moments of the rest
    nu: PyTree  # mean square of each neuron's updates, second moments of the rest


def init(params: PyTree, dtype: str) -> State:
    """Return the state before the first step, with the moments of large parameters in this dtype."""

    def mean_square(declared: Declared, p: Any) -> Array:
        if not _is_matrix(declared):
            return jnp.zeros(p.shape, dtype if declared.is_large else jnp.float32)
        stack, inputs, outputs = declared.split(p.shape)
        ones = lambda sizes: (1,) * len(sizes)
        by_output = math.prod(outputs) >= math.prod(inputs)
        return jnp.zeros((*stack, *ones(inputs), *outputs) if by_output else (*stack, *inputs, *ones(outputs)))

    mu = map_declared(params, lambda declared, p: jnp.zeros(p.shape, dtype if declared.is_large else jnp.float32))
    return State(jnp.zeros((), jnp.int32), mu, map_declared(params, mean_square))


def update(
    h: Hyperparameters,
    params: PyTree,
    gradients: Gradients,
    state: State,
    good: Bool[Array, ""],
    salt: Salt,
    dtype: Any,
) -> Updated:
    """Return parameters and state after a step; if it is not `good`, they stay the same.

    The products that make matrices orthogonal are in `dtype`.
    """
    count = optax.safe_increment(state.steps)
    rate, beta, decay = (of(h, state.steps) for of in (learning_rate, momentum, matrix_decay))
    shared = Shared(gradients.scale, (1 - h.b1**count, 1 - h.b2**count), rate, good)
    declared = jax.tree.leaves(map_declared(params, lambda d, _: d), is_leaf=lambda x: isinstance(x, Declared))
    tied = not any(d.role == HEAD for d in declared)
    columns = [jax.tree.leaves(tree) for tree in (params, gradients.sums, state.mu, state.nu)]
    updated = []
    for i, (d, p, g, m, v) in enumerate(zip(declared, *columns, strict=True)):
        make_salt = lambda purpose, i=i: salt_of(salt_of(salt, i), purpose)
        factor = h.groups[GROUPS.index(group_of(d, tied=tied))]
        if _is_matrix(d):
            updated.append(_update_matrix(d, shared, factor * rate, beta, decay, dtype, p, g, m, v, salt=make_salt))
        else:
            updated.append(update_leaf(h, shared, p, g, m, v, factor * by_width(d, p), decays=False, salt=make_salt))
    new_params, mu, nu, squares = zip(*updated, strict=True)
    like_params = lambda leaves: jax.tree.unflatten(jax.tree.structure(params), leaves)
    state = State(jnp.where(good, count, state.steps), like_params(mu), like_params(nu))
    return Updated(like_params(new_params), state, jnp.sqrt(jnp.sum(jnp.stack(squares))))


def _is_matrix(declared: Declared) -> bool:
    return declared.role.orthogonal and declared.is_matrix


def _update_matrix(
    declared: Declared,
    shared: Shared,
    rate: Float[Array, ""],
    beta: Float[Array, ""],
    decay: Float[Array, ""],  # relative to the rate
    dtype: Any,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    salt: MakeSalt,
) -> tuple[Array, Array, Array, Array]:
    """Return the matrices, their momentum, their neurons' mean squares, and the sum of the update's squares."""
    select = lambda purpose, new, old: jnp.where(shared.good, round_to(new, old.dtype, lambda: salt(purpose)), old)
    g = to_float32(g) * shared.scale
    m = select(0, beta * to_float32(m) + (1 - beta) * g, m)
    _, inputs, outputs = (math.prod(sizes) for sizes in declared.split(p.shape))
    direction = beta * to_float32(m) + (1 - beta) * g  # Nesterov's
    u = _orthogonal_on_mesh(declared, direction, dtype).reshape(-1, inputs, outputs)

    # Divide each neuron's update by its running RMS; keep the Frobenius norm of an orthogonal matrix.
    squares = jnp.mean(u**2, axis=1 if outputs >= inputs else 2, keepdims=True)
    new_v = _NEURON_DECAY * v.reshape(squares.shape) + (1 - _NEURON_DECAY) * squares
    u = _with_norm(u / jnp.sqrt(jnp.maximum(new_v, _TINY)), math.sqrt(min(inputs, outputs))).reshape(p.shape)

    change = -rate * u
    # Cautious weight decay: only where update and decay have the same sign.
    change = change - jnp.where(change * p <= 0, rate * decay * to_float32(p), 0.0)
    return select(1, to_float32(p) + change, p), m, select(2, new_v.reshape(v.shape), v), jnp.sum(change**2)


def _norm(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def _with_norm(x: Float[Array, "S I O"], norm: float) -> Float[Array, "S I O"]:
    """Scale each matrix to this Frobenius norm; zero stays zero."""
    return x * (norm / jnp.maximum(_norm(x, (1, 2)), _TINY))


def _orthogonal_on_mesh(declared: Declared, x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Return x with orthogonal matrices; each device makes whole matrices of a stack orthogonal."""
    _, inputs, outputs = (math.prod(sizes) for sizes in declared.split(x.shape))
    mesh = jax.sharding.get_abstract_mesh()
    if declared.stack != 1 or mesh.size <= 1:
        return orthogonal(x.reshape(-1, inputs, outputs), dtype).reshape(x.shape)
    steps, length = to_whole_matrices(declared.axes), x.shape[0]
    x = jax.lax.with_sharding_constraint(x, steps[0])
    x = jnp.pad(x, [(0, -length % mesh.size)] + [(0, 0)] * (x.ndim - 1))
    for step in steps:
        x = jax.lax.with_sharding_constraint(x, step)
    matrices = constrain(x.reshape(-1, inputs, outputs), "matrices", "rows", "columns")
    x = constrain(orthogonal(matrices, dtype), "matrices", "rows", "columns").reshape(x.shape)
    for step in reversed(steps):
        x = jax.lax.with_sharding_constraint(x, step)
    return x[:length]


def orthogonal(x: Float[Array, "S I O"], dtype: Any) -> Float[Array, "S I O"]:
    """Return each matrix with its singular values near 1, in float32; products are in `dtype`.

    The columns, one for each output, are brought to the same norm first.
    """
    _, inputs, outputs = x.shape
    columns = _norm(x, (1,))
    x = x / jnp.maximum(columns, 1e-6 * jnp.max(columns, axis=2, keepdims=True) + _TINY)
    x = _with_norm(x, 1 / 1.01).astype(dtype)
    x = x if inputs <= outputs else x.mT
    for a, b, c in _POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = (x if inputs <= outputs else x.mT).astype(jnp.float32)
    return _with_norm(x, math.sqrt(min(inputs, outputs)))
