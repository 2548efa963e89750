"""Doubly stochastic matrices from any logits: Sinkhorn's iteration, its gradient, and an exact finish.

The matrix axes come first and the tokens last (`logits[i, j]` is one array over all tokens), so that every operation is
elementwise over tokens, and no 4 x 4 matrix is ever padded to a tile. `sinkhorn_gpu.py` has the same arithmetic for the
inside of a kernel, number by number.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Logits this far below the largest of their column count as this far: exp stays far from underflow, and no sum is zero.
LOWEST = -30.0
Vector = tuple[Array, ...]  # R arrays over tokens
Matrix = tuple[Vector, ...]  # its rows
_Back = tuple[Array, Array, Array, Array]  # du, dv, dk, and the u that they belong to


def _kernel(logits: Array) -> Array:
    # The first step divides columns, so a column may be scaled at will: here by its largest entry.
    return jnp.exp(jnp.maximum(logits - jnp.max(logits, axis=0, keepdims=True), LOWEST))


def sinkhorn_reference(logits: Float[Array, "R R *n"], iterations: int = 20) -> Float[Array, "R R *n"]:
    """exp, then `iterations` times: divide columns by their sums, then rows by theirs.
    The definition, in its plain form."""
    p = _kernel(logits)
    for _ in range(iterations):
        p = p / jnp.sum(p, axis=0, keepdims=True)
        p = p / jnp.sum(p, axis=1, keepdims=True)
    return p


def sum_over(x: Array, axis: int) -> Array:
    """Over the R entries, one by one: a CPU's library takes `jnp.sum` for a reduction, and fifty times as long."""
    return functools.reduce(jnp.add, [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])])


def _columns(k: Array, u: Array) -> Array:
    """v such that the columns of diag(u) k diag(v) sum to 1."""
    return 1.0 / sum_over(k * u[:, None], axis=0)


def _rows(k: Array, v: Array) -> Array:
    """u such that its rows do."""
    return 1.0 / sum_over(k * v[None], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sinkhorn(logits: Float[Array, "R R *n"], iterations: int = 20) -> Float[Array, "R R *n"]:
    """The same as `sinkhorn_reference`, by scaling vectors: the result is diag(u) exp(logits) diag(v).

    Rows sum to 1; columns nearly so, as far as the iteration got. Its gradient is that of the finite iteration, not of
    its limit: near the identity, where training starts, the limit is many more than 20 iterations away.
    """
    k = _kernel(logits)
    ones = jnp.ones_like(k[0])
    u, before = lax.fori_loop(0, iterations, lambda _, pair: (_rows(k, _columns(k, pair[0])), pair[0]), (ones, ones))
    return k * u[:, None] * _columns(k, before)[None]


def _sinkhorn_fwd(logits: Array, iterations: int) -> tuple[Array, tuple[Array, Array, Array]]:
    """Only the u of each iteration is kept: the v are computed again."""
    k = _kernel(logits)
    u, history = lax.scan(lambda u, _: (_rows(k, _columns(k, u)), u), jnp.ones_like(k[0]), length=iterations)
    return k * u[:, None] * _columns(k, history[-1])[None], (k, u, history)


def _sinkhorn_bwd(iterations: int, saved: tuple[Array, Array, Array], grad: Array) -> tuple[Array]:
    k, u, history = saved
    gk, v = grad * k, _columns(k, history[-1])
    # Of the result diag(u) k diag(v): du, dv, dk.
    at_result = sum_over(gk * v[None], axis=1), sum_over(gk * u[:, None], axis=0), grad * u[:, None] * v[None]

    def back(carry: _Back, u: Array) -> tuple[_Back, None]:
        """One iteration in reverse, `u` being what it began with."""
        du, dv, dk, after = carry
        v = _columns(k, u)
        at_rows = -du * after * after  # of the sums that `after` is 1 over
        dv = dv + sum_over(k * at_rows[:, None], axis=0)
        at_columns = -dv * v * v
        dk = dk + at_rows[:, None] * v[None] + u[:, None] * at_columns[None]
        return (sum_over(k * at_columns[None], axis=1), jnp.zeros_like(dv), dk, u), None

    (_, _, dk, _), _ = lax.scan(back, (*at_result, u), history, reverse=True)
    return (dk * k,)


sinkhorn.defvjp(_sinkhorn_fwd, _sinkhorn_bwd)


def balance(p: Float[Array, "R R *n"]) -> Float[Array, "R R *n"]:
    """The nearest step from rows that sum to 1 to a doubly stochastic matrix:
    columns that hold too much give, others take.

    Sinkhorn's iteration is slow near the identity: with logits 6 I + N(0, 0.1) its columns are still 4e-3 off after 20
    rounds. This closes the gap at once: columns above 1 are scaled down to 1, and what their rows then lack goes to the
    columns below 1, in proportion. Nothing becomes negative, and a matrix that is balanced stays as it is.
    """
    column_sums = sum_over(p, axis=0)
    lack = jnp.maximum(1.0 - column_sums, 0.0)
    kept = p * (1.0 / jnp.maximum(column_sums, 1.0))[None]
    # Not 1 - sum(kept), which would drown in rounding: exactly what the scaling took away.
    taken = sum_over(p - kept, axis=1)[:, None]
    # Where nothing lacks, nothing is given either, and the floor keeps 0 / 0 away, from the gradient too.
    return kept + taken * (lack / jnp.maximum(sum_over(lack, axis=0), 1e-12)[None])[None]
