"""Activations against automatic gradients, and what they save for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.activations import silu_product, silu_product_reference, squared_relu, squared_relu_reference

FORMS = [(silu_product, silu_product_reference, 2), (squared_relu, squared_relu_reference, 1)]


@pytest.mark.parametrize("fast, plain, inputs", FORMS)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_values_and_gradients_equal_the_reference(fast, plain, inputs, dtype, tolerance):
    keys = jax.random.split(jax.random.key(0), inputs + 1)
    *args, dout = (3 * jax.random.normal(key, (4, 16, 32), dtype) for key in keys)
    (out, back), (want, want_back) = jax.vjp(fast, *args), jax.vjp(plain, *args)
    np.testing.assert_array_equal(out, want)
    for got, expected in zip(back(dout), want_back(dout), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fast, plain, inputs", FORMS)
def test_only_the_inputs_are_saved(fast, plain, inputs):
    args = [jnp.ones((4, 32))] * inputs
    saved = lambda fn: len(jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args)))
    assert saved(fast) == inputs < saved(plain)
