"""Steps with a non-finite loss or gradients change nothing, are counted, and end the run if there are too many."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, rows

from nash_mhc.config import ConfigError
from nash_mhc.config.commands import module_command
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.train import run
from nash_mhc.train.step import make_objective, make_train_step


def poisoned(cfg, seed, value=np.nan):
    rows = small.random_rows(cfg, seed)
    rows.weights[-1, 0, 0] = value  # in the last microbatch
    return rows


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_bad_batch_leaves_the_run_as_if_it_had_not_been(accumulated, value):
    cfg = small.config(train__grad_accum=accumulated, optim__ema_decay=0.5)
    good = [small.random_rows(cfg, seed) for seed in range(2)]
    state, history, step = small.train(cfg, [good[0], poisoned(cfg, 7, value), good[1]])
    assert [row["skipped"] for row in history] == [0, 1, 0]
    assert step.traces <= 1
    assert int(state.step) == 2
    assert_equal_states(state, small.train(cfg, good)[0], rtol=0, atol=0)


@functools.cache
def sharp_step():
    objective = make_objective(small.config())

    def sharp(model, batch):
        loss, aux = objective(model, batch)
        return loss + jnp.sqrt(0.0 * model.embed_VD[0, 0]), aux  # its gradient at zero is NaN

    return jax.jit(make_train_step(sharp))


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_bad_gradients_under_a_finite_loss_are_skipped(max_grad_norm):
    cfg = small.config(optim__max_grad_norm=max_grad_norm)
    mesh = small.make_mesh(cfg.mesh)
    state = small.start(cfg, mesh)
    with jax.set_mesh(mesh):
        batch = small.to_device(small.random_rows(cfg, 0), mesh)
        after, metrics = sharp_step()(state, batch, Hyperparameters.of(cfg.optim, cfg.train))
    assert np.isfinite(metrics["loss"])
    assert metrics["skipped"] == 1
    assert_equal_states(after, state, rtol=0, atol=0)


@pytest.fixture
def poison(monkeypatch):
    """Poison the batches of these steps in every run."""
    bad: set[int] = set()
    spoilt = lambda batch: batch._replace(weights=batch.weights * np.float32(np.nan))
    small.change_batches(lambda step, batch: spoilt(batch) if step in bad else batch, monkeypatch.setattr)
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)  # no test here evaluates
    return bad


def test_skipped_steps_are_counted_and_told_and_a_continued_run_counts_on(poison, tmp_path, capsys):
    poison |= {2, 5}
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(tmp_path / "run"), total_steps=3)
    run(dataclasses.replace(RUN, train=train))
    assert "step 2: loss or gradients are not finite; update skipped (1 in a row)" in capsys.readouterr().out
    result = at(tmp_path / "run")
    logged = rows(tmp_path / "run")
    assert {row["step"]: row["skipped"] for row in logged} == {2: 1, 3: 1, 4: 1, 6: 2}
    assert all(row["loss"] > 1 for row in logged)  # the mean of the good steps
    assert int(result.state.step) == 4
    assert logged[-1]["tokens_seen"] > 0


def test_too_many_in_a_row_stop_the_run_and_name_checkpoint_and_step(poison, tmp_path):
    poison |= {1, 3, 4, 5, 6}
    with pytest.raises(ConfigError) as stopped:
        at(tmp_path / "run", checkpoint_interval=2, max_bad_steps=3, total_steps=9)
    error = str(stopped.value)
    assert re.search(
        r"steps 3 to 5 .*--max-bad-steps 3.* checkpoint .* step 2; step 3 read rows 16, .*, 23 of stories; ", error
    )
    assert error.endswith(module_command("nash_mhc.data", "inspect", str(tmp_path / "run"), "--step", "3"))
    # Without the bad data, the same command resumes.
    poison.clear()
    at(tmp_path / "run", checkpoint_interval=2)
    assert [row["step"] for row in rows(tmp_path / "run")][-1] == RUN.train.total_steps
    assert rows(tmp_path / "run")[-1]["loss"] < 10


def test_a_resumed_run_goes_on_counting_skipped_steps(poison, tmp_path):
    poison |= {2, 3, 4, 5}
    at(tmp_path / "run", max_bad_steps=4, total_steps=3)
    with pytest.raises(ConfigError, match=r"steps 2 to 5 were skipped: .* not finite"):
        at(tmp_path / "run", max_bad_steps=4)
    assert small.small_meter([], saved={"tokens_seen": 1}).skipped_in_a_row == 0  # a checkpoint without the count


def test_without_a_checkpoint_before_them_that_is_said_and_zero_never_stops(poison, tmp_path):
    poison |= set(range(1, 5))
    with pytest.raises(ConfigError, match=r"steps 1 to 2 were skipped: .*; no checkpoint before them; step 1 read rows 0, "):
        at(tmp_path / "a", max_bad_steps=2)
    result = at(tmp_path / "b", max_bad_steps=0)
    assert int(result.state.step) == 2
