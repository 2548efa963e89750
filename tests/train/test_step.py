"""The train step: one mesh equals another, accumulated equals whole, remat equals none, and it compiles once."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from small import small_meter

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Batch, means
from nash_mhc.train import spikes
from nash_mhc.train.step import make_objective

# The first has every axis; test_meshes has 1x4x2, in a run.
MESHES = [(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.long) for shape in [(8, 1, 1), (1, 8, 1), (1, 1, 8)])]


@pytest.fixture(scope="module")
def batches():
    return [small.random_rows(small.config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def one_device(batches):
    return small.train(small.config(), batches)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_gives_the_same_run(shape, batches, one_device):
    small.assert_same_run(small.train(small.mesh_config(small.config(), *shape), batches), one_device)


def test_accumulation_4_of_batch_2_is_batch_8():
    """Gradients add up exactly; test_objectives checks the reports of the model's health."""
    rows = [small.random_rows(small.config(), seed) for seed in (2, 3)]
    # Uneven padding between microbatches: a mean of means would differ from the mean over tokens.
    for r in rows:
        r.weights[:, :2, 5:] = 0.0
    split = [Rows(*(a.reshape(4, 2, -1) for a in r)) for r in rows]
    parts = small.train(small.config(data__batch_size=2, train__grad_accum=4), split)
    small.assert_same_run(parts, small.train(small.config(), rows))


@pytest.mark.parametrize(
    ("remat", "config"),
    [
        ("dots+ffn-up", small.config),
        ("full", small.config),
        pytest.param("dots+ffn-up", small.nash_config, marks=pytest.mark.long),
    ],
    ids=["dots", "full", "whole architecture"],
)
def test_remat_changes_memory_not_numbers(remat, config):
    """test_gradients_agree checks the whole architecture with every remat."""
    remat, _, keep = remat.partition("+")
    batches = [small.random_rows(config(), seed) for seed in range(3)]
    run, plain = (
        small.train(config(train__remat=remat, train__remat_keep=keep or None), batches),
        small.train(config(), batches),
    )
    small.assert_same_run(run, plain, rtol=1e-5)
    # And the programs differ: a remat without effect would pass the equality above.
    products_and_fusions = lambda step: step.text().count(" dot(") + step.text().count("fusion")
    assert products_and_fusions(run[2]) != products_and_fusions(plain[2])


def test_unrolled_layers_are_the_same_layers(batches, one_device):
    cfg = small.config()
    run = small.train(small.config(train__unroll="yes"), batches)
    small.assert_same_run(run, one_device, rtol=1e-5)
    stacked = f"[{cfg.model.layers},8,{cfg.data.seq_len},"  # activations that a loop saves for the backward pass
    assert stacked in one_device[2].text()
    assert stacked not in run[2].text()


