"""Pooling and upsampling: the fast form against the definition, documents apart, the adjoint,
and what may be seen when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import long

from nash_mhc.ops import pyramid
from nash_mhc.ops.pyramid import continues, pool, pool_reference

B, T, N, H = 2, 24, 2, 4


continued = jax.jit(continues)


def drawn(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def inputs(r, dtype=jnp.float32):
    kernel = drawn(1, (2 * r, N, H), np.promote_types(dtype, np.float32))
    segments = np.repeat(np.array([[1, 1, 2, 2], [1, 2, 2, 3]], np.int32), 6, axis=1)
    return drawn(0, (B, T, N, H), dtype), kernel, continued(segments[:, ::r])


def definition(z, kernel, continues_BI, r):
    """sum_j kernel[j] z[(i-1) r + j], one number at a time."""
    out = np.zeros((B, T // r, N, H))
    for b in range(B):
        for i in range(T // r):
            for j in range(2 * r):
                if j >= r or continues_BI[b, i]:
                    out[b, i] += kernel[j] * z[b, (i - 1) * r + j]
    return out


@pytest.mark.parametrize("r", [2, 3])
def test_both_forms_are_the_definition(r):
    z, kernel, goes_on = inputs(r)
    want = definition(np.asarray(z), np.asarray(kernel), np.asarray(goes_on), r)
    np.testing.assert_allclose(jax.jit(pool_reference)(z, kernel, goes_on), want, atol=1e-5)
    same, pooled = jax.jit(pool)(z, kernel, goes_on)
    np.testing.assert_allclose(pooled, want, atol=1e-5)
    np.testing.assert_array_equal(same, z)


@pytest.mark.parametrize("r", [2, 3])
def test_gradients_are_those_of_the_plain_form(r):
    with jax.enable_x64(True):
        z, kernel, goes_on = inputs(r, jnp.float64)
        on_z, on_rows = drawn(2, (B, T, N, H), np.float64), drawn(3, (B, T // r, N, H), np.float64)
        plain = lambda z, kernel, goes_on: (z, pool_reference(z, kernel, goes_on))

        def gradients(f):
            def loss(z, kernel):
                same, pooled = f(z, kernel, goes_on)
                return jnp.sum(on_z * same) + jnp.sum(on_rows * pooled)

            return jax.jit(jax.grad(loss, (0, 1)))(z, kernel)

        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), gradients(pool), gradients(plain))


@pytest.mark.parametrize(
    ("r", "dtype"),
    [(2, jnp.float32), (4, jnp.bfloat16), (16, jnp.float32), *long((2, jnp.bfloat16), (4, jnp.float32), (16, jnp.bfloat16))],
)
def test_the_gpu_kernels_compute_what_xla_does(r, dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles. A document ends within a piece."""
    shape, rows = (2, 40 * r, 2, 64), 40
    z, dz, dout = drawn(0, shape, dtype), drawn(1, shape, dtype), drawn(2, (2, rows, *shape[2:]), dtype)
    kernel = drawn(3, (2 * r, *shape[2:]))
    goes_on = continued(np.array([[1] * 19 + [2] * 21, [1] * 8 + [2] * 32], np.int32))
    assert pyramid.fits_kernel(z, kernel)
    pairs = [
        (pyramid._pool_in_xla, pyramid._pool_in_kernel, (z, kernel, goes_on)),
        (pyramid._backward_in_xla, pyramid._backward_in_kernel, (z, kernel, goes_on, dz, dout)),
    ]
    for in_xla, in_kernel, args in pairs:
        want, got = jax.jit(in_xla)(*args), jax.jit(functools.partial(in_kernel, interpret=True))(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            tolerance = 2**-7 if a.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_summed_in_float32():
    z, kernel, goes_on = inputs(2, jnp.bfloat16)
    want = jax.jit(pool_reference)(np.asarray(z, np.float32), kernel, goes_on)
    np.testing.assert_allclose(np.asarray(jax.jit(pool)(z, kernel, goes_on)[1], np.float32), want, rtol=2**-8, atol=1e-6)


def test_a_row_continues_only_its_own_document():
    assert continued(np.array([[1, 1, 2, 2, 2, 3]], np.int32)).tolist() == [[False, True, False, True, True, False]]
