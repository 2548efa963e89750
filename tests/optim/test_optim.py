"""AdamW against a reference implementation, and the learning rate at the corners of its schedules."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nash_mhc.config.schema import OptimConfig, RunConfig, TrainConfig
from nash_mhc.optim import schedule as module
from nash_mhc.optim import schedule as roles
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import make_optimizer, updated_average
from nash_mhc.optim.rounding import salt_of
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import VECTOR, param

PEAK = 0.5


def learning_rate(cfg: RunConfig, count: Any) -> Any:
    return module.learning_rate(Hyperparameters.of(cfg.optim, cfg.train), count)


def config(total: int = 100, **optim: Any) -> RunConfig:
    values = {"learning_rate": PEAK, "warmup_steps": 10, "min_lr_ratio": 0.1} | optim
    return RunConfig(optim=OptimConfig(**values), train=TrainConfig(total_steps=total))


def rates(cfg: RunConfig) -> np.ndarray:
    """Return the learning rates of updates 1 to total."""
    return np.array([float(learning_rate(cfg, count)) for count in range(cfg.train.total_steps)])


# --- schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    got = rates(config(schedule=schedule))
    np.testing.assert_allclose(got[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-6)
    assert got.max() == pytest.approx(PEAK)
    assert got[0] > 0  # the first update has an effect


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1 * PEAK), ("wsd", 0.1 * PEAK), ("constant", PEAK)])
def test_last_step(schedule: str, last: float) -> None:
    cfg = config(schedule=schedule)
    assert rates(cfg)[-1] == pytest.approx(last, rel=1e-5)
    assert float(learning_rate(cfg, 1000)) == pytest.approx(last, rel=1e-5)  # and later


def test_cosine_is_half_way_down_in_the_middle_and_never_rises() -> None:
    got = rates(config(total=110))
    assert got[59] == pytest.approx((PEAK + 0.1 * PEAK) / 2, rel=1e-5)  # 50 of the 100 steps after the warm-up
    assert (np.diff(got[9:]) < 0).all()
    expected = 0.05 + 0.45 * 0.5 * (1 + np.cos(np.pi * np.arange(101) / 100))
    np.testing.assert_allclose(got[9:], expected, rtol=1e-4)


def test_wsd_holds_the_peak_until_its_decay_starts() -> None:
    got = rates(config(schedule="wsd", decay_fraction=0.2))
    np.testing.assert_allclose(got[9:80], PEAK, rtol=1e-6)  # updates 10 to 80
    assert got[80] == pytest.approx(PEAK - 0.9 * PEAK / 20, rel=1e-5)
    np.testing.assert_allclose(np.diff(got[79:]), -0.9 * PEAK / 20, rtol=1e-4)


def test_wsd_never_decays_within_the_warm_up() -> None:
    got = rates(config(schedule="wsd", decay_fraction=1.0))
    np.testing.assert_allclose(got[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(np.diff(got[9:]), -0.9 * PEAK / 90, rtol=1e-4)


def test_constant_is_constant() -> None:
    np.testing.assert_allclose(rates(config(schedule="constant"))[9:], PEAK, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_is_at_the_height_of_the_schedule(schedule: str) -> None:
    got = rates(config(schedule=schedule, warmup_steps=0))
    assert got[0] == pytest.approx(PEAK, rel=1e-3)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_that_is_all_warm_up_ends_at_the_peak(schedule: str) -> None:
    got = rates(config(total=10, schedule=schedule))
    np.testing.assert_allclose(got, PEAK * np.arange(1, 11) / 10, rtol=1e-6)


def test_rate_is_the_same_traced() -> None:
    """With hyperparameters as arguments: one program for all."""
    traced = jax.jit(module.learning_rate)
    for cfg in (config(), config(schedule="wsd", total=70), config(schedule="constant", learning_rate=0.1)):
        for count in (0, 9, 10, 55, 99):
            got = float(traced(Hyperparameters.of(cfg.optim, cfg.train), jnp.int32(count)))
            assert got == pytest.approx(float(learning_rate(cfg, count)), rel=1e-6)
    assert traced._cache_size() == 1


# --- AdamW -----------------------------------------------------------------------------------------------------------


class Net(eqx.Module):
    matrix: jax.Array = param("embed", "ffn")
    bias: jax.Array = param("heads", "head_dim", role=VECTOR)
    scale: jax.Array = param("vector")


def make_net() -> Net:
    rng = np.random.default_rng(0)
    return Net(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4), (2, 2), (3,))))


def gradients(scale: float) -> list[Net]:
    rng = np.random.default_rng(1)
    draw = lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
    return [Net(draw((3, 4)), draw((2, 2)), draw((3,))) for _ in range(3)]


def by_hand(net: Net, grads: list[Net], cfg: RunConfig) -> dict[str, np.ndarray]:
    """AdamW (Loshchilov and Hutter) in float64, with decay of the matrix only and clipping by global norm."""
    o = cfg.optim
    names = ("matrix", "bias", "scale")
    p = {n: np.asarray(getattr(net, n), np.float64) for n in names}
    m, v = ({n: np.zeros_like(p[n]) for n in names} for _ in range(2))
    for t, grad in enumerate(grads, start=1):
        g = {n: np.asarray(getattr(grad, n), np.float64) for n in names}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        shrink = min(1.0, o.max_grad_norm / norm) if o.max_grad_norm else 1.0
        rate = o.learning_rate * t / o.warmup_steps
        for n in names:
            m[n] = o.b1 * m[n] + (1 - o.b1) * g[n] * shrink
            v[n] = o.b2 * v[n] + (1 - o.b2) * (g[n] * shrink) ** 2
            step = (m[n] / (1 - o.b1**t)) / (np.sqrt(v[n] / (1 - o.b2**t)) + o.eps)
            if n == "matrix":  # three wide: its rate is that of 640 channels times 640 / 3, its decay is not
                step = step * 640 / 3 + o.weight_decay * p[n]
            p[n] = p[n] - rate * step
    return p


@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["below the clip", "above the clip"])
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipped", "never clipped"])
def test_three_steps_equal_adamw_by_hand(scale: float, clip: float) -> None:
    # With a large epsilon, steps depend on the size of the gradient, and so on clipping.
    cfg = config(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-2, weight_decay=0.3, max_grad_norm=clip)
    net = make_net()
    expected = by_hand(net, gradients(scale), cfg)
    optimizer = make_optimizer(Hyperparameters.of(cfg.optim, cfg.train), net)

    @jax.jit
    def step(net: Net, state: Any, grad: Net) -> tuple[Net, Any]:
        updates, state = optimizer.update(grad, state, net)
        return optax.apply_updates(net, updates), state

    state = jax.jit(optimizer.init)(net)
    for grad in gradients(scale):
        net, state = step(net, state, grad)
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(net, name)), value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["below the clip", "above the clip"])
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipped", "never clipped"])
def test_in_one_go_it_is_what_the_parts_are_one_after_the_other(scale: float, clip: float) -> None:
    cfg = config(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-2, weight_decay=0.3, max_grad_norm=clip)
    h, net = Hyperparameters.of(cfg.optim, cfg.train), make_net()
    optimizer = make_optimizer(h, net)
    fast, state = Training.of(cfg), optimizer.init(net)
    step = jax.jit(lambda net, grad, state, good: fast.update(h, net, summed(grad), state, good, salt_of(0)))
    summed = lambda grad: Gradients(jax.tree.map(lambda g: 8 * g, grad), 1 / 8, optax.tree.norm(grad))  # of eight tokens
    ours = (net, state)
    for number, grad in enumerate(gradients(scale)):
        if number == 1:  # a bad step, which has no effect
            bad = jax.tree.map(lambda g: g * jnp.nan, grad)
            left = step(ours[0], bad, ours[1], jnp.asarray(False))
            for a, b in zip(*map(jax.tree.leaves, (ours, left[:2])), strict=True):
                np.testing.assert_array_equal(a, b)
        updates, state = optimizer.update(grad, state, net)
        net = optax.apply_updates(net, updates)
        new, kept, norm = step(ours[0], grad, ours[1], jnp.asarray(True))
        ours = (new, kept)
        assert float(norm) == pytest.approx(float(optax.tree.norm(updates)), rel=1e-5)
        assert jax.tree.structure(kept) == jax.tree.structure(state)
        for a, b in zip(*map(jax.tree.leaves, (ours, (net, state))), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_clipping_keeps_the_direction_and_the_ratio_between_arrays() -> None:
    # With b1 = b2 = 0 and a huge epsilon, the update is -rate * clipped / eps, which shows the clipped gradient.
    optim = {"b1": 0.0, "b2": 0.0, "eps": 1e6, "weight_decay": 0.0, "max_grad_norm": 2.0, "warmup_steps": 0}
    cfg = config(schedule="constant", **optim)
    net, grad = make_net(), gradients(10.0)[0]
    optimizer = make_optimizer(Hyperparameters.of(cfg.optim, cfg.train), net)
    updates, _ = optimizer.update(grad, optimizer.init(net), net)
    clipped = jax.tree.map(lambda u, role: -u * 1e6 / PEAK / role, updates, roles.rates(net))
    assert float(optax.tree.norm(clipped)) == pytest.approx(2.0, rel=1e-3)
    factor = 2.0 / float(optax.tree.norm(grad))
    for name in ("matrix", "bias", "scale"):
        np.testing.assert_allclose(getattr(clipped, name), factor * getattr(grad, name), rtol=1e-3)


def test_decay_alone_shrinks_matrices_and_nothing_else() -> None:
    cfg = config(schedule="constant", warmup_steps=0, weight_decay=0.3)
    net = make_net()
    optimizer = make_optimizer(Hyperparameters.of(cfg.optim, cfg.train), net)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, net), optimizer.init(net), net)
    np.testing.assert_allclose(updates.matrix, -PEAK * 0.3 * net.matrix, rtol=1e-6)
    assert not updates.bias.any()
    assert not updates.scale.any()


def test_moments_are_float32_whatever_the_gradient() -> None:
    cfg = config()
    net = make_net()
    optimizer = make_optimizer(Hyperparameters.of(cfg.optim, cfg.train), net)
    adam = optimizer.init(net)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves((adam.mu, adam.nu))} == {jnp.dtype("float32")}
    assert dataclasses.fields(adam.mu) == dataclasses.fields(net)


def test_the_average_begins_with_what_has_been_learned() -> None:
    """The average of few updates has forgotten the initial weights."""
    cfg = config(ema_decay=0.999)
    h = Hyperparameters.of(cfg.optim, cfg.train)
    start, learned = jnp.zeros(3), jnp.ones(3)
    ema = start
    for count in range(50):
        ema = updated_average(h, ema, learned, jnp.int32(count))
    assert float(ema[0]) > 0.999  # with 0.999 alone: 0.05
    late = updated_average(h, start, learned, jnp.int32(100_000))
    np.testing.assert_allclose(late, 0.001, rtol=1e-3)
