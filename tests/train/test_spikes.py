"""Spikes are detected, reported, counted and optionally skipped, the same on every mesh and after a restart."""

import dataclasses
import re
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, rows

from nash_mhc.config import ConfigError
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.train import run, spikes
from nash_mhc.train.spikes import WINDOW, Recent, remember, scores


def ring(values):
    recent, remembers = Recent.empty(), jax.jit(remember)
    for value in values:
        recent = remembers(recent, np.asarray(value, np.float32), np.zeros((), bool))
    return recent


def usual(count, seed=0):
    """Losses around 3 and gradient norms around 2, which vary more."""
    rng = np.random.default_rng(seed)
    return rng.normal((3.0, 2.0), (0.15, 0.6), (count, 2)).astype(np.float32)


def test_the_score_is_the_robust_z_score_of_a_full_ring():
    history = usual(WINDOW + 5)
    last = history[-WINDOW:].astype(np.float64)
    median = np.median(last, axis=0)
    spread = 1.4826 * np.median(np.abs(last - median), axis=0)
    value = np.array([4.2, 9.0], np.float32)
    np.testing.assert_allclose(scores(ring(history), jnp.asarray(value)), (value - median) / spread, rtol=1e-4)
    # Only upwards, only once the ring is full, and not for NaN.
    np.testing.assert_array_equal(scores(ring(history), jnp.asarray([1.0, 0.1])), 0)
    np.testing.assert_array_equal(scores(ring(history[: WINDOW - 1]), jnp.asarray([99.0, 99.0])), 0)
    np.testing.assert_array_equal(scores(ring(history), jnp.asarray([np.nan, 99.0])), 0)


def test_values_that_hardly_vary_need_more_than_a_hair_to_spike():
    still = ring([(3.0, 0.4)] * WINDOW)
    np.testing.assert_allclose(scores(still, jnp.asarray([3.03, 0.6])), [0.5, 2.0], rtol=1e-3)  # spreads of at least 2% and 25%
    assert np.isfinite(scores(ring([(0.0, 0.0)] * WINDOW), jnp.asarray([3.0, 1.0]))).all()