def test_unrolled_layers_of_the_whole_architecture_pass_on_and_report_the_same():
    """Compare streams, summaries and reports of each layer; the backward pass is that of any loop."""
    cfg = small.nash_config()
    rows = small.random_rows(cfg, 0)
    forward = jax.jit(lambda model, unroll: model.hidden(*args, Execution(attention="xla", unroll=unroll)), static_argnums=1)
    args = jnp.asarray(rows.inputs[0]), jnp.asarray(rows.segments[0])
    looped, unrolled = (forward(small.generic_model(cfg.model), unroll) for unroll in (False, True))
    assert len(jax.tree.leaves(looped)) > 5  # there are reports
    for a, b in zip(jax.tree.leaves(unrolled), jax.tree.leaves(looped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_step_is_traced_once_and_a_new_shape_is_reported(messages: list[str]):
    mesh = small.make_mesh(small.config().mesh)
    step = small.compile_train_step(small.config(), mesh)
    state, traces = small.start(small.config(), mesh), []
    for seq_len in (32, 32, 32, 16, 32, 16):  # this process may have compiled length 32 before
        state, _ = step(state, small.to_device(small.random_rows(small.config(data__seq_len=seq_len), 0), mesh))
        traces.append(step.traces)
    assert traces[0] <= 1
    assert [number - traces[0] for number in traces] == [0, 0, 0, 1, 1, 1]
    assert len(messages) == 1
    assert "inputs:int32[1,8,16] (was inputs:int32[1,8,32])" in messages[0]


def test_the_state_is_donated():
    cfg = small.config()
    mesh, step = small._compiled(cfg)
    state = small.start(cfg, mesh)
    step(state, small.to_device(small.random_rows(cfg, 0), mesh))
    assert state.model.embed_VD.is_deleted()


def test_ema_follows_its_closed_form():
    rows = [small.random_rows(small.config(), seed) for seed in range(3)]
    cfg = small.config(optim__ema_decay=0.15)
    start = jax.device_get(small.start(cfg, small.make_mesh(cfg.mesh)).model)
    models = [small.train(cfg, rows[:n])[0].model for n in (1, 2, 3)]
    ema = small.train(cfg, rows)[0].ema
    decays = [0.1, 0.15, 0.15]  # the first is (1 + 0) / (10 + 0)
    weights = [np.prod(decays[n:]) * (1 - decays[n - 1] if n else 1) for n in range(4)]
    want = jax.tree.map(lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)), start, *models)
    for a, b in zip(jax.tree.leaves(ema), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_z_loss_is_its_own_component(batches, one_device):
    cfg = small.config(optim__z_loss=1e-2)
    batch = Batch(*(jnp.asarray(a[0]) for a in batches[0]))
    _, aux = jax.jit(make_objective(cfg))(small.start(cfg, small.make_mesh(cfg.mesh)).model, batch)
    found = {name: float(value) for name, value in means(aux.sums).items()}
    assert found["loss"] == pytest.approx(one_device[1][0]["loss"], rel=1e-5)
    assert found["loss/z"] > 0
    assert found["objective"] == pytest.approx(found["loss"] + found["loss/z"], rel=1e-6)


def test_clipping_scales_what_the_optimizer_sees_and_reports_the_raw_norm(batches, one_device):
    state, history, _ = small.train(small.config(optim__max_grad_norm=1e-3), batches[:1])
    assert history[0]["grad_norm"] == pytest.approx(one_device[1][0]["grad_norm"], rel=1e-5)
    moments = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.opt_state[1].mu)]
    first_moment = np.sqrt(sum(np.sum(leaf**2) for leaf in moments)) / (1 - small.config().optim.b1)
    assert first_moment == pytest.approx(1e-3, rel=1e-4)


def test_every_option_at_once_gives_the_same_run_on_a_mesh():
    """Grouped queries, biases, untied embeddings, a window, accumulation, averages, z-loss: 2x2x2 and one device."""
    model = dataclasses.replace(small.MODEL, kv_heads=4, qkv_bias=True, tied_embeddings=False, window=17)
    cfg = small.config(train__grad_accum=2, optim__ema_decay=0.5, optim__z_loss=1e-3, train__remat="dots")
    cfg = dataclasses.replace(cfg, model=model)
    rows = [small.random_rows(cfg, seed) for seed in range(2)]
    got, want = (small.train(c, rows) for c in (small.mesh_config(cfg, 2, 2, 2), cfg))
    small.assert_same_run(got, want)
    for a, b in zip(jax.tree.leaves(got[0].ema), jax.tree.leaves(want[0].ema), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_without_any_weight_changes_nothing_and_enters_no_statistic(accumulated):
    cfg: RunConfig = small.config(train__grad_accum=accumulated, optim__ema_decay=0.5)
    good = [small.random_rows(cfg, seed) for seed in range(2)]
    empty = small.random_rows(cfg, 7)
    empty.weights[:] = 0.0
    state, history, _ = small.train(cfg, [good[0], empty, good[1], empty])
    assert [(row["empty"], row["skipped"]) for row in history] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    without, want, _ = small.train(cfg, good)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(without), strict=True):  # moments, decay, average, ring and count
        np.testing.assert_array_equal(a, b)
    meters = [small_meter(rows) for rows in (history, want)]
    rows = [meter.row() for meter in meters]
    assert (rows[0].pop("steps"), rows[1].pop("steps")) == (4, 2)
    timed = ("tokens_per_s", "mfu", "step_ms")
    assert {k: v for k, v in rows[0].items() if k not in timed} == {k: v for k, v in rows[1].items() if k not in timed}
    assert (meters[0].empty, meters[1].empty) == (2, 0)
    assert "step 2: no token of its batch counts in the loss" in spikes.message(2, history[1], 0)


