"""The short convolution: the sum it is said to be, within documents, with the gradients of that sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.parts import ShortConv
from nash_mhc.ops.conv import short_conv


def written_out(x_BTD, taps_JD, segments_BT):
    out = np.zeros_like(x_BTD)
    for b, t in np.ndindex(*x_BTD.shape[:2]):
        for j, tap_D in enumerate(taps_JD):
            if t >= j and segments_BT[b, t] == segments_BT[b, t - j]:
                out[b, t] += tap_D * x_BTD[b, t - j]
    return out


@pytest.mark.parametrize("J", [1, 3, 4])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_it_is_the_sum_over_the_last_tokens_of_the_document(J, T):
    rng = np.random.default_rng(J + T)
    x_BTD, taps_JD = rng.normal(size=(2, T, 3)), rng.normal(size=(J, 3))
    segments_BT = np.sort(rng.integers(1, 4, (2, T)), axis=1)
    segments_BT[1, T // 2 :] = 0
    for segments in (segments_BT, np.ones_like(segments_BT)):
        want = written_out(x_BTD, taps_JD, segments)
        np.testing.assert_allclose(short_conv(*map(jnp.float32, (x_BTD, taps_JD)), jnp.asarray(segments)), want, atol=1e-5)
    np.testing.assert_allclose(short_conv(*map(jnp.float32, (x_BTD, taps_JD))), want, atol=1e-5)


def test_gradients_are_those_of_the_sum():
    rng = np.random.default_rng(0)
    x_BTD, taps_JD, probe_BTD = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 7, 3), (4, 3), (2, 7, 3)))
    segments_BT = np.array([[1, 1, 1, 2, 2, 2, 0], [1] * 7])
    loss = lambda x, taps: jnp.sum(short_conv(x, taps, jnp.asarray(segments_BT)) * probe_BTD)
    dx, dtaps = jax.jit(jax.grad(loss, (0, 1)))(x_BTD, taps_JD)
    # It is linear in both, so that the gradient is the answer to each unit by itself.
    units = np.eye(taps_JD.size).reshape(taps_JD.size, *taps_JD.shape)
    want = [float((written_out(x_BTD, unit, segments_BT) * probe_BTD).sum()) for unit in units]
    np.testing.assert_allclose(dtaps.ravel(), want, rtol=1e-4, atol=1e-5)
    units = np.eye(x_BTD.size).reshape(x_BTD.size, *x_BTD.shape)
    want = [float((written_out(unit, taps_JD, segments_BT) * probe_BTD).sum()) for unit in units]
    np.testing.assert_allclose(dx.ravel(), want, rtol=1e-4, atol=1e-5)


def test_it_adds_up_in_float32_and_starts_as_nearly_nothing():
    x_BTD = jax.random.normal(jax.random.key(0), (2, 16, 32), jnp.bfloat16)
    conv = ShortConv.init(ModelConfig(width=32, conv_taps=4), key=jax.random.key(1))
    exact = short_conv(x_BTD.astype(jnp.float32), conv.taps_JD)
    rounded = short_conv(x_BTD, conv.taps_JD)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))
    np.testing.assert_allclose(exact, x_BTD.astype(jnp.float32), atol=0.4)
    assert float(jnp.std(exact - x_BTD.astype(jnp.float32))) < 0.06
