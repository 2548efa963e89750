"""Doubly stochastic mixing: the fast form against the definition, its gradient against finite differences,
exactness."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.sinkhorn import balance, sinkhorn, sinkhorn_reference


def logits(seed=0, R=4, n=(64,), scale=1.0, diagonal=0.0, dtype=np.float32):
    noise = scale * np.random.default_rng(seed).normal(size=(R, R, *n))
    return (noise + diagonal * np.eye(R).reshape(R, R, *(1,) * len(n))).astype(dtype)


@functools.cache
def found(form, iterations):
    """(value, gradient of its product with the target), compiled once for all logits of a shape."""

    def loss(x, target):
        p = form(x, iterations)
        return jnp.sum(target * p), p

    def both(x, target):
        gradient, p = jax.grad(loss, has_aux=True)(x, target)
        return p, gradient

    return jax.jit(both)


@functools.partial(jax.jit, static_argnums=1)
def balanced(x, iterations):
    return balance(sinkhorn(x, iterations))


CASES = [(4, 1.0, 0.0), (4, 0.1, 6.0), (4, 2.0, 6.0), (2, 1.0, 3.0), (3, 8.0, 0.0)]


@pytest.mark.parametrize(("R", "scale", "diagonal"), CASES)
@pytest.mark.parametrize("iterations", [1, 6])  # the definition has each of them written out
def test_values_and_gradients_are_those_of_the_definition(R, scale, diagonal, iterations):
    with jax.enable_x64(True):
        x = logits(R=R, scale=scale, diagonal=diagonal, n=(2, 5), dtype=np.float64)
        target = np.random.default_rng(1).normal(size=x.shape)
        (got, slope), (want, wanted_slope) = (found(form, iterations)(x, target) for form in (sinkhorn, sinkhorn_reference))
        np.testing.assert_allclose(got, want, rtol=1e-10)
        np.testing.assert_allclose(slope, wanted_slope, atol=1e-10)


@pytest.mark.parametrize(("R", "scale", "diagonal"), CASES)
def test_the_gradient_is_that_of_finite_differences(R, scale, diagonal):
    with jax.enable_x64(True):
        x = logits(R=R, scale=scale, diagonal=diagonal, n=(), dtype=np.float64)
        target = np.random.default_rng(1).normal(size=x.shape)
        for form in (sinkhorn, balanced):
            values = lambda x, form=form: np.asarray(found(form, 20)(x, target)[0])
            step = 1e-5
            bumps = step * np.eye(R * R).reshape(R * R, R, R)
            measured = [np.sum(target * (values(x + b) - values(x - b))) / (2 * step) for b in bumps]
            np.testing.assert_allclose(found(form, 20)(x, target)[1].ravel(), measured, atol=1e-8)


@pytest.mark.parametrize(("R", "scale", "diagonal"), [*CASES, (4, 0.0, 6.0), (4, 1e4, 0.0), (4, 30.0, 6.0), (4, 0.0, 0.0)])
def test_balanced_matrices_are_doubly_stochastic_whatever_the_logits(R, scale, diagonal):
    p = np.asarray(balanced(logits(R=R, scale=scale, diagonal=diagonal, n=(500,)), 20))
    assert np.isfinite(p).all()
    assert float(p.min()) >= 0.0
    np.testing.assert_allclose(np.sum(p, axis=1), 1.0, atol=5e-7)
    np.testing.assert_allclose(np.sum(p, axis=0), 1.0, atol=2e-6)
    norms = np.linalg.norm(np.moveaxis(p, -1, 0), 2, axis=(1, 2))
    assert norms.max() <= 1 + 1e-5


def test_the_gradient_stays_finite_at_extremes():
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(balanced(x, 20) ** 2)))
    for x in (np.zeros((4, 4, 64), np.float32), logits(scale=1e4), logits(scale=0.0, diagonal=6.0)):
        assert np.isfinite(gradient(x)).all()


def test_balance_leaves_what_is_balanced_alone():
    p, rounds = logits(scale=0.5, diagonal=0.0), jax.jit(functools.partial(sinkhorn_reference, iterations=4))
    for _ in range(50):  # a definition of two hundred rounds would be compiled for long
        p = np.log(rounds(p))
    np.testing.assert_allclose(jax.jit(balance)(np.exp(p)), np.exp(p), atol=1e-6)


def test_sinkhorn_alone_is_not_enough_where_training_starts():
    """The reason for `balance`; should this fail, it can go."""
    p = np.asarray(jax.jit(sinkhorn, static_argnums=1)(logits(scale=0.1, diagonal=6.0, n=(4000,)), 20))
    assert np.abs(np.sum(p, axis=0) - 1).max() > 1e-3


def test_the_mean_over_streams_is_kept():
    p = balanced(logits(diagonal=6.0, n=(50,)), 20)
    x = np.random.default_rng(2).normal(size=(4, 50)).astype(np.float32)
    np.testing.assert_allclose(np.mean(np.einsum("ijn,jn->in", p, x), axis=0), np.mean(x, axis=0), atol=1e-5)