def test_a_row_holds_means_over_its_interval_and_a_stopped_run_writes_the_same_row():
    cfg = small.config(train__total_steps=99)
    batches = [small.random_rows(cfg, seed) for seed in range(5)]
    batches[2].weights[:, 2:] = 0.0  # a quarter of the tokens
    batches[3].weights[:] = np.nan
    _, history, _ = small.train(cfg, batches)
    meter = small_meter(history)
    row = meter.row()
    finite = [metrics for at, metrics in enumerate(history) if at != 3]
    tokens = [metrics["tokens"] for metrics in finite]
    assert min(tokens) < 0.4 * max(tokens)
    for name in ("loss", "objective", "accuracy"):
        assert row[name] == pytest.approx(np.average([m[name] for m in finite], weights=tokens), rel=1e-12)
    assert row["grad_norm"] == pytest.approx(np.mean([m["grad_norm"] for m in finite]), rel=1e-12)
    assert row["lr"] == history[-1]["lr"]
    assert (row["steps"], row["skipped"], row["tokens_seen"]) == (5, 1, sum(tokens))
    # Stopped in the middle, saved as JSON and resumed.
    for at in range(1, 5):
        saved = json.loads(json.dumps(small_meter(history[:at]).to_json()))
        resumed = small_meter(history[at:], saved, step=at, updates=at - (at > 3)).row()
        timed = ("tokens_per_s", "mfu", "step_ms")
        assert {k: v for k, v in resumed.items() if k not in timed} == {k: v for k, v in row.items() if k not in timed}
    assert meter.row()["loss"] != meter.row()["loss"]  # NaN: no steps, no mean


def test_another_rate_schedule_or_length_is_the_same_program():
    """So a resumed run with other numbers compiles nothing."""
    cfg = small.config()
    mesh = small.make_mesh(cfg.mesh)
    changes = {
        "optim__learning_rate": 1e-4, "optim__schedule": "wsd", "optim__min_lr_ratio": 0.5, "optim__decay_fraction": 0.4,
        "optim__warmup_steps": 1, "train__total_steps": 77, "optim__weight_decay": 0.3, "optim__b1": 0.8, "optim__b2": 0.9,
        "optim__eps": 1e-6, "optim__max_grad_norm": 0.0, "train__on_spike": "skip", "train__spike_score": 3.0, "train__seed": 3,
    }  # fmt: skip
    text = lambda **change: small.lowered_text(small.config(**change), mesh)
    texts = {text(), *(text(**{name: value}) for name, value in changes.items())}
    assert len(texts) == 1
    averaged = {text(optim__ema_decay=decay) for decay in (0.5, 0.9)}
    assert len(averaged) == 1
    assert not averaged & texts
    # The numbers have an effect: the same program, another rate.
    _, base, first = small.train(cfg, [small.random_rows(cfg, 0)])
    _, other, second = small.train(small.config(optim__learning_rate=5e-5), [small.random_rows(cfg, 0)])
    assert other[0]["update_norm"] < 0.5 * base[0]["update_norm"]
    assert first._programs is second._programs
