"""Quantization of arrays: squared error, gradients, packed codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.kits.quantize import ops as q

BITS = (2, 3, 4)


# Jitted: dozens of single operations would each be compiled.
snap, spread_out, product_scales, table_levels = (
    jax.jit(q.quantized), jax.jit(q.spread_groups, static_argnums=1), jax.jit(q.product_scales), jax.jit(q.table_levels),
)  # fmt: skip


def gaussian(inputs=256, outputs=64, seed=0):
    return np.random.default_rng(seed).normal(size=(inputs, outputs)).astype(np.float32)


def relative_error(w, snapped):
    w, snapped = np.asarray(w, np.float64), np.asarray(snapped, np.float64)
    return np.sum((snapped - w) ** 2) / np.sum(w**2)


def uniform_steps(bits):
    """Parameters of a table whose levels are the uniform ones; the first step is half as long as the others."""
    return np.log(np.where(np.arange(2 ** (bits - 1)) == 0, 0.5, 1.0).astype(np.float32))


def by_groups(w, bits, group=32):
    levels = jnp.asarray(q.uniform_levels(bits))
    s = spread_out(q.fit_group_scales(w, group, levels), w.shape[0])
    return snap(w, s, levels), s, levels


@pytest.mark.parametrize("bits, most, of_largest", [(2, 0.125, 0.6), (3, 0.04, 0.8), (4, 0.012, 1.0)])
def test_fitted_scales_have_a_small_error_on_gaussian_weights(bits, most, of_largest):
    w = gaussian()
    snapped, _, levels = by_groups(w, bits)
    assert relative_error(w, snapped) <= most
    largest = spread_out(np.max(np.abs(w.reshape(-1, 32, w.shape[1])), axis=1), w.shape[0])
    assert relative_error(w, snapped) < of_largest * relative_error(w, snap(w, largest, levels))


def test_no_other_scale_of_a_group_is_much_better():
    w = gaussian(32, 16)
    snapped, s, levels = by_groups(w, 2)
    for factor in np.linspace(0.5, 1.5, 41):
        others = np.sum((np.asarray(snap(w, np.asarray(s) * np.float32(factor), levels)) - w) ** 2, axis=0)
        assert (np.sum((np.asarray(snapped) - w) ** 2, axis=0) <= 1.02 * others + 1e-9).all(), factor


@pytest.mark.parametrize("bits", BITS)
def test_quantizing_twice_changes_nothing(bits):
    w = gaussian(seed=1)
    snapped, s, levels = by_groups(w, bits)
    np.testing.assert_array_equal(snap(snapped, s, levels), snapped)
    scales = product_scales(*q.fit_product_scales(w, 32, 4, levels))
    once = snap(w, scales, levels)
    np.testing.assert_array_equal(snap(once, scales, levels), once)


def test_a_product_of_high_rank_is_at_least_as_good_as_groups():
    """The error falls with the rank; at rank one it is above that of groups."""
    w = gaussian() * (1 + np.arange(64, dtype=np.float32))[None] / 32  # outputs of different sizes, as in a trained model
    levels = jnp.asarray(q.uniform_levels(2))
    error = {
        rank: relative_error(w, snap(w, product_scales(*q.fit_product_scales(w, 32, rank, levels)), levels))
        for rank in (1, 8, 32)
    }
    assert error[32] < error[8] < error[1] < 0.13
    assert error[32] < relative_error(w, by_groups(w, 2)[0])


def test_columns_of_zeros_are_fitted():
    w = gaussian(64, 8)
    w[:, 0] = w[:32, 1] = 0
    levels = jnp.asarray(q.uniform_levels(2))
    for s in (by_groups(w, 2)[1], product_scales(*q.fit_product_scales(w, 32, 4, levels))):
        snapped = np.asarray(snap(w, s, levels))
        assert np.isfinite(snapped).all() and relative_error(w, snapped) < 0.2
        assert np.abs(snapped[:, 0]).max() < 1e-3


@pytest.mark.parametrize("trained", [False, True], ids=["uniform", "table"])
@pytest.mark.parametrize("bits", BITS)
def test_gradients_are_the_finite_differences_of_the_relaxed_form(bits, trained):
    with jax.enable_x64(True):
        rng = np.random.default_rng(bits)
        w = rng.normal(size=(16, 6)) * 1.5
        s = rng.uniform(0.3, 1.2, size=(1, 6))  # so small that some weights are outside of the cells
        steps = uniform_steps(bits) + (rng.normal(size=2 ** (bits - 1)) * 0.3 if trained else 0)
        levels = np.asarray(table_levels(np.asarray(steps, np.float64)))
        out = rng.normal(size=w.shape)
        of = lambda w, s, levels: jnp.sum(out * q.quantized(w, s, levels))
        d_w, d_s, d_levels = jax.device_get(jax.jit(jax.grad(of, argnums=(0, 1, 2)))(w, s, levels))
        codes = jax.jit(q.codes_of)(w, s, levels)
        values = np.asarray(jax.jit(q.levels_at)(codes, levels))
        low, high = 1.5 * levels[0] - 0.5 * levels[1], 1.5 * levels[-1] - 0.5 * levels[-2]
        error = values - np.clip(w / s, low, high)
        still = jax.jit(lambda w, s: jnp.sum(out * s * (jnp.clip(w / s, low, high) + error)))
        at_levels = jax.jit(lambda levels: jnp.sum(out * q.dequantized(codes, jnp.asarray(s), levels)))
        h = 1e-6

        def slope(of, x, place):
            moved = [x.copy(), x.copy()]
            moved[0][place] += h
            moved[1][place] -= h
            return float(of(moved[0]) - of(moved[1])) / (2 * h)

        for place in [(0, 0), (3, 2), (7, 5), (15, 1)]:
            assert d_w[place] == pytest.approx(slope(lambda w: still(w, s), w, place), abs=1e-6)
        for column in range(6):
            assert d_s[0, column] == pytest.approx(slope(lambda s: still(w, s), s, (0, column)), abs=1e-5)
        for number in range(len(levels)):  # a level: the codes stay constant
            assert d_levels[number] == pytest.approx(slope(at_levels, levels, number), abs=1e-5)
        assert (d_w == 0).any() and (d_w != 0).any()  # weights inside and outside of the cells


def test_a_table_is_symmetric_and_ascending_and_can_be_uniform():
    for bits in BITS:
        np.testing.assert_allclose(table_levels(uniform_steps(bits)), q.uniform_levels(bits), atol=1e-6)
    levels = np.asarray(table_levels(np.random.default_rng(3).normal(size=8).astype(np.float32) * 3))
    assert (np.diff(levels) > 0).all() and float(levels[-1]) == pytest.approx(1)
    np.testing.assert_array_equal(levels, -levels[::-1])


@pytest.mark.parametrize("inputs", [1, 7, 32, 45])
@pytest.mark.parametrize("bits", BITS)
def test_packed_codes_are_unpacked(bits, inputs):
    codes = np.random.default_rng(0).integers(0, 2**bits, size=(5, inputs))
    held = q.packed(codes, bits)
    assert held.dtype == np.uint8 and held.shape == (5, -(-inputs * bits // 8))
    np.testing.assert_array_equal(q.unpacked(held, bits, inputs), codes)
    assert held[0, 0] & (2**bits - 1) == codes[0, 0]  # the first code is in the lowest bits


@pytest.mark.parametrize("bits", BITS)
def test_the_initial_levels_of_a_table_are_the_means_of_their_cells(bits):
    """On heavy-tailed weights, for which equal steps are a bad choice."""
    w = np.random.default_rng(0).laplace(size=(256, 64)).astype(np.float32)
    largest = np.max(np.abs(w))
    levels = table_levels(q.nearest_steps(w / largest, bits))
    spread = lambda levels: relative_error(w, snap(w, np.full_like(w, largest), levels))
    half, size = np.asarray(levels)[2 ** (bits - 1) :], np.abs(w / largest)

    def off(scale):
        """Return how far the levels, times a scale, are from the means of their cells."""
        codes = np.sum(size[..., None] >= scale * (half[:-1] + half[1:]) / 2, axis=-1)
        means = [size[codes == i].mean() if (codes == i).any() else np.inf for i in range(len(half))]
        return np.max(np.abs(np.array(means) / (scale * half) - 1))

    assert min(off(scale) for scale in np.linspace(0.1, 1, 200)) < 0.05
    fitted = spread_out(q.fit_group_scales(w, 32, levels), w.shape[0])
    uniform = by_groups(w, bits)[0]
    assert relative_error(w, snap(w, fitted, levels)) < 1.1 * relative_error(w, uniform)
    assert spread(levels) < spread(jnp.asarray(q.uniform_levels(bits)))
