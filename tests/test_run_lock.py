"""A run's folder belongs to one run at a time: real processes that overlap, die, freeze and are waited for."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from fake_gcs import serve
from runs import losses
from training_process import TrainingProcess, arrays, pair

from nash_mhc.checkpoint import manifest, run_lock
from nash_mhc.checkpoint.run_lock import LOCK, OBJECT, OTHERS, accompany, hold
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError
from nash_mhc.runtime.signals import TRY_AGAIN
from nash_mhc.storage.paths import place

STEPS = 24
FLAGS = (
    f"--total-steps {STEPS} --checkpoint-interval 2 --log-interval 1 --keep-last 2 --schedule constant --warmup-steps 0".split()
)
HELD = r"error: --checkpoint-dir \S+: another run holds it \(process \d+ on \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    life = TrainingProcess(tmp_path_factory.mktemp("run_lock") / "run", *FLAGS, NO_EVALUATION="1")
    assert life.end() == 0, life.said
    return life.log.with_suffix("")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != LOCK}


def test_a_second_run_in_a_folder_says_who_holds_it_and_changes_nothing(tmp_path):
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


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_requeued_job_that_overlaps_the_dying_one_goes_on_where_that_ends(unbroken, tmp_path, end):
    """The case that every cluster knows: the new process starts before the old one has saved and left, or has died."""
    dying = (
        TrainingProcess(tmp_path / "run", *FLAGS, NO_EVALUATION="1").until("step  5/").send(signal.SIGSTOP)
    )  # it has not ended when the next one asks
    requeued = TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "100", log="requeued", NO_EVALUATION="1").until(
        "waiting for it, 100 s at most"
    )
    assert f"another run holds it (process {dying.pid} on " in requeued.said
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


def test_a_wait_ends_with_one_line_and_can_be_stopped(tmp_path):
    (tmp_path / "run").mkdir()
    owner = hold(tmp_path / "run")
    life = TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "1", NO_EVALUATION="1")
    assert life.end() == 2
    assert re.search(HELD + r" \(waited for \d+ s\); stop that one", life.said), life.said
    life = TrainingProcess(tmp_path / "run", *FLAGS, "--wait-for-lock", "100", NO_EVALUATION="1").until("waiting for it").send()
    assert life.end() == TRY_AGAIN
    owner.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_others_of_a_run_are_waited_for_when_its_first_process_has_died(tmp_path):
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
    next_run.until("another run holds it (processes of a run whose first one has ended)")
    both[1].send(signal.SIGKILL).send(signal.SIGCONT)
    next_run.until("compiled in").send()
    assert next_run.end() == TRY_AGAIN


def test_one_process_can_hold_a_folder_once_and_threads_do_not_share_it(tmp_path):
    owner = hold(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run holds it \(process {os.getpid()} on "):
        hold(tmp_path)
    owner.release()
    hold(tmp_path).release()


def test_of_many_that_want_a_folder_at_once_one_has_it(tmp_path):
    inside, most, done = [0], [0], []

    def work():
        owner = hold(tmp_path, wait=600.0, say=lambda text: None)
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


def test_a_folder_that_is_made_again_is_taken_again_unless_another_run_has_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    owner = hold(folder)
    owner.check()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="the folder has vanished"):
        owner.check()
    with pytest.raises(ConfigError, match="another run holds it"):
        hold(tmp_path / "elsewhere")  # it is still this run's, wherever it lies
    folder.mkdir()
    owner.retake()
    owner.check()
    hold(tmp_path / "elsewhere").release()
    shutil.rmtree(folder)
    folder.mkdir()
    other = hold(folder)
    with pytest.raises(ConfigError, match="another run holds it"):
        owner.retake()
    with pytest.raises(OSError, match="has vanished"):
        owner.check()
    other.release()


def test_a_save_clears_nothing_away_in_a_folder_that_is_another_runs_by_now(tmp_path):
    folder = tmp_path / "run"
    with Store(folder) as store:
        owner = hold(folder)
        saver = Saver(store, {"run.json": "{}"}, say=lambda text: None, owner=owner)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        other = hold(folder)
        saving = folder / "checkpoints" / "5"  # as a save under way looks
        saving.mkdir(parents=True)
        saving.with_name("5.saving").write_text("")
        with pytest.raises(ConfigError, match="another run holds it"):
            saver.save({"a": np.ones(3)}, 2, {}, wait=True)
        assert sorted(path.name for path in saving.parent.iterdir()) == ["5", "5.saving"]
        other.release()
        owner.release()


def test_a_lock_that_was_deleted_is_taken_again_although_the_others_of_the_run_hold_theirs(tmp_path):
    owner, other = hold(tmp_path), accompany(tmp_path)
    (tmp_path / LOCK).unlink()
    owner.retake()
    owner.check()
    (tmp_path / OTHERS).unlink()
    other.retake()
    owner.release()
    with pytest.raises(ConfigError, match="processes of a run whose first one has ended"):
        hold(tmp_path)
    other.release()
    hold(tmp_path).release()


# --- where there are no locks: an owner object with a sign of life ---------------------------------------------------


@pytest.fixture(scope="module")
def served():
    return serve()


@pytest.fixture(params=["bucket", "disk without locks"])
def beating(request, tmp_path, monkeypatch, served):
    """A folder without locks, where life is quicker than elsewhere."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(run_lock, "_machine", lambda machine=iter(range(99)): [f"host-{next(machine)}"])
    if request.param == "bucket":
        served.objects.clear()
        return place("gs://bucket/run")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    return tmp_path


