"""Real storage failures during a save are reported, waited out and retried."""

import shutil
import sys

import jax
import numpy as np
import pytest
from saves import LIKE, full_disk, saver_of, tree, until_due

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError
from nash_mhc.storage.errors import as_config_error


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run") as store:
        store.save(1, tree(1), {})
        store.wait()
        yield store


class Clock:
    """A clock whose `sleep` only advances the time."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys.modules["nash_mhc.checkpoint.saving"], "time", clock)
    return clock


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_a_failed_save_is_reported_and_retried_with_the_current_state(store, messages, caplog, clock):
    saver = saver_of(store, first_pause=30.0, longest_pause=50.0)
    with full_disk():
        saver.save(tree(2), 2, {})
        while not messages:
            assert not saver.retry_due()
        clock.now += 29
        assert not saver.retry_due()
        clock.now += 2
        assert saver.retry_due()
        saver.save(tree(3), 3, {})
        while len(messages) < 2:
            assert not saver.retry_due()
        clock.now += 49
        saver.save(tree(4), 4, {})  # at its interval, within the pause: nothing is tried
    told = f"could not be written (File too large, {store.folder}); training continues, retrying in"
    end = "the run stops if saving still fails in"  # four more pauses, then three
    assert messages == [f"checkpoint 2 {told} 30 s; {end} 3 min", f"checkpoint 3 {told} 50 s; {end} 2 min 30 s"]
    assert not saver.retry_due()
    clock.now += 2
    assert saver.retry_due()
    saver.save(tree(5), 5, {})
    while len(messages) < 3:
        assert not saver.retry_due()
    assert messages[2] == "saved checkpoint 5 after 2 failed attempts"
    assert names(store) == ["1", "5"]
    assert store.latest_complete() == 5
    np.testing.assert_array_equal(store.restore(5, LIKE)[0]["a"], tree(5)["a"])
    with full_disk():
        saver.save(tree(6), 6, {})
        while len(messages) < 4:
            assert not saver.retry_due()
    saver.save(tree(7), 7, {}, wait=True)  # the end of a run asks for no pause
    assert messages[4:] == ["saved checkpoint 7 after 1 failed attempt"]
    assert all(
        record.name.startswith("nash_mhc") for record in caplog.records
    )  # no library has told it a second time, with a traceback


def test_too_many_failures_stop_the_run_and_keep_the_latest_checkpoint(store, messages):
    saver = saver_of(store, attempts=3)
    with full_disk():
        for step in (2, 3):
            saver.save(tree(step), step, {})
            until_due(saver)
        saver.save(tree(4), 4, {})
        with pytest.raises(
            ConfigError,
            match=rf"checkpoint 4 could not be written \(File too large, {store.folder}\); stopping after 3 failed attempts "
            r"in a row; the latest complete checkpoint is step 1; fix the storage",
        ):
            until_due(saver)
    assert names(store) == ["1"]
    with Store(store.folder.parent) as again:
        assert again.latest_complete(set_aside=True) == 1
        again.save(2, tree(2), {})
        again.wait()
        assert names(again) == ["1", "2"]


def test_the_last_save_waits_for_its_retries(store, messages, clock):
    saver = saver_of(store, attempts=3, first_pause=50.0, longest_pause=70.0)
    with full_disk(), pytest.raises(ConfigError, match="3 failed attempts in a row"):
        saver.save(tree(2), 2, {}, wait=True)
    assert sum(clock.slept) == 50.0 + 70.0
    assert len(messages) == 2
    assert not any("training continues" in line for line in messages)
    saver = saver_of(store)
    saver.save(tree(3), 3, {})
    saver.save(tree(3), 3, {}, wait=True)  # is whole when it returns, and was written once
    assert store.finished() == [1, 3]
    assert len(messages) == 2


@pytest.mark.parametrize(
    "words",
    [
        "UNKNOWN: Gloo AllGather failed: [external/gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4743",
        "INTERNAL: The NCCL operation ncclGroupEnd() failed: remote process exited",
        "UNAVAILABLE: Failed to send RPC to coordination service",
    ],
)
def test_a_peer_lost_during_a_restore_is_not_a_storage_failure(words):
    """Orbax raises another type; a ConfigError would keep a scheduler from requeueing."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"peer|process|RPC"), as_config_error("a/checkpoints/53"):
        raise ValueError(words)
    with pytest.raises(ConfigError, match=r"gloo/1: cannot be reached \(NOT_FOUND: Error opening"), as_config_error("gloo/1"):
        raise ValueError('NOT_FOUND: Error opening "zarr" driver: /runs/gloo failed/collective/coordination/1')


