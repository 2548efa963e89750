"""Runs that are told to stop: in every phase, with nothing lost,
and the run that goes on is the unbroken one bit for bit."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runs import assert_equal_states, at, rows
from training_process import DENSE, TrainingProcess, catches

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.store import Store
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, Interrupted
from nash_mhc.train.trainer import Trainer

LOSSES = ("step", "loss", "grad_norm", "tokens_seen")


def losses(folder):
    return [[row[key] for key in LOSSES] for row in rows(folder)]


def checkpoints(folder):
    return manifest.saved_steps(Path(folder) / "checkpoints")


def test_during_import(tmp_path):
    argv = [sys.executable, "-X", "importtime", "-m", "nash_mhc.train", *DENSE, "--checkpoint-dir", str(tmp_path / "run")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    while not catches(process.pid, signal.SIGTERM):
        assert process.poll() is None
    process.terminate()
    _, told = process.communicate()
    assert process.returncode == TRY_AGAIN
    imported = [line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")]
    assert "socket" in imported
    assert "jax" not in imported  # that takes seconds: it was not waited for
    told = [line for line in told.splitlines() if not line.startswith("import time:")]
    assert told == ["SIGTERM: nothing is lost; start the same command again"]
    assert not (tmp_path / "run").exists()


def test_during_preparation(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a few words, again and again"}\n' * 400_000)
    flags = ["--dataset", str(text), "--cache-dir", str(tmp_path / "cache"), "--total-steps", "1"]
    life = TrainingProcess(tmp_path / "run", *flags)
    while not list(tmp_path.glob("cache/*.partial")):
        assert life.alive, life.said
        time.sleep(0.01)
    assert life.send().end() == TRY_AGAIN
    assert not (tmp_path / "run").exists()
    assert list(tmp_path.glob("cache/*.partial"))  # what the next start goes on with
    assert [path for path in tmp_path.glob("cache/*") if path.suffix != ".partial"] == []


def test_during_compilation(tmp_path):
    nash = [*"--seq-len 64 --batch-size 4 --model-width 64 --model-layers 2 --model-heads 4 --model-kv-heads 4".split()]
    life = TrainingProcess(tmp_path / "run", model=nash, JAX_ENABLE_COMPILATION_CACHE="false", TELL_OF_THE_COMPILER="1")
    life.until("in the compiler")  # from where Python does not come back for seconds
    assert life.send().end() == TRY_AGAIN
    assert "out of the compiler" not in life.said
    assert checkpoints(tmp_path / "run") == []


def test_while_the_evaluation_is_still_being_compiled(tmp_path):
    """Nobody waits for its compiler: neither the step that is to be saved, nor the end of the process."""
    flags = "--total-steps 4 --eval-interval 2 --log-interval 1".split()
    life = TrainingProcess(tmp_path / "run", *flags, NO_PROGRAM_OF_THE_EVALUATION="1")
    assert life.until("step 2/4").send().end() == TRY_AGAIN
    assert "the evaluation at step 2 was interrupted" in life.said
    assert checkpoints(tmp_path / "run") == [2]
    assert TrainingProcess(tmp_path / "run", *flags).end() == 0
    assert [row["step"] for row in rows(tmp_path / "run", "eval.jsonl")] == [2, 4]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("signals") / "run", grad_accum=2)


def interrupted(folder, **changes):
    """Runs until a signal stops it; the step that it says is saved is saved, and whole."""
    with pytest.raises(Interrupted) as stopped:
        at(folder, grad_accum=2, **changes)
    step = stopped.value.step
    assert checkpoints(folder)[-1] == step
    assert manifest.problem(folder / "checkpoints" / str(step)) is None
    return step


def assert_goes_on_as_unbroken(folder, unbroken, **changes):
    resumed = at(folder, grad_accum=2, **changes)
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    assert losses(folder) == losses(unbroken.folder)
    assert rows(folder, "eval.jsonl") == rows(unbroken.folder, "eval.jsonl")
    assert resumed.evaluation == unbroken.evaluation


@pytest.fixture
def calls(monkeypatch):
    """`calls(n, signal)` sends the signal at the n-th call of a compiled function:
    a step, or a batch of an evaluation."""
    run_step, left = CompiledStep.__call__, []

    def called(self, *args):
        if left:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), left[1])
        return run_step(self, *args)

    monkeypatch.setattr(CompiledStep, "__call__", called)
    return lambda count, number: left.__setitem__(slice(None), [count, number])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_during_a_step_with_gradient_accumulation(unbroken, calls, tmp_path, number):
    calls(2, number)
    before = signal.getsignal(number)
    assert interrupted(tmp_path / "run") == 2  # the step that was under way is finished, and no other begun
    assert signal.getsignal(number) == before
    calls(0, 0)
    assert_goes_on_as_unbroken(tmp_path / "run", unbroken)


def test_during_an_evaluation(unbroken, calls, tmp_path, capsys):
    calls(4, signal.SIGTERM)  # three steps, then the first of two batches
    assert interrupted(tmp_path / "run") == 3
    assert not (tmp_path / "run" / "eval.jsonl").exists()
    calls(0, 0)
    assert_goes_on_as_unbroken(tmp_path / "run", unbroken)  # what was broken off is made up for


def test_a_repeated_evaluation_has_one_row(unbroken, calls, monkeypatch, tmp_path):
    calls(4, signal.SIGTERM)  # in the evaluation at step 3
    assert interrupted(tmp_path / "run") == 3
    calls(0, 0)

    def killed(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):  # behind the evaluation, before another checkpoint
        patched.setattr(Trainer, "_loop", killed)
        at(tmp_path / "run", grad_accum=2)
    assert [row["step"] for row in rows(tmp_path / "run", "eval.jsonl")] == [3]
    assert_goes_on_as_unbroken(tmp_path / "run", unbroken)


@pytest.mark.parametrize("moment", ["writing", "hashing"])
def test_during_a_save(unbroken, monkeypatch, tmp_path, moment):
    save, finish = Store.save, Store._finish
    signalled = threading.Event()

    def signal_once(at_moment):
        if moment == at_moment and not signalled.is_set():
            signalled.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def saving(self, step, *args):
        save(self, step, *args)
        signal_once("writing")

    def finishing(self, step, checkpointer, barrier):
        checkpointer.wait_until_finished()
        signal_once("hashing")
        return finish(self, step, checkpointer, barrier)

    monkeypatch.setattr(Store, "save", saving)
    monkeypatch.setattr(Store, "_finish", finishing)
    assert interrupted(tmp_path / "run", checkpoint_interval=2) in (2, 3, 4)
    assert_goes_on_as_unbroken(tmp_path / "run", unbroken, checkpoint_interval=2)


def test_a_second_signal_in_a_notebook_is_an_ordinary_interrupt(tmp_path, monkeypatch):
    run_step = CompiledStep.__call__

    def called(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return run_step(self, *args)

    monkeypatch.setattr(CompiledStep, "__call__", called)
    with pytest.raises(KeyboardInterrupt) as stopped:
        at(tmp_path / "run")
    assert not isinstance(stopped.value, Interrupted)
    assert checkpoints(tmp_path / "run") == []


def test_a_second_signal_ends_the_command_immediately(tmp_path):
    flags = ["--total-steps", "100000", "--checkpoint-interval", "0", "--log-interval", "1"]
    # Two at once are one, as timeout(1) sends them; of different kinds here: the system may make one of two alike.
    life = TrainingProcess(tmp_path / "run", *flags).until("step      3/").send(signal.SIGINT).send(signal.SIGTERM)
    assert life.end() == TRY_AGAIN
    saved = checkpoints(tmp_path / "run")[-1]
    assert ": saving the last finished step, then stopping; a second signal exits immediately" in life.said
    assert "again" not in life.said
    assert f"stopped: step {saved} is saved in {tmp_path / 'run'}; " in life.said
    assert life.said.rstrip().endswith(f" -m nash_mhc.train {tmp_path / 'run'}")  # which test_first_hour types
    # Steps of many parts: the first signal waits for the end of one, the second does not.
    slow = TrainingProcess(tmp_path / "slow", *flags, "--grad-accum", "200", model=DENSE).until("step      1/").send()
    slow.until("SIGTERM: saving the last finished step")
    while slow.alive:  # the first of these may come so soon that it is the same request
        slow.send()
        time.sleep(0.2)
    assert slow.end() == TRY_AGAIN
    assert "SIGTERM again: exiting now" in slow.said
    assert checkpoints(tmp_path / "slow") == []


def test_ignored_signals_stay_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with SIGNALS.at_work():
            os.kill(os.getpid(), signal.SIGHUP)
            assert SIGNALS.caught is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_runs_from_a_thread_leave_signals_alone(tmp_path):
    handlers = []

    def train():
        at(tmp_path / "run")
        handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers == [before]
