"""Reading from, writing to and projecting residual streams: the fused forms against plain einsums, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops import streams

R, B, T, D, M = 4, 2, 6, 64, 24


def inputs(dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 7)
    xs = tuple(jax.random.normal(k, (B, T, D), dtype) for k in keys[:R])
    y = jax.random.normal(keys[4], (B, T, D), dtype)
    coefficients = jax.random.normal(keys[5], (R * R + 2 * R, B, T), jnp.promote_types(dtype, jnp.float32))
    phi = 0.1 * jax.random.normal(keys[6], (R, D, M), dtype)
    return xs, y, coefficients[:R], coefficients[R : 2 * R], coefficients[2 * R :].reshape(R, R, B, T), phi


def forms(xs, y, pre, post, res, phi):
    eps = 1e-6
    return {
        "read": (streams.read, streams.read_reference, (xs, pre)),
        "write": (streams.write, streams.write_reference, (xs, y, res, post)),
        "project": (
            lambda xs, phi: streams.project(xs, phi, eps),
            lambda xs, phi: streams.project_reference(xs, phi, eps),
            (xs, phi),
        ),
    }  # fmt: skip


def squares(tree):
    """A loss with another weight on every element."""
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.sin(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype) * x) for x in leaves)


@pytest.mark.parametrize("name", ["read", "write", "project"])
def test_values_and_gradients_are_those_of_the_plain_form(name):
    with jax.enable_x64(True):
        fast, plain, args = forms(*inputs(jnp.float64))[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), fast(*args), plain(*args))
        got, want = (jax.grad(lambda args, f=f: squares(f(*args)))(args) for f in (fast, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), got, want)


@pytest.mark.parametrize("name", ["read", "write", "project"])
def test_bfloat16_streams_are_summed_in_float32(name):
    fast, _, args = forms(*inputs(jnp.bfloat16))[name]
    _, plain, wide = forms(*inputs(jnp.bfloat16))[name]
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), wide)
    for a, b in zip(jax.tree.leaves(fast(*args)), jax.tree.leaves(plain(*wide)), strict=True):
        # One rounding at the end, or none where the result is a coefficient.
        tolerance = 2**-8 if a.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tolerance, atol=1e-5)


def test_an_empty_token_has_finite_maps_and_gradients():
    xs = tuple(jnp.zeros((B, T, D)) for _ in range(R))
    phi = inputs()[-1]
    assert np.isfinite(streams.project(xs, phi, 1e-6)).all()
    assert all(np.isfinite(g).all() for g in jax.grad(lambda xs: squares(streams.project(xs, phi, 1e-6)))(xs))