def test_a_failed_save_deletes_no_old_checkpoint(tmp_path, messages):
    with Store(tmp_path, keep=1) as store:
        store.save(1, tree(1), {})
        store.wait()
        with full_disk(), pytest.raises(ConfigError, match="the latest complete checkpoint is step 1"):
            saver_of(store, attempts=2).save(tree(2), 2, {}, wait=True)
        assert store.latest_complete() == 1
        saver_of(store).save(tree(2), 2, {}, wait=True)
        assert names(store) == ["2"]


@pytest.mark.parametrize("fault", ["deleted", "moved during the save"])
def test_a_vanished_directory_is_recreated(store, messages, fault):
    saver = saver_of(store)
    if fault == "deleted":
        shutil.rmtree(store.folder.parent)
        saver.save(tree(2), 2, {}, wait=True)
    else:
        saver.save(tree(2), 2, {})
        store.folder.parent.rename(store.folder.parent.with_name("elsewhere"))
        saver.save(tree(3), 3, {}, wait=True)
    missing = "checkpoints, run.json" if fault == "deleted" else "run.json"  # Orbax may have made its own part again
    assert any(f"{missing}, parameters.txt, which had vanished" in line for line in messages)
    assert (store.folder.parent / "run.json").read_text() == "{}\n"
    assert (store.folder.parent / "parameters.txt").read_text() == "a 3\n"
    assert store.latest_complete() == (2 if fault == "deleted" else 3)


def test_a_run_asked_to_stop_retries_only_briefly(store, messages, clock):
    """Schedulers kill about 30 s after SIGTERM."""
    for failures_before in (0, 5):
        begun = clock.now
        stopping = lambda begun=begun, late=failures_before: clock.now - begun >= (200 if late else 0)
        saver = saver_of(store, attempts=50, first_pause=10.0, longest_pause=300.0, stopping=stopping)
        with full_disk(), pytest.raises(ConfigError, match=r"failed attempts in a row.*nash_mhc\.train "):
            saver.save(tree(2), 2, {}, wait=True)
        assert clock.now - begun <= (211 if failures_before else 30)
    assert names(store) == ["1"]


def test_compiled_programs_are_deleted_from_a_full_disk(store, messages, monkeypatch):
    write, full = manifest.write, [True]

    def fails(checkpoint):
        if full[0]:
            raise OSError(28, "No space left on device")
        write(checkpoint)

    def make_room():
        full[0] = False
        return 5_000_000

    monkeypatch.setattr(manifest, "write", fails)
    saver = saver_of(store, free_space=make_room)
    saver.save(tree(2), 2, {}, wait=True)
    assert names(store) == ["1", "2"]
    assert sum("5.0 MB of compiled programs" in line for line in messages) == 1
    with full_disk():  # a file that may not grow is no full disk
        saver.save(tree(3), 3, {})
        until_due(saver)
    assert sum("compiled programs" in line for line in messages) == 1


def test_a_file_in_place_of_the_directory_is_waited_out(store, messages):
    """As after chmod, but for root as well: nothing can be made there."""
    saver = saver_of(store)
    store.folder.rename(store.folder.with_name("elsewhere"))
    store.folder.write_text("")
    saver.save(tree(2), 2, {})
    assert "checkpoint 2 could not be written (" in messages[0]
    store.folder.unlink()
    store.folder.with_name("elsewhere").rename(store.folder)
    until_due(saver)
    saver.save(tree(3), 3, {}, wait=True)
    assert messages[1:] == ["saved checkpoint 3 after 1 failed attempt"]
    assert names(store) == ["1", "3"]


def test_a_checkpoint_without_its_manifest_is_removed_before_the_retry(store, messages, monkeypatch):
    write = manifest.write

    def cut_off(checkpoint):
        (checkpoint.parent / f"{checkpoint.name}.{manifest.FILE}.part").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", cut_off)
    saver = saver_of(store)
    saver.save(tree(2), 2, {})
    until_due(saver)
    assert (store.folder / "2").is_dir()
    assert store.finished() == [1]
    monkeypatch.setattr(manifest, "write", write)
    store.recover()  # as the next attempt begins
    assert names(store) == ["1"]
    saver.save(tree(3), 3, {}, wait=True)
    assert names(store) == ["1", "3"]
