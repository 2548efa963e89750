"""The lock of a run directory, with real processes that overlap, die, freeze and wait."""

import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from runs import losses
from training_process import TrainingProcess, arrays, pair

from nash_mhc.checkpoint.run_lock import LOCK, OTHERS, acquire, acquire_shared
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError
from nash_mhc.runtime.signals import TRY_AGAIN

STEPS = 24
FLAGS = (
    f"--total-steps {STEPS} --checkpoint-interval 2 --log-interval 1 --keep-last 2 --schedule constant --warmup-steps 0".split()
)
HELD = r"error: --checkpoint-dir \S+: another run holds the lock \(process \d+ on \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    life = TrainingProcess(tmp_path_factory.mktemp("run_lock") / "run", *FLAGS, NO_EVALUATION="1")
    assert life.end() == 0, life.said
    return life.log.with_suffix("")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != LOCK}


def test_a_second_run_names_the_owner_and_changes_nothing(tmp_path):
    first = TrainingProcess(tmp_path / "run", *FLAGS, "--total-steps", "100000", NO_EVALUATION="1").until("step      5/")
    first.send(signal.SIGSTOP)  # so that whatever changes now was not its doing
    before = content(tmp_path / "run")
    second = TrainingProcess(tmp_path / "run", *FLAGS, "--total-steps", "100000", log="second", NO_EVALUATION="1")
    assert second.end() == 2
    assert re.match(HELD, second.said), second.said
    assert f"(process {first.pid} on " in second.said
    assert second.said.count("\n") == 1
    assert "--wait-for-lock SECONDS" in second.said
    assert content(tmp_path / "run") == before
    first.send(signal.SIGCONT).send(signal.SIGKILL)
    assert first.end() == -signal.SIGKILL


@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_a_requeued_job_resumes_where_the_dying_one_ends(unbroken, tmp_path, end):
    """Common on clusters: the new process starts before the old one has saved and exited, or has died."""
    dying = (
        TrainingProcess(tmp_path / "run", *FLAGS, NO_EVALUATION="1").until("step  5/").send(signal.SIGSTOP)
    )  # it has not ended when the next one asks
    requeued = TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "100", log="requeued", NO_EVALUATION="1").until(
        "waiting up to 100 s"
    )
    assert f"another run holds the lock (process {dying.pid} on " in requeued.said
    dying.send(end).send(signal.SIGCONT)
    assert dying.end() == (TRY_AGAIN if end == signal.SIGTERM else -end), dying.said
    assert requeued.end() == 0, requeued.said
    began = int(re.search(r"starting from step (\d+) of this run", requeued.said)[1])
    if end == signal.SIGTERM:
        assert f"stopped: step {began} is saved" in dying.said
    assert losses(tmp_path / "run") == losses(unbroken)  # no row twice, none missing
    wanted = arrays(unbroken, STEPS)
    assert all((value == wanted[name]).all() for name, value in arrays(tmp_path / "run", STEPS).items())
    assert not (tmp_path / "run" / LOCK).exists()


def test_waiting_for_the_lock_times_out_and_can_be_interrupted(tmp_path):
    (tmp_path / "run").mkdir()
    owner = acquire(tmp_path / "run")
    life = TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "1", NO_EVALUATION="1")
    assert life.end() == 2
    assert re.search(HELD + r" \(waited for \d+ s\); stop that run", life.said), life.said
    life = (
        TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "100", NO_EVALUATION="1")
        .until("waiting up to 100 s")
        .send()
    )
    assert life.end() == TRY_AGAIN
    owner.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_new_run_waits_for_all_processes_of_the_previous_one(tmp_path):
    """They may still be writing their parts of a checkpoint."""
    mesh = "--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2".split()
    both = pair(tmp_path / "run", *FLAGS, *mesh, "--total-steps", "100000", NO_EVALUATION="1")
    both[0].until("step      3/")
    both[1].send(signal.SIGSTOP)
    both[0].send(signal.SIGKILL)
    assert both[0].end() == -signal.SIGKILL
    next_run = TrainingProcess(
        tmp_path / "run", *FLAGS, "--total-steps", "100000", "--wait-for-lock", "100", log="next", NO_EVALUATION="1"
    )
    next_run.until("another run holds the lock (processes of a run whose process 0 has exited)")
    both[1].send(signal.SIGKILL).send(signal.SIGCONT)
    next_run.until("compiled in").send()
    assert next_run.end() == TRY_AGAIN


def test_a_process_cannot_acquire_a_directory_twice(tmp_path):
    owner = acquire(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run holds the lock \(process {os.getpid()} on "):
        acquire(tmp_path)
    owner.release()
    acquire(tmp_path).release()


def test_only_one_of_many_threads_holds_the_lock(tmp_path):
    inside, most, done = [0], [0], []

    def work():
        owner = acquire(tmp_path, wait=600.0)
        inside[0] += 1
        most[0] = max(most)
        assert inside[0] == 1
        time.sleep(0.002)
        inside[0] -= 1
        owner.release()
        done.append(1)

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 12


def test_a_recreated_directory_is_reacquired_unless_another_run_owns_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    owner = acquire(folder)
    owner.check()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="the folder has vanished"):
        owner.check()
    with pytest.raises(ConfigError, match="another run holds the lock"):
        acquire(tmp_path / "elsewhere")  # it is still this run's, wherever it lies
    folder.mkdir()
    owner.reacquire()
    owner.check()
    acquire(tmp_path / "elsewhere").release()
    shutil.rmtree(folder)
    folder.mkdir()
    other = acquire(folder)
    with pytest.raises(ConfigError, match="another run holds the lock"):
        owner.reacquire()
    with pytest.raises(OSError, match="has vanished"):
        owner.check()
    other.release()


def test_a_save_removes_nothing_from_another_runs_directory(tmp_path):
    folder = tmp_path / "run"
    with Store(folder) as store:
        owner = acquire(folder)
        saver = Saver(store, {"run.json": "{}"}, owner=owner)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        other = acquire(folder)
        saving = folder / "checkpoints" / "5"  # as a save under way looks
        saving.mkdir(parents=True)
        saving.with_name("5.saving").write_text("")
        with pytest.raises(ConfigError, match="another run holds the lock"):
            saver.save({"a": np.ones(3)}, 2, {}, wait=True)
        assert sorted(path.name for path in saving.parent.iterdir()) == ["5", "5.saving"]
        other.release()
        owner.release()


def test_a_deleted_lock_is_reacquired_while_other_processes_hold_theirs(tmp_path):
    owner, other = acquire(tmp_path), acquire_shared(tmp_path)
    (tmp_path / LOCK).unlink()
    owner.reacquire()
    owner.check()
    (tmp_path / OTHERS).unlink()
    other.reacquire()
    owner.release()
    with pytest.raises(ConfigError, match="processes of a run whose process 0 has exited"):
        acquire(tmp_path)
    other.release()
    acquire(tmp_path).release()
