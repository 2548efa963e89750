"""What a step reports of its architecture, layer by layer,
and the entropy of the scales' weights as a part of the loss."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.model.captures import game_report, recording, summary
from nash_mhc.model.mixers.attention import AttentionLayout
from nash_mhc.model.mixers.multiscale import Multiscale
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.train.callbacks import Interval

CFG = small.nash_config()
L, C, R = CFG.model.layers, CFG.model.scales, CFG.model.streams
SHAPES = {
    "scale_weight": (L, C), "scale_entropy": (L,), "nash_residual": (L,), "res_deviation": (L,),
    "gain_forward": (L,), "gain_backward": (L,), "stream_rms": (L, R), "scales_unused": (L,),
    "res": (L, CFG.model.mixings, R, R),
}  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    return small.random_rows(CFG, 0)


def health_of(metrics):
    return {k.removeprefix("health/"): np.asarray(v) for k, v in metrics.items() if k.startswith("health/")}


def test_a_step_reports_every_layer_within_its_range(batch):
    _, history, _ = small.train(CFG, [batch, small.random_rows(CFG, 1)])
    for metrics in history:
        found = health_of(metrics)
        assert {k: v.shape for k, v in found.items()} == SHAPES
        np.testing.assert_allclose(found["scale_weight"].sum(axis=1), 1.0, atol=1e-5)
        assert found["scale_weight"].min() > 0.0
        assert found["scale_entropy"].min() > 0.0 and found["scale_entropy"].max() < 1.0
        assert found["nash_residual"].min() > 0.0 and found["nash_residual"].max() <= 2.0
        assert found["res_deviation"].max() < 1e-5
        for gain in ("gain_forward", "gain_backward"):
            np.testing.assert_allclose(found[gain], 1.0, atol=1e-4)
        assert found["stream_rms"].min() > 0.0
        # A mean of doubly stochastic matrices is one, and at the start each stream keeps to itself.
        for axis in (2, 3):
            np.testing.assert_allclose(found["res"].sum(axis=axis), 1.0, atol=1e-5)
        assert found["res"].min() >= 0.0
        assert found["res"].diagonal(axis1=2, axis2=3).min() > 0.9


def test_a_plain_model_has_nothing_to_report():
    _, history, _ = small.train(small.config(), [small.random_rows(small.config(), 0)])
    assert health_of(history[0]) == {}
    assert history[0]["loss/sparsity"] == 0.0


def test_only_real_tokens_count():
    """One token plays scale 0 alone, one plays both alike, and a third, which would tip the balance, is padding."""
    w_CBTN = jnp.array([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])[:, None, :, None]
    residual_BTN = jnp.array([[[0.1], [0.3], [2.0]]])
    game = jax.tree.map(lambda a: a[None], jax.jit(game_report)(tuple(w_CBTN), residual_BTN, jnp.array([[True, True, False]])))
    found = jax.jit(summary)({"game": game})
    np.testing.assert_allclose(found["scale_weight"], [[0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(found["scale_entropy"], [0.5], rtol=1e-6)
    np.testing.assert_allclose(found["nash_residual"], [0.2], rtol=1e-6)
    assert found["scales_unused"].tolist() == [0.0]


def test_a_scale_without_weight_is_counted_for_every_head_that_does_without_it():
    w_CBTN = jnp.array([[[1.0, 0.5], [0.9999, 1.0]], [[0.0, 0.5], [0.0001, 0.0]]])[:, None]  # of two heads, the first one never
    game = jax.jit(game_report)(tuple(w_CBTN), jnp.zeros((1, 2, 2)), jnp.ones((1, 2), bool))
    found = jax.jit(summary)({"game": jax.tree.map(lambda a: a[None], game)})
    assert found["scales_unused"].tolist() == [1.0]


def test_a_row_counts_the_scales_that_no_step_of_its_interval_has_used():
    interval = Interval()
    for unused in ([2.0, 0.0], [1.0, 3.0], [5.0, 1.0]):
        last = {"empty": 0.0, "tokens": 8.0, "health/scales_unused": np.array(unused)}
        interval.add(last, {})
    interval = Interval(json.loads(json.dumps(interval.to_json())))  # as it is saved
    assert interval.means(last)["health/scales_unused"] == [1.0, 0.0]


def test_the_run_says_when_more_scales_go_without_weight(messages):
    reporter = Reporter(9, None)
    row = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "step_ms": 1.0, "tokens_per_s": 1.0, "mfu": 0.0, "tokens_seen": 1}
    for step, unused in enumerate([[0.0, 0.0], [0.0, 2.0], [0.0, 2.0], [1.0, 2.0]], 1):
        reporter.row(step, row | {"health/scales_unused": unused})
    said = [line for line in messages if "had zero weight" in line]
    assert said == [
        "step 2: 2 head scales had zero weight since the last row, in layers 1 (health/scales_unused)",
        "step 4: 3 head scales had zero weight since the last row, in layers 0, 1 (health/scales_unused)",
    ]


def test_scales_without_a_finished_block_have_no_weight_at_all():
    """Through the whole mixer: by positions that never come to the end of a block of 4, of 2, and that do."""
    cfg = small.NASH
    mixer = jax.tree.map(lambda a: jnp.asarray(a[0]), small.generic_model(cfg).layers.attention)
    assert isinstance(mixer, Multiscale)
    x_BTD = np.random.default_rng(1).normal(size=(3, 8, cfg.width)).astype(np.float32)
    positions_BT = jnp.arange(8)[None] % jnp.array([1, 3, 8])[:, None]

    def forward(mixer, x_BTD):
        with recording({"game"}) as captured:
            mixer(x_BTD, AttentionLayout(None, positions_BT), window=cfg.window, kernel="xla")
        return captured["game"]

    game = jax.jit(forward)(mixer, x_BTD)
    weight_BCN = np.asarray(game.weight_BCN)
    np.testing.assert_allclose(weight_BCN.sum(axis=1), 8.0, rtol=1e-6)
    assert (weight_BCN > 0.0).any(axis=2).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert (weight_BCN >= 0.0).all()
    assert (np.asarray(game.residual_BN)[0] == 0.0).all()  # a scale alone has nothing to settle


def gradients(state, metrics, cfg):
    """The step's raw gradients, from Adam's first moments after it: unclipped again."""
    factor = max(1.0, metrics["grad_norm"] / cfg.optim.max_grad_norm) / (1 - cfg.optim.b1)
    return jax.tree.map(lambda m: factor * m, state.opt_state[1].mu)


def test_the_sparsity_weight_adds_the_entropy_and_its_gradient(batch):
    weight = 0.25
    cfg = small.nash_config(optim__sparsity=weight)
    (plain_state, [plain], _), (state, [sparse], _) = small.train(CFG, [batch]), small.train(cfg, [batch])
    share = np.mean(sparse["health/scale_entropy"])
    assert sparse["loss/sparsity"] == pytest.approx(weight * share, rel=1e-5)
    assert sparse["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert sparse["objective"] == pytest.approx(plain["objective"] + weight * share, rel=1e-6)
    # What the gradients have more than before is the slope of the entropy: measured by walking both ways along it.
    extra = jax.tree.map(np.subtract, gradients(state, sparse, cfg), gradients(plain_state, plain, CFG))
    slope = math.sqrt(sum(float((e**2).sum()) for e in jax.tree.leaves(extra))) / weight
    assert slope > 1e-3
    mesh, step = small._compiled(CFG)

    def entropy(distance):
        start = small.start(CFG, mesh)
        moved = jax.tree.map(lambda p, e: p + distance * e / (weight * slope), start.model, extra)
        _, metrics = step(dataclasses.replace(start, model=moved), small.to_device(batch, mesh))
        return float(np.mean(metrics["health/scale_entropy"]))

    reach = 0.02
    assert (entropy(reach) - entropy(-reach)) / (2 * reach) == pytest.approx(slope, rel=2e-2)
