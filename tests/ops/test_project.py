"""Tokens times a weight: values and gradients are those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.arithmetic import project


@pytest.mark.parametrize("out", [(6,), (2, 3)], ids=str)
def test_values_and_gradients_are_those_of_the_plain_product(out):
    x, w = jax.random.normal(jax.random.key(0), (2, 5, 4)), jax.random.normal(jax.random.key(1), (4, *out))
    probe = jax.random.normal(jax.random.key(2), (2, 5, *out))
    plain = lambda x, w: (x.reshape(-1, 4) @ w.reshape(4, -1)).reshape(2, 5, *out)

    def all_of(f):
        def loss(x, w):
            y = f(x, w)
            return jnp.sum(y * probe), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)

    for got, want in zip(jax.tree.leaves(all_of(project)), jax.tree.leaves(all_of(plain)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