def owner_of(folder):
    return json.loads((folder / OBJECT).read_text())


def test_a_living_owner_is_named_and_keeps_the_folder(beating):
    heard = []
    owner = hold(beating)
    with pytest.raises(ConfigError, match=r"another run holds it \(process \d+ on host-0, since"):
        hold(beating, say=heard.append)
    assert "seeing whether that is still there" in heard[0]
    with pytest.raises(ConfigError, match=r"\(waited for \d+ s\)"):
        hold(beating, wait=0.6, say=heard.append)
    owner.check()
    assert owner_of(beating)["machine"] == ["host-0"]
    owner.release()
    assert not (beating / OBJECT).exists()
    hold(beating).release()


def test_who_gives_no_sign_of_life_is_taken_over_and_stops_when_it_comes_back(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "DEAD_S", 1.0)
    heard = []
    frozen = hold(beating)
    frozen._ended.set()  # a machine that was put to sleep
    frozen._thread.join()
    owner = hold(beating, say=heard.append)
    assert heard[-1].endswith("has given no sign of life for 1 s; this run takes it over")
    frozen._give_sign()  # it wakes up, and finds another one
    with pytest.raises(ConfigError, match=r"another run \(process \d+ on host-1, since .*\) has taken it over"):
        frozen.check()
    owner.check()
    frozen.release()
    assert owner_of(beating)["machine"] == ["host-1"]
    owner.release()


def test_what_another_owner_has_half_written_is_not_written_over(beating, monkeypatch):
    """It has come while this one was asleep: the first sign of life must not take the folder away from it again."""
    frozen = hold(beating)
    frozen._ended.set()
    frozen._thread.join()
    (beating / OBJECT).write_text('{"id": "anoth')
    frozen._give_sign()
    assert (beating / OBJECT).read_text() == '{"id": "anoth'
    (beating / OBJECT).write_text('{"id": "another"}')
    frozen._give_sign()
    with pytest.raises(ConfigError, match="has taken it over"):
        frozen.check()


@pytest.mark.parametrize("beating", ["disk without locks"], indirect=True)  # a bucket's client asks for the size first
def test_a_sign_of_life_is_never_seen_in_part(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.0005)
    owner = hold(beating)
    began, read = owner_of(beating)["beat"], 0
    while owner_of(beating)["beat"] < began + 50 or read < 200:
        read += 1
    owner.release()


def test_an_owner_whose_storage_fell_silent_asks_before_it_writes(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "DEAD_S", 0.3)
    owner = hold(beating)
    owner._ended.set()  # no beat arrives any more
    owner._thread.join()
    time.sleep(0.4)
    owner.check()  # nobody has come
    about = owner_of(beating)
    (beating / OBJECT).write_text(json.dumps(about | {"id": "another"}))
    with pytest.raises(ConfigError, match="has taken it over"):
        owner.check()


def test_a_dead_process_of_this_machine_is_not_waited_for(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "_machine", lambda: ["here"])
    monkeypatch.setattr(run_lock, "DEAD_S", 1e6)
    with pytest.raises(ConfigError, match="another run holds it"):
        first = hold(beating)
        hold(beating, say=lambda text: None)
    first.release()
    with subprocess.Popen(["true"]) as ended:
        pid = ended.pid
    (beating / OBJECT).write_text(json.dumps({"machine": ["here"], "pid": pid, "id": "x", "since": "", "beat": 3}))
    hold(beating).release()


def test_a_run_in_a_bucket_is_held_and_let_go(served, monkeypatch, tmp_path):
    from runs import config

    from nash_mhc.train import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    served.objects.clear()
    name, other = ("bucket", f"run/{OBJECT}"), {"id": "other", "machine": ["far"], "pid": 1, "since": "now"}
    seen = []
    run(config("gs://bucket/run", eval_interval=0), quiet=True, each_step=lambda _: seen.append(name in served.objects))
    assert seen == [True] * 6
    assert name not in served.objects

    def taken_over(step):
        if step == 2:
            while any(thread.name == "owner" for thread in threading.enumerate()):  # until it has seen that
                served.put(*name, json.dumps(other).encode())  # again, for a beat that had just looked wrote over it
                time.sleep(0.01)

    longer = config("gs://bucket/run", eval_interval=0, log_interval=1, total_steps=12)
    with pytest.raises(ConfigError, match=r"gs://bucket/run: another run \(process 1 on far, since now\) has taken it over"):
        run(longer, quiet=True, each_step=lambda step: taken_over(step - 6))
    assert json.loads(served.objects[name][0]) == other
    assert manifest.numbered(place("gs://bucket/run") / "checkpoints") == [6]


def test_accompanying_needs_no_lock_where_there_is_none(monkeypatch, tmp_path):
    accompany(place("gs://bucket/x")).release()
    owner = accompany(tmp_path)
    assert (tmp_path / OTHERS).exists()
    owner.release()
