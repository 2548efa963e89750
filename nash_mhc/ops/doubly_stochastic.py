"""Doubly stochastic matrices from any logits: Sinkhorn rounds, then Newton steps, with the gradient of the limit.

The result is diag(u) exp(logits) diag(v) with rows and columns that sum to 1. A few Sinkhorn rounds come close, a few
Newton steps on v converge to rounding. Each step solves a graph Laplacian with R - 1 unknowns. Elimination without
subtraction loses no digits there, even near the identity, where training starts. The gradient is one more such solve:
it needs the result alone, no history.

A matrix is a tuple of rows, each entry an array over tokens: the same code runs in XLA and inside a GPU kernel.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import add_up

# Logits this far below the largest of their column are raised to it: exp stays far from underflow, no sum is zero.
LOWEST = -30.0
SINKHORN_ROUNDS, NEWTON_STEPS = 4, 5  # 6 I + N(0, 0.1) needs 4 steps, 10 I + N(0, 1) needs 5
_LARGEST_STEP = 2.0  # of log v; only logits that differ by 10 or more reach it
_TINY = 1e-30  # keeps 0 / 0 out of the elimination

Vector = tuple[Array, ...]  # R arrays over tokens
Matrix = tuple[Vector, ...]  # its rows


def transposed(k: Matrix) -> Matrix:
    return tuple(zip(*k, strict=True))


def _dot(a: Vector, b: Vector) -> Array:
    return add_up([x * y for x, y in zip(a, b, strict=True)])


def _scaled(k: Matrix, u: Vector, v: Vector) -> Matrix:
    return tuple(tuple(x * a * b for x, b in zip(row, v, strict=True)) for row, a in zip(k, u, strict=True))


def _exp(logits: Matrix) -> Matrix:
    """Return exp with each column divided by its largest entry, which does not change the scaled matrix."""
    top = [functools.reduce(jnp.maximum, column) for column in transposed(logits)]
    return tuple(tuple(jnp.exp(jnp.maximum(x - t, LOWEST)) for x, t in zip(row, top, strict=True)) for row in logits)


def _row_scales(k: Matrix, v: Vector) -> Vector:
    """Return u such that the rows of diag(u) k diag(v) sum to 1."""
    return tuple(1.0 / _dot(row, v) for row in k)


def _solve_laplacian(p: Matrix, b: Vector) -> Vector:
    """Solve (diag(W 1) - W) x = b with x[-1] = 0, where W = p^T p off the diagonal and b sums to 0."""
    R, columns = len(b), transposed(p)
    weight = {(i, j): _dot(columns[i], columns[j]) for i in range(R) for j in range(i + 1, R)}
    right, degree = list(b), []
    for k in range(R - 1):
        degree.append(add_up([weight[k, j] for j in range(k + 1, R)]) + _TINY)
        for j in range(k + 1, R):
            factor = weight[k, j] / degree[k]
            right[j] = right[j] + factor * right[k]
            for i in range(k + 1, j):
                weight[i, j] = weight[i, j] + factor * weight[k, i]
    x = [jnp.zeros_like(b[0])] * R
    for k in reversed(range(R - 1)):
        x[k] = (right[k] + add_up([weight[k, j] * x[j] for j in range(k + 1, R)])) / degree[k]
    return tuple(x)


def _newton_step(k: Matrix, v: Vector) -> Vector:
    """Take a Newton step on log v towards columns that sum to 1, while rows keep summing to 1."""
    p = _scaled(k, _row_scales(k, v), v)
    step = _solve_laplacian(p, tuple(1.0 - add_up(column) for column in transposed(p)))
    mean = add_up(step) / len(step)
    return tuple(x * jnp.exp(jnp.clip(s - mean, -_LARGEST_STEP, _LARGEST_STEP)) for x, s in zip(v, step, strict=True))


def _balanced(p: Matrix) -> Matrix:
    """Make the columns of `p` sum to 1, as its rows do: move the excess of columns above 1 to the others.

    This only corrects rounding, except for logits so far apart (N(0, 8)) that Newton's method has not converged.
    """
    sums = [add_up(column) for column in transposed(p)]
    down, lack = [1.0 / jnp.maximum(s, 1.0) for s in sums], [jnp.maximum(1.0 - s, 0.0) for s in sums]
    total = jnp.maximum(add_up(lack), 1e-12)
    out = []
    for row in p:
        left = [x * d for x, d in zip(row, down, strict=True)]
        # Not 1 - sum(left): its rounding error would exceed the result.
        taken = add_up([x - y for x, y in zip(row, left, strict=True)])
        out.append(tuple(x + taken * (s / total) for x, s in zip(left, lack, strict=True)))
    return tuple(out)


def from_logits(logits: Matrix) -> Matrix:
    """Return the doubly stochastic matrix diag(u) exp(logits) diag(v). Not differentiable: see `logits_gradient`."""
    k = _exp(logits)
    columns = transposed(k)
    u = lax.fori_loop(
        0, SINKHORN_ROUNDS - 1, lambda _, u: _row_scales(k, _row_scales(columns, u)), (jnp.ones_like(k[0][0]),) * len(k)
    )
    v = lax.fori_loop(0, NEWTON_STEPS, lambda _, v: _newton_step(k, v), _row_scales(columns, u))
    return _balanced(_scaled(k, _row_scales(k, v), v))


def _centered(p: Matrix, g: Matrix) -> Matrix:
    """Return p_ij (g_ij - sum_k p_ik g_ik), computed from differences to avoid cancellation."""
    return tuple(
        tuple(x * add_up([y * (a - b) for y, b in zip(row, grads, strict=True)]) for x, a in zip(row, grads, strict=True))
        for row, grads in zip(p, g, strict=True)
    )


def logits_gradient(p: Matrix, grad: Matrix) -> Matrix:
    """Return the gradient of the logits from the result and its gradient: implicit differentiation of the limit."""
    x = _solve_laplacian(p, tuple(add_up(column) for column in transposed(_centered(p, grad))))
    return _centered(p, tuple(tuple(g - c for g, c in zip(row, x, strict=True)) for row in grad))


def sinkhorn_reference(logits: Float[Array, "R R *n"], rounds: int) -> Float[Array, "R R *n"]:
    """Divide exp(logits) by column sums, then by row sums, `rounds` times. The limit defines the result."""
    p = jnp.exp(jnp.maximum(logits - jnp.max(logits, axis=0, keepdims=True), LOWEST))
    divided = lambda p: (q := p / jnp.sum(p, axis=0, keepdims=True)) / jnp.sum(q, axis=1, keepdims=True)
    return lax.fori_loop(0, rounds, lambda _, p: divided(p), p)
