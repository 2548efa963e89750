"""RMS normalisation, alone and with the rotation: values and gradients against the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.norm import norm_and_rope, rms_norm, rms_norm_reference
from nash_mhc.ops.rope import Rotation, rope

B, T, N, H = 2, 5, 3, 16
TURN = Rotation(100.0, tuple(1 / (1 + i) for i in range(H // 2)), 1.25)


def inputs(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = (jax.random.normal(k, (B, T, N, H), dtype) for k in keys[:2])
    scale = jax.random.normal(keys[2], (H,), jnp.promote_types(dtype, jnp.float32))
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    return x, scale, positions, weight


def pairs(positions):
    return {
        "norm": (lambda x, s: rms_norm(x, s, 1e-6), lambda x, s: rms_norm_reference(x, s, 1e-6)),
        "turned": (
            lambda x, s: norm_and_rope(x, s, positions, 1e-6, TURN),
            lambda x, s: rope(rms_norm_reference(x, s, 1e-6), positions, TURN),
        ),
    }


@pytest.mark.parametrize("name", ["norm", "turned"])
def test_values_and_gradients_are_those_of_the_plain_form(name):
    with jax.enable_x64(True):
        x, scale, positions, weight = inputs(jnp.float64)
        run = lambda f: jax.jit(jax.value_and_grad(lambda x, s: jnp.sum(weight * f(x, s)), (0, 1)))(x, scale)
        (got, got_grads), (want, want_grads) = (run(f) for f in pairs(positions)[name])
        # The rotation's own angles are float32, whatever the values are.
        np.testing.assert_allclose(got, want, rtol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got_grads, want_grads)


@pytest.mark.parametrize("name", ["norm", "turned"])
def test_bfloat16_is_rounded_once_at_the_end(name):
    x, scale, positions, _ = inputs(jnp.bfloat16)
    fast, plain = pairs(positions)[name]
    want = plain(x.astype(jnp.float32), scale)
    np.testing.assert_allclose(np.asarray(fast(x, scale), np.float32), want, rtol=2**-8, atol=1e-6)


def test_zeros_have_a_finite_gradient():
    x, scale, positions, _ = inputs(jnp.float32)
    grad = jax.grad(lambda x: jnp.sum(norm_and_rope(x, scale, positions, 1e-6, TURN)))(jnp.zeros_like(x))
    assert np.isfinite(grad).all()
