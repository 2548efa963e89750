"""Callbacks: their arguments, their order, and their requests to save and stop."""

import jax
import numpy as np
import pytest
from runs import RUN, assert_equal_states, at, config, rows

from nash_mhc.checkpoint import manifest
from nash_mhc.train import run
from nash_mhc.train.callbacks import Callback


class Recorder(Callback):
    """Records every event with its step."""

    def __init__(self):
        self.events, self.losses, self.norms = [], [], []

    def on_begin(self, run):
        self.events.append(("begin", run.step))

    def before_step(self, run):
        self.events.append(("before", run.step))

    def after_step(self, run):
        self.events.append(("after", run.step))
        self.norms.append(float(np.linalg.norm(jax.device_get(run.model.embed_VD))))

    def on_step(self, run, step, metrics):
        self.losses.append(float(metrics["loss"]))

    def on_evaluation(self, run, step, metrics):
        self.events.append(("evaluation", step, sorted(metrics)[0]))

    def on_save(self, run, step):
        self.events.append(("save", step))

    def on_end(self, run):
        self.events.append(("end", run.step))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    recorder = Recorder()
    folder = tmp_path_factory.mktemp("recorded") / "run"
    result = run(config(folder, total_steps=3, eval_interval=2, log_interval=1), quiet=True, callbacks=[recorder])
    return recorder, result


def test_every_event_comes_once_and_in_order(recorded):
    steps = lambda first, last: [(what, n) for s in range(first, last + 1) for what, n in (("before", s - 1), ("after", s))]
    evaluation = lambda step: ("evaluation", step, "eval/accuracy")
    end = [evaluation(3), ("save", 3), ("end", 3)]
    assert recorded[0].events == [("begin", 0), *steps(1, 2), evaluation(2), *steps(3, 3), *end]


def test_callbacks_see_the_metrics_of_every_step_and_the_state(recorded):
    recorder, result = recorded
    assert recorder.losses == pytest.approx([row["loss"] for row in rows(result.folder)])
    assert recorder.norms[-1] == pytest.approx(float(np.linalg.norm(result.state.model.embed_VD)))
    assert len(set(recorder.norms)) == 3


class StopAt(Callback):
    def __init__(self, step):
        self._step = step

    def after_step(self, run):
        if run.step == self._step:
            run.request_stop("the loss is low enough")


def test_a_callback_stops_a_run_which_resumes_as_the_unbroken_one(tmp_path, capsys):
    unbroken = at(tmp_path / "unbroken", evaluated=False)
    stopped = run(config(tmp_path / "run", eval_interval=0), callbacks=[StopAt(2)])
    assert int(stopped.state.step) == 2
    assert "the run ends at step 2: the loss is low enough" in capsys.readouterr().out
    assert manifest.saved_steps(tmp_path / "run" / "checkpoints") == [2]
    resumed = at(tmp_path / "run", evaluated=False)
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)


class SaveAt(Callback):
    def after_step(self, run):
        if run.step in (2, 3):
            run.request_save()


def test_a_callback_saves_checkpoints_of_the_newest_step(tmp_path):
    run(config(tmp_path, eval_interval=0, total_steps=4), quiet=True, callbacks=[SaveAt()])
    assert manifest.saved_steps(tmp_path / "checkpoints") == [2, 3, 4]


class Fails(Recorder):
    def on_step(self, run, step, metrics):
        raise MemoryError("of the callback")


def test_a_callback_that_fails_ends_the_run_with_its_own_error(tmp_path):
    fails = Fails()
    with pytest.raises(MemoryError, match="of the callback"):
        run(config(tmp_path, eval_interval=0), quiet=True, callbacks=[fails])
    assert fails.events[-1] == ("end", 2)  # metrics of step 1 are read while step 2 runs
    assert RUN.train.total_steps == 6
