"""NorMuon: orthogonal updates of matrices, a rate for each group, meshes, bad steps, resuming."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nash_mhc.config.schema import ConfigError, OptimConfig, RunConfig, TrainConfig
from nash_mhc.optim import normuon
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.rounding import salt_of
from nash_mhc.optim.schedule import GROUPS, Hyperparameters, matrix_decay, momentum
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import HEAD, TABLE, param


class Net(eqx.Module):
    wide: jax.Array = param("embed", "ffn")
    tall: jax.Array = param("ffn", "embed")
    table: jax.Array = param("vocab", "embed", role=TABLE)
    head: jax.Array = param("vocab", "embed", role=HEAD)
    scale: jax.Array = param("vector")


SHAPES = {"wide": (8, 24), "tall": (24, 8), "table": (16, 8), "head": (16, 8), "scale": (8,)}


def net(seed: int, scale: float = 1.0) -> Net:
    rng = np.random.default_rng(seed)
    return Net(**{name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()})


def config(**optim: Any) -> RunConfig:
    settings = {"optimizer": "normuon", "learning_rate": 0.01, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0}
    return RunConfig(optim=OptimConfig(**(settings | optim)), train=TrainConfig(total_steps=100))


def update(cfg: RunConfig, params: Net, sums: Net, state: Any = None, good: bool = True) -> Any:
    h, training = Hyperparameters.of(cfg.optim, cfg.train), Training.of(cfg)
    state = training.init_optimizer(h, params) if state is None else state
    gradients = Gradients(sums, jnp.ones(()), optax.tree.norm(sums))
    return training.update(h, params, gradients, state, jnp.asarray(good), salt_of(0))


def polar_factor(x: np.ndarray) -> np.ndarray:
    u, _, v = np.linalg.svd(x, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_an_orthogonal_update_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, *shape)), jnp.float32)
    got = np.asarray(normuon.orthogonal(x, jnp.float32))
    for one, matrix in zip(np.asarray(x), got, strict=True):
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.min() > 0.7
        assert values.max() < 1.3
        # Columns were brought to the same norm first; the result is close to that matrix's polar factor.
        expected = polar_factor(one / np.linalg.norm(one, axis=0))
        assert np.linalg.norm(matrix - expected) < 0.2 * np.linalg.norm(expected)


def test_the_update_does_not_depend_on_the_size_of_the_gradient() -> None:
    params, cfg = net(0), config(eps=1e-30)
    small, large = (update(cfg, params, net(1, scale)).params for scale in (1e-4, 1e4))
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["wide", "tall"])
def test_neurons_with_steady_updates_move_alike(name: str) -> None:
    """One neuron's gradient is 100 times smaller; each neuron of the longer side moves by the same norm."""
    params, cfg = net(0), config()
    sums = net(1)
    axis = 1 if name == "wide" else 0
    factors = np.ones(24)
    factors[0] = 0.01
    sums = eqx.tree_at(lambda n: getattr(n, name), sums, getattr(sums, name) * (factors[None] if axis else factors[:, None]))
    moved = getattr(update(cfg, params, sums).params, name) - getattr(params, name)
    norms = np.linalg.norm(moved, axis=1 - axis)
    np.testing.assert_allclose(norms, norms.mean(), rtol=1e-3)
    rate = 0.01 * cfg.optim.group_rates["matrix"]
    assert np.linalg.norm(moved) == pytest.approx(rate * 8**0.5, rel=1e-4)


@pytest.mark.parametrize(("group", "name"), [("matrix", "wide"), ("embedding", "table"), ("head", "head"), ("vector", "scale")])
def test_each_group_has_its_own_rate(group: str, name: str) -> None:
    params, sums = net(0), net(1)
    before, factor = config(), config().optim.group_rates[group]
    after = config(rate_factors=f"{group}={2 * factor}")
    moved = [jax.tree.map(jnp.subtract, update(cfg, params, sums).params, params) for cfg in (before, after)]
    for each in SHAPES:
        ratio = 2.0 if each == name or (group == "matrix" and each == "tall") else 1.0
        np.testing.assert_allclose(getattr(moved[1], each), ratio * getattr(moved[0], each), rtol=1e-4, atol=1e-6)


def test_decay_shrinks_only_weights_whose_update_agrees() -> None:
    params, sums = net(0), net(1)
    plain, decayed = (update(config(weight_decay=wd), params, sums).params for wd in (0.0, 0.1))
    change, extra = np.asarray(plain.wide - params.wide), np.asarray(decayed.wide - plain.wide)
    agrees = change * np.asarray(params.wide) <= 0
    rate = 0.01 * config().optim.group_rates["matrix"]
    np.testing.assert_allclose(extra[agrees], -rate * 0.28 * np.asarray(params.wide)[agrees], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(extra[~agrees], 0, atol=1e-7)
    np.testing.assert_array_equal(plain.table, decayed.table)


def test_decay_follows_the_horizon_and_momentum_follows_the_schedule() -> None:
    optim = OptimConfig(optimizer="normuon", learning_rate=6e-3, schedule="wsd", decay_fraction=0.65)
    h = lambda steps: Hyperparameters.of(optim, TrainConfig(total_steps=steps))
    short, long = h(700), h(40_000)
    assert float(matrix_decay(short, jnp.int32(0))) == pytest.approx(0.28)
    assert float(matrix_decay(long, jnp.int32(0))) * 6e-3 * 9.5 * 40_000 == pytest.approx(13.9, rel=1e-3)
    assert float(matrix_decay(long, jnp.int32(40_000))) == pytest.approx(0, abs=1e-7)
    assert [float(momentum(long, jnp.int32(n))) for n in (0, 400, 14_000, 40_000)] == pytest.approx([0.85, 0.97, 0.97, 0.90])


def test_a_bad_step_changes_nothing() -> None:
    cfg, params = config(), net(0)
    first = update(cfg, params, net(1))
    bad = jax.tree.map(lambda g: g * jnp.nan, net(2))
    after = update(cfg, first.params, bad, first.opt_state, good=False)
    for a, b in zip(jax.tree.leaves(first[:2]), jax.tree.leaves(after[:2]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_moments_store_large_parameters_in_half() -> None:
    cfg = dataclasses.replace(config(), precision=dataclasses.replace(config().precision, moments_dtype="bfloat16"))
    state = update(cfg, net(0), net(1)).opt_state
    assert {a.dtype for a in (state.mu.wide, state.mu.tall, state.mu.table, state.nu.table)} == {jnp.dtype("bfloat16")}
    assert state.nu.wide.shape == (1, 24)
    assert state.nu.tall.shape == (24, 1)
    assert {a.dtype for a in (state.nu.wide, state.mu.scale)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("text", ["matrix", "matrix=0", "matrix=x", "matrices=1"])
def test_a_damaged_factor_is_an_error_with_the_groups(text: str) -> None:
    with pytest.raises(ConfigError, match=f"rate_factors.*{text}.*{GROUPS[0]}.*{GROUPS[-1]}"):
        config(rate_factors=text)


def test_factors_need_normuon() -> None:
    with pytest.raises(ConfigError, match=r"--rate-factors.*normuon.*adamw"):
        config(rate_factors="matrix=2", optimizer="adamw")