def test_a_few_spikes_do_not_hide_the_next_and_a_new_level_becomes_usual():
    calm, high = usual(WINDOW), usual(WINDOW, seed=1) * 4
    limit = RUN.train.spike_score
    assert max(scores(ring([*calm, *high[:10]]), jnp.asarray(high[10]))) > limit
    assert max(scores(ring([*calm, *high[: WINDOW // 2 + 1]]), jnp.asarray(high[WINDOW // 2 + 1]))) < limit
    ignored = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, on_spike="ignore"))
    assert Hyperparameters.of(ignored.optim, ignored.train).spike_score == np.inf


# --- the step: WINDOW ordinary batches fill the ring, then a batch in which only one token counts is a spike ---

# Short sequences: these tests need many batches.
SKIP = small.config(train__on_spike="skip", train__total_steps=99, optim__ema_decay=0.5, optim__learning_rate=5e-6)
AT = WINDOW + 1  # batches before the spike
EARLY = WINDOW - 2  # batches before the ring is full; one run takes these steps for all tests


def lone(batch):
    weights = np.zeros_like(batch.weights)
    weights[0, 0, 0] = 1.0
    return batch._replace(weights=weights)


@pytest.fixture(scope="module")
def ordinary():
    return [small.random_rows(SKIP, seed) for seed in range(AT + 2)]


@pytest.fixture(scope="module")
def spiked(ordinary):
    """The spike and two ordinary batches after it."""
    return [lone(small.random_rows(SKIP, 999)), *ordinary[AT:]]


@pytest.fixture(scope="module")
def early(ordinary):
    """Return (state, metrics) before the ring is full."""
    return small.train(SKIP, ordinary[:EARLY])[:2]


@pytest.fixture(scope="module")
def calm(early, ordinary):
    """Return (state, metrics) before the spike."""
    state, history, _ = small.train(SKIP, ordinary[EARLY:AT], early[0])
    return state, early[1] + history


@pytest.fixture(scope="module")
def skipping(calm, spiked):
    state, history, step = small.train(SKIP, spiked, calm[0])
    return state, calm[1] + history, step


def test_a_skipped_spike_leaves_the_run_as_if_it_had_not_been_but_in_the_ring(skipping, calm, ordinary):
    state, history, step = skipping
    assert [row["spike"] for row in history] == [row["skipped"] for row in history] == [0] * AT + [1, 0, 0]
    assert [row["spikes"] for row in history] == [0] * AT + [1, 1, 1]
    assert history[AT]["spike_score/grad_norm"] > 30
    assert all(row["spike_score/objective"] == 0 for row in history[:WINDOW])
    assert step.traces <= 1
    without, _, _ = small.train(SKIP, ordinary[AT:], calm[0])
    assert_equal_states(eqx.tree_at(lambda s: s.recent, state, without.recent), without, rtol=0, atol=0)
    assert int(state.step) == int(without.recent.count) == len(ordinary)
    assert int(state.recent.count) == len(ordinary) + 1
    assert np.float32(history[AT]["grad_norm"]) in state.recent.values_MN


def test_a_spike_that_is_only_reported_is_a_step_like_others(spiked, skipping, calm):
    cfg = dataclasses.replace(SKIP, train=dataclasses.replace(SKIP.train, on_spike="report"))
    state, history, _ = small.train(cfg, spiked, calm[0])
    assert int(state.step) == AT + len(spiked)
    assert sum(row["skipped"] for row in history) == 0
    assert int(state.recent.spikes) == sum(row["spike"] for row in history) == 1
    assert history[0]["spike_score/grad_norm"] == skipping[1][AT]["spike_score/grad_norm"]


def test_eight_devices_judge_as_one_does(ordinary, spiked, early, skipping):
    """They start before the ring is full, so they write its last values."""
    state, history, _ = small.train(small.mesh_config(SKIP, 2, 2, 2), [*ordinary[EARLY:AT], *spiked], early[0])
    for a, b in zip(history, skipping[1][EARLY:], strict=True):
        assert (a["spike"], a["skipped"], a["spikes"]) == (b["spike"], b["skipped"], b["spikes"])
        for name in spikes.MEASURES:
            np.testing.assert_allclose(a[f"spike_score/{name}"], b[f"spike_score/{name}"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state.recent.values_MN, skipping[0].recent.values_MN, rtol=1e-4)
    assert state.recent.values_MN.shape == (2, WINDOW)


# --- whole runs ------------------------------------------------------------------------------------------------------

SLOW = small.config(
    optim__learning_rate=5e-7, optim__warmup_steps=0, optim__schedule="constant", train__log_interval=1,
    train__total_steps=AT + 5, train__on_spike="skip",
)  # fmt: skip


@pytest.fixture
def spiky(monkeypatch):
    """Turn the batches of these steps into spikes, in every run."""
    steps: set[int] = set()
    small.change_batches(lambda step, batch: lone(batch) if step in steps else batch, monkeypatch.setattr)
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)  # no test here evaluates
    return steps


def test_spikes_are_told_and_counted_and_a_stopped_run_judges_as_the_unbroken_one(spiky, tmp_path, capsys):
    spiky |= {AT + 1, AT + 3}
    unbroken = at(tmp_path / "unbroken", SLOW, checkpoint_interval=AT + 2)
    for name in ("run", "other"):  # as if killed soon after the first checkpoint
        shutil.copytree(tmp_path / "unbroken", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / str(AT + 5))
    capsys.readouterr()
    train = dataclasses.replace(SLOW.train, checkpoint_dir=str(tmp_path / "run"))
    resumed = run(dataclasses.replace(SLOW, train=train))
    line = rf"step {AT + 3}: gradient norm [\d.]+ is a spike, score [\d.]+; update skipped \(1 in a row\)"
    assert re.search(line, capsys.readouterr().out)
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    assert int(resumed.state.recent.spikes) == 2
    logged = rows(tmp_path / "run")
    assert {row["step"]: (row["spikes"], row["skipped"]) for row in logged[AT - 1 :]} == {
        AT: (0, 0), AT + 1: (1, 1), AT + 2: (1, 1), AT + 3: (2, 2), AT + 4: (2, 2), AT + 5: (2, 2)
    }  # fmt: skip
    assert all(row["spike_score/objective"] >= 0 for row in logged)

    # Resumed from the same checkpoint with --on-spike report: no spike counts as a bad step.
    spiky |= {AT + 4, AT + 5}
    train = dataclasses.replace(SLOW.train, checkpoint_dir=str(tmp_path / "other"), on_spike="report", max_bad_steps=2)
    result = run(dataclasses.replace(SLOW, train=train))
    assert capsys.readouterr().out.count("; update applied\n") == 3
    assert int(result.state.step) == AT + 4
    assert (rows(tmp_path / "other")[-1]["spikes"], rows(tmp_path / "other")[-1]["skipped"]) == (4, 1)

    # Skipped spikes count as bad steps.
    spiky |= {AT + 6, AT + 7}
    words = rf"steps {AT + 6} to {AT + 7} were skipped: .* not finite, or were spikes .*: step {AT + 5}; "
    with pytest.raises(ConfigError, match=words + rf"step {AT + 6} read rows {8 * (AT + 5)}, .* of stories; look"):
        at(tmp_path / "other", SLOW, max_bad_steps=2, total_steps=AT + 9)


def test_the_line_names_the_larger_score():
    metrics = {"objective": 7.123, "grad_norm": 0.5, "spike_score/objective": 14.21, "spike_score/grad_norm": 3.0}
    metrics |= {"spike": 1.0, "empty": 0.0}
    assert spikes.message(812, metrics, 0) == "step 812: training objective 7.123 is a spike, score 14.2; update applied"
    assert spikes.message(812, metrics | {"spike": 0.0}, 0) is None
