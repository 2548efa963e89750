"""Products in float8: of rounded values and gradients, with one scale an array; the same on every mesh."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small
from bigram import BigramConfig

from nash_mhc.config.schema import ConfigError, RunConfig, TrainConfig
from nash_mhc.kits.quantize.settings import QuantizeConfig
from nash_mhc.ops import float8

EQUATIONS = {
    "btd,dnh->btnh": ((2, 5, 8), (8, 3, 4)),
    "btnh,nhd->btd": ((2, 5, 3, 4), (3, 4, 8)),
    "btf,fd->btd": ((2, 5, 6), (6, 4)),
}


def by_hand(x, kind):
    """In float64: the scale is the next power of two at which the largest number is within the range."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(kind).max)))
    return (x / scale).astype(kind).astype(np.float64) * scale


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_and_gradients_are_those_of_rounded_numbers(equation):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape) * size for shape, size in zip(EQUATIONS[equation], (3e-3, 40.0), strict=True))
    dy = rng.normal(size=np.einsum(equation, x, w).shape) * 1e-9

    @jax.jit
    def both(x, w, dy, rounded_x, rounded_w, rounded_dy):
        """(a product, its gradients, those of a product in float32 of what was rounded by hand)"""
        y, back = jax.vjp(lambda x, w: float8.einsum(equation, x, w), x, w)
        _, plain_back = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), rounded_x, rounded_w)
        return y, back(dy), plain_back(rounded_dy)

    rounded_x, rounded_w = (by_hand(a.astype(np.float32).astype(np.float64), ml_dtypes.float8_e4m3fn) for a in (x, w))
    rounded_dy = by_hand(dy.astype(np.float32).astype(np.float64), ml_dtypes.float8_e5m2)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    y, gradients, plain = both(*(a.astype(np.float32) for a in (x, w, dy, rounded_x, rounded_w, rounded_dy)))
    close(y, np.einsum(equation, rounded_x, rounded_w))
    jax.tree.map(close, gradients, plain)
    # Rounded indeed, and not by much: 3 bits after the leading one.
    error = np.abs(np.asarray(y) - np.einsum(equation, x, w)).max() / np.abs(y).max()
    assert 1e-4 < error < 2**-4


def test_the_products_are_of_float8_numbers_themselves():
    """A GPU has units for these alone."""
    x, w = jnp.ones((2, 5, 8), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
    both = lambda x, w: jax.vjp(lambda x, w: float8.einsum("btd,df->btf", x, w), x, w)[1](jnp.ones((2, 5, 4), jnp.bfloat16))
    products = re.findall(r"dot_general.*: \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\)", jax.jit(both).lower(x, w).as_text())
    assert set(products) == {("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_scales_are_powers_of_two_and_nothing_overflows(kind, dtype):
    rounded = jax.jit(lambda x: (float8.scale_of(x, kind), float8.rounded(x, kind).array))
    for most in (1e-20, 1e-9, 0.3, 447.9, 448.0, 449.0, 3e4, 1e20):
        x = np.array([most, -most / 3, 0.0]).astype(dtype)
        scale, near = rounded(x)
        assert np.log2(float(scale)) == round(np.log2(float(scale)))
        assert float(jnp.finfo(kind).max) / 4 < float(x[0]) / float(scale) <= float(jnp.finfo(kind).max)
        np.testing.assert_allclose(np.asarray(near, np.float64), x.astype(np.float64), rtol=2**-3)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    zeros, ones = np.zeros((2, 3), np.float32), np.ones((3, 2), np.float32)
    product = jax.jit(lambda x: (float8.einsum("ij,jk->ik", x, ones), float8.rounded(x, jnp.float8_e4m3fn).array))
    assert all((np.asarray(found, np.float32) == 0).all() for found in product(zeros))
    for bad in (np.inf, np.nan):
        spoilt = zeros.copy()
        spoilt[0, 0] = bad
        assert not np.isfinite(product(spoilt)[0][0]).any()


@pytest.mark.long
def test_a_run_with_it_is_the_same_on_a_mesh_and_with_remat_and_not_that_without():
    cfg = small.config(train__matmul_dtype="float8")
    batches = [small.random_rows(cfg, seed) for seed in range(2)]
    run = small.train(cfg, batches)
    # A sum in another order may round to the next float8: the runs are near each other, not equal to the last bits.
    near = lambda other, within: np.testing.assert_allclose(losses(other), losses(run), rtol=within)
    losses = lambda trained: np.array([float(m["loss"]) for m in trained[1]])
    with_remat = small.config(train__matmul_dtype="float8", train__remat="dots")
    near(small.train(small.mesh_config(with_remat, 2, 2, 2), batches), 1e-3)
    plain = losses(small.train(small.config(), batches))
    assert not np.array_equal(losses(run), plain)
    np.testing.assert_allclose(losses(run), plain, rtol=0.02)


def test_what_it_cannot_go_with_is_said():
    train = TrainConfig(matmul_dtype="float8")
    with pytest.raises(ConfigError, match="only --model-kind nash-mhc"):
        RunConfig(model=BigramConfig(), train=train)
    with pytest.raises(ConfigError, match="--matmul-dtype float8: --quantize"):
        RunConfig(train=train, of_kits=(QuantizeConfig(weights="4/8,4/8"),))
