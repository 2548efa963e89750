"""The lease of a run directory without locks, such as a bucket."""

import errno
import fcntl
import json
import subprocess
import threading
import time

import pytest
from fake_gcs import serve

from nash_mhc.checkpoint import manifest, run_lock
from nash_mhc.checkpoint.run_lock import OBJECT, OTHERS, acquire, acquire_shared
from nash_mhc.config import ConfigError
from nash_mhc.storage.files import to_path


@pytest.fixture(scope="module")
def served():
    return serve()


@pytest.fixture(params=["bucket", "disk without locks"])
def beating(request, tmp_path, monkeypatch, served):
    """A folder without locks, with short timeouts."""
    monkeypatch.setattr(run_lock, "RENEW_S", 0.1)
    monkeypatch.setattr(run_lock, "_machine", lambda machine=iter(range(99)): [f"host-{next(machine)}"])
    if request.param == "bucket":
        served.objects.clear()
        return to_path("gs://bucket/run")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    return tmp_path


def owner_of(folder):
    return json.loads((folder / OBJECT).read_text())


def test_a_live_owner_is_named_and_keeps_the_directory(beating, messages):
    owner = acquire(beating)
    with pytest.raises(ConfigError, match=r"another run holds the lock \(process \d+ on host-0, since"):
        acquire(beating)
    assert "checking whether that run is still alive" in messages[0]
    with pytest.raises(ConfigError, match=r"\(waited for \d+ s\)"):
        acquire(beating, wait=0.6)
    owner.check()
    assert owner_of(beating)["machine"] == ["host-0"]
    owner.release()
    assert not (beating / OBJECT).exists()
    acquire(beating).release()


def test_an_expired_lease_is_taken_over_and_the_old_owner_stops(beating, monkeypatch, messages):
    monkeypatch.setattr(run_lock, "EXPIRED_S", 1.0)
    frozen = acquire(beating)
    frozen._stopped.set()  # a machine that was put to sleep
    frozen._thread.join()
    owner = acquire(beating)
    assert messages[-1].endswith("has not renewed its lock for 1 s; taking over")
    frozen._renew()  # it wakes up, and finds another one
    with pytest.raises(ConfigError, match=r"another run \(process \d+ on host-1, since .*\) took over the directory"):
        frozen.check()
    owner.check()
    frozen.release()
    assert owner_of(beating)["machine"] == ["host-1"]
    owner.release()


def test_a_half_written_lease_is_not_overwritten(beating, monkeypatch):
    """The other owner came while this one was suspended: the next renewal must not take the folder back."""
    frozen = acquire(beating)
    frozen._stopped.set()
    frozen._thread.join()
    (beating / OBJECT).write_text('{"id": "anoth')
    frozen._renew()
    assert (beating / OBJECT).read_text() == '{"id": "anoth'
    (beating / OBJECT).write_text('{"id": "another"}')
    frozen._renew()
    with pytest.raises(ConfigError, match="took over the directory"):
        frozen.check()


@pytest.mark.parametrize("beating", ["disk without locks"], indirect=True)  # a bucket's client asks for the size first
def test_a_lease_is_renewed_atomically(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEW_S", 0.0005)
    owner = acquire(beating)
    began, read = owner_of(beating)["beat"], 0
    while owner_of(beating)["beat"] < began + 50 or read < 200:
        read += 1
    owner.release()


def test_an_owner_checks_its_lease_after_a_storage_outage(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "EXPIRED_S", 0.3)
    owner = acquire(beating)
    owner._stopped.set()  # no beat arrives any more
    owner._thread.join()
    time.sleep(0.4)
    owner.check()  # nobody has come
    about = owner_of(beating)
    (beating / OBJECT).write_text(json.dumps(about | {"id": "another"}))
    with pytest.raises(ConfigError, match="took over the directory"):
        owner.check()


def test_the_lease_of_a_dead_local_process_is_removed_immediately(beating, monkeypatch):
    monkeypatch.setattr(run_lock, "_machine", lambda: ["here"])
    monkeypatch.setattr(run_lock, "EXPIRED_S", 1e6)
    with pytest.raises(ConfigError, match="another run holds the lock"):
        first = acquire(beating)
        acquire(beating)
    first.release()
    with subprocess.Popen(["true"]) as ended:
        pid = ended.pid
    (beating / OBJECT).write_text(json.dumps({"machine": ["here"], "pid": pid, "id": "x", "since": "", "beat": 3}))
    acquire(beating).release()


def test_a_run_in_a_bucket_is_locked_and_released(served, monkeypatch, tmp_path):
    from runs import config

    from nash_mhc.train import run
    from nash_mhc.train.callbacks import EachStep

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lock, "RENEW_S", 0.05)
    served.objects.clear()
    name, other = ("bucket", f"run/{OBJECT}"), {"id": "other", "machine": ["far"], "pid": 1, "since": "now"}
    seen = []
    look = EachStep(lambda _: seen.append(name in served.objects))
    run(config("gs://bucket/run", eval_interval=0), quiet=True, callbacks=[look])
    assert seen == [True] * 6
    assert name not in served.objects

    def taken_over(step):
        if step == 2:
            while any(thread.name == "owner" for thread in threading.enumerate()):  # until it has seen that
                served.put(*name, json.dumps(other).encode())  # again, for a beat that had just looked wrote over it
                time.sleep(0.01)

    longer = config("gs://bucket/run", eval_interval=0, log_interval=1, total_steps=12)
    with pytest.raises(
        ConfigError, match=r"gs://bucket/run: another run \(process 1 on far, since now\) took over the directory"
    ):
        run(longer, quiet=True, callbacks=[EachStep(lambda step: taken_over(step - 6))])
    assert json.loads(served.objects[name][0]) == other
    assert manifest.saved_steps(to_path("gs://bucket/run") / "checkpoints") == [6]


def test_acquire_shared_works_without_locks(monkeypatch, tmp_path):
    acquire_shared(to_path("gs://bucket/x")).release()
    owner = acquire_shared(tmp_path)
    assert (tmp_path / OTHERS).exists()
    owner.release()
