"""RMS normalisation, alone and with the rotation: values and gradients against the plain forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import long

from nash_mhc.ops import norm
from nash_mhc.ops.norm import norm_and_rope_copies, rms_norm, rms_norm_reference
from nash_mhc.ops.rope import Rotation, rope

B, T, N, H = 2, 5, 3, 16
TURN = Rotation(100.0, tuple(1 / (1 + i) for i in range(H // 2)), 1.25)


def drawn(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


inverse_rms = jax.jit(lambda x: norm._inverse_rms(x, 1e-6))


def inputs(dtype):
    x, weight = drawn(0, *[(B, T, N, H)] * 2, dtype=dtype)
    (scale,) = drawn(1, (H,), dtype=np.promote_types(dtype, np.float32))
    positions = jnp.asarray(np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]], np.int32))
    return x, scale, positions, weight


def pairs(positions):
    return {
        "norm": (lambda x, s: rms_norm(x, s, 1e-6), lambda x, s: rms_norm_reference(x, s, 1e-6)),
        "turned": (
            lambda x, s: norm_and_rope_copies(x, s, positions, 1e-6, TURN, 1)[0],
            lambda x, s: rope(rms_norm_reference(x, s, 1e-6), positions, TURN),
        ),
        "copied": (
            lambda x, s: sum((i + 1) * a for i, a in enumerate(norm_and_rope_copies(x, s, positions, 1e-6, TURN, 3))),
            lambda x, s: 6 * rope(rms_norm_reference(x, s, 1e-6), positions, TURN),
        ),
    }


@pytest.mark.parametrize("name", ["norm", "turned", "copied"])
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
    want = jax.jit(plain)(np.asarray(x, np.float32), scale)
    np.testing.assert_allclose(np.asarray(jax.jit(fast)(x, scale), np.float32), want, rtol=2**-8, atol=1e-6)


def test_zeros_have_a_finite_gradient():
    x, scale, positions, _ = inputs(jnp.float32)
    total = lambda x: jnp.sum(norm_and_rope_copies(x, scale, positions, 1e-6, TURN, 1)[0])
    grad = jax.jit(jax.grad(total))(np.zeros(x.shape, np.float32))
    assert np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("heads", "dtype"), [(16, jnp.float32), (6, jnp.bfloat16), *long((6, jnp.float32), (16, jnp.bfloat16))]
)
def test_the_kernels_equal_the_plain_form(heads, dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles. Some heads of a token are in another tile."""
    x, *douts = drawn(1, *[(2, 1024, heads, H)] * 3, dtype=dtype)
    (scale,), positions = drawn(2, (H,)), jnp.asarray(np.random.default_rng(3).integers(0, 100, (2, 1024), np.int32))
    assert norm._fits_norm_rope(x.shape)
    within = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    given = x, scale, positions, inverse_rms(x)
    for in_xla, in_kernel, args in [
        (norm._norm_rope_in_xla, norm._norm_rope_in_kernel, given),
        (norm._norm_rope_backward_in_xla, norm._norm_rope_backward_in_kernel, (*given, *douts)),
    ]:
        want = jax.jit(functools.partial(in_xla, TURN))(*args)
        got = jax.jit(functools.partial(in_kernel, 1e-6, TURN, interpret=True))(*args)
        same = lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2 * within, atol=within
        )
        jax.tree.map(same, got, want)


@pytest.mark.parametrize(
    ("width", "dtype"), [(640, jnp.float32), (2048, jnp.bfloat16), *long((2048, jnp.float32), (640, jnp.bfloat16))]
)
def test_the_kernels_of_the_norm_alone_equal_the_plain_form(width, dtype):
    """In Pallas's interpreter, a token whole and in chunks."""
    x, dout = drawn(4, *[(2, 32, width)] * 2, dtype=dtype)
    given = x, *drawn(5, (width,)), inverse_rms(x)
    assert norm._fits_norm(x)
    within = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    for in_xla, in_kernel, args in [
        (norm._norm_in_xla, norm._norm_in_kernel, given),
        (norm._norm_backward_in_xla, norm._norm_backward_in_kernel, (*given, dout)),
    ]:
        want, got = jax.jit(in_xla)(*args), jax.jit(functools.partial(in_kernel, 1e-6, interpret=True))(*args)
        same = lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2 * within, atol=within
        )
        jax.tree.map(same, got, want)
