"""The short convolution: the sum it is said to be, within documents, with the gradients of that sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import long

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.parts import ShortConv
from nash_mhc.ops import conv
from nash_mhc.ops.conv import short_conv

convolved = jax.jit(short_conv)


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
        got = convolved(x_BTD.astype(np.float32), taps_JD.astype(np.float32), segments)
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(convolved(x_BTD.astype(np.float32), taps_JD.astype(np.float32)), want, atol=1e-5)


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
    x_BTD = np.random.default_rng(0).normal(size=(2, 16, 32)).astype(jnp.bfloat16)
    conv = jax.jit(lambda: ShortConv.init(ModelConfig(width=32, conv_taps=4), key=jax.random.key(1)))()
    exact = np.asarray(convolved(x_BTD.astype(np.float32), conv.taps_JD))
    rounded = convolved(x_BTD, conv.taps_JD)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))
    np.testing.assert_allclose(exact, x_BTD.astype(np.float32), atol=0.4)
    assert np.std(exact - x_BTD.astype(np.float32)) < 0.06


@pytest.mark.parametrize(
    ("segmented", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16), *long((False, jnp.float32), (True, jnp.bfloat16))]
)
def test_the_kernels_equal_the_plain_form(segmented, dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles. Rows and documents end within a tile's reach."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(2, 64, 96)).astype(dtype) for _ in range(2))
    taps, segments = rng.normal(size=(4, 96)).astype(np.float32), np.sort(rng.integers(1, 30, (2, 64), np.int32), axis=1)
    segments[1, 50:] = 0
    segments = segments if segmented else None
    assert conv.fits_kernel(x.shape)
    within = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    for in_xla, in_kernel, args in [
        (conv.short_conv_reference, conv._conv_in_kernel, (x, taps, segments)),
        (conv._backward_in_xla, conv._backward_in_kernel, (x, taps, segments, dy)),
    ]:
        want, got = jax.jit(in_xla)(*args), jax.jit(functools.partial(in_kernel, interpret=True))(*args)
        same = lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2 * within, atol=within
        )
        jax.tree.map(same, got, want)
