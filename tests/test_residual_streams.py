"""Reading from, writing to, projecting and mapping residual streams:
fused forms and GPU kernels against plain einsums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops import residual_streams

R, B, T, D, M = 4, 2, 64, 64, 24  # 128 tokens: a whole block of every kernel


def inputs(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    *xs, y = (jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(R + 1))
    maps = jnp.asarray(rng.normal(size=(B, T, M)), jnp.promote_types(dtype, jnp.float32))
    return tuple(xs), y, maps, jnp.asarray(0.1 * rng.normal(size=(R, D, M)), dtype)


def logits(dtype, spread=0.5):
    noise = spread * np.random.default_rng(9).normal(size=(B, T, M))
    return jnp.asarray(noise + np.concatenate([np.zeros(2 * R), 6.0 * np.eye(R).ravel()])[None, None], dtype)


def forms(name, dtype=jnp.float32):
    """(fast form, plain form, arguments)."""
    xs, y, maps, phi = inputs(dtype)
    return {
        "read": (residual_streams.read, residual_streams.read_reference, (xs, maps)),
        "write": (lambda *args: residual_streams.write(*args)[0], residual_streams.write_reference, (xs, y, maps)),
        "project": (
            lambda xs, phi: residual_streams.project(xs, residual_streams.squares(xs), phi, 1e-6),
            lambda xs, phi: residual_streams.project_reference(xs, phi, 1e-6),
            (xs, phi),
        ),
        "maps": (
            lambda x: residual_streams.maps(x, 20)[0],
            lambda x: residual_streams.maps_reference(x, 20),
            (logits(jnp.promote_types(dtype, jnp.float32)),),
        ),
    }[name]


def weighted(tree):
    """A loss with another weight on every element."""
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.sin(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype) * x) for x in leaves)


NAMES = ["read", "write", "project", "maps"]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_plain_form(name):
    with jax.enable_x64(True):
        fast, plain, args = forms(name, jnp.float64)
        both = [jax.jit(jax.value_and_grad(lambda args, f=f: weighted(f(*args)))) for f in (fast, plain)]
        values = [jax.jit(f)(*args) for f in (fast, plain)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *values)
        (_, got), (_, want) = (f(args) for f in both)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), got, want)


@pytest.mark.parametrize("name", ["read", "write", "project"])
def test_bfloat16_streams_are_summed_in_float32(name):
    fast, plain, args = forms(name, jnp.bfloat16)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    for a, b in zip(jax.tree.leaves(jax.jit(fast)(*args)), jax.tree.leaves(jax.jit(plain)(*wide)), strict=True):
        # One rounding at the end, or none where the result is a coefficient.
        tolerance = 2**-8 if a.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_gpu_kernels_compute_what_xla_does(dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles."""
    xs, y, maps, _ = inputs(dtype)
    x, dmaps = logits(jnp.float32), jnp.asarray(np.random.default_rng(3).normal(size=(B, T, M)), jnp.float32)
    here = functools.partial(functools.partial, interpret=True)
    pairs = [
        (residual_streams._write_in_xla, here(residual_streams._write_in_kernel), (xs, y, maps)),
        (residual_streams._write_sums_in_xla, here(residual_streams._write_sums_in_kernel), (xs, y, maps, tuple(reversed(xs)))),
        (functools.partial(residual_streams._maps_in_xla, 20), here(residual_streams._maps_in_kernel, 20), (x,)),
        (
            functools.partial(residual_streams._maps_backward_in_xla, 20),
            here(residual_streams._maps_backward_in_kernel, 20),
            (x, dmaps),
        ),
    ]
    for in_xla, in_kernel, args in pairs if dtype == jnp.float32 else pairs[:2]:  # maps are never in bfloat16
        want, got = jax.jit(in_xla)(*args), jax.jit(in_kernel)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            tolerance = 2**-7 if a.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def test_the_mixing_is_doubly_stochastic_for_every_token():
    """Also where Sinkhorn's iteration has not arrived after 20 rounds; `unbalanced` says by how much it had not."""
    maps, unbalanced = jax.jit(residual_streams.maps, static_argnums=1)(logits(jnp.float32, spread=2.0), 20)
    res = np.array(jax.tree.map(np.asarray, residual_streams.coefficients(maps)[2]))
    assert res.min() >= 0.0
    np.testing.assert_allclose(res.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(res.sum(axis=0), 1.0, atol=2e-6)
    assert float(unbalanced.max()) > 1e-3


def test_squares_are_those_of_the_streams_as_written():
    """Rounded as they are: the next sub-layer divides by them."""
    for dtype in (jnp.float32, jnp.bfloat16):
        xs, y, maps, _ = inputs(dtype)
        written, squares = jax.jit(residual_streams.write)(xs, y, maps)
        want = np.stack([np.sum(np.asarray(x, np.float64) ** 2, axis=-1) for x in written], axis=-1)
        np.testing.assert_allclose(squares, want, rtol=1e-5)


def test_an_empty_token_has_finite_maps_and_gradients():
    xs = tuple(jnp.zeros((B, T, D)) for _ in range(R))
    phi = inputs()[-1]
    loss = lambda xs: weighted(residual_streams.project(xs, residual_streams.squares(xs), phi, 1e-6))
    value, grads = jax.jit(jax.value_and_grad(loss))(xs)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
