"""Runs in gs:// folders, against our own object store (fake_gcs.py)."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_gcs import serve
from runs import assert_equal_states, at, config
from saves import LIKE, saver_of, tree, until_due

from nash_mhc.checkpoint import __main__ as command
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError
from nash_mhc.config.commands import one_line_errors
from nash_mhc.loading.load import load
from nash_mhc.report import __main__ as report
from nash_mhc.runtime.compiled import use_compilation_cache
from nash_mhc.storage.files import RemoteLog, to_path
from nash_mhc.train import run as train


@pytest.fixture(scope="module")
def served():
    return serve()


@pytest.fixture
def gcs(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    served.objects.clear()
    yield served
    served.refuse, served.status = None, 403
    assert not (tmp_path / "gs:").exists()  # no gs:// name was taken for one of this machine


def call(main, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["command", *words])
    return one_line_errors(main), *capsys.readouterr()


def rows_of(fake, name):
    return [json.loads(line) for line in fake.objects["bucket", name][0].splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("local") / "run")


def test_a_run_in_a_bucket_recovers_from_damage_bit_for_bit(unbroken, gcs, monkeypatch, capsys):
    at("gs://bucket/runs/one", total_steps=4, checkpoint_interval=2)
    names = gcs.names("bucket")
    assert {f"runs/one/{name}" for name in ("run.json", "parameters.txt", "metrics.jsonl", "eval.jsonl")} <= set(names)
    assert not [name for name in names if name.endswith((".saving", ".part", ".writable"))]
    written = [name for name in names if name.startswith("runs/one/checkpoints/4/state/")]
    largest = max(written, key=lambda name: len(gcs.objects["bucket", name][0]))
    content = bytearray(gcs.objects["bucket", largest][0])
    content[len(content) // 2] ^= 1
    gcs.put("bucket", largest, bytes(content))

    code, out, _ = call(command.main, monkeypatch, capsys, "verify", "gs://bucket/runs/one")
    assert code == 1
    assert out.splitlines()[0].startswith("2: complete (")
    assert out.splitlines()[1].startswith("4: the content of state/")

    resumed = train(config("gs://bucket/runs/one", checkpoint_interval=2, resume="must"))
    out = capsys.readouterr().out
    assert "checkpoint 4: damaged, the content of state/" in out
    assert "renamed to 4.damaged" in out
    assert "starting from step 2 of this run" in out
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    assert [row["step"] for row in rows_of(gcs, "runs/one/metrics.jsonl")] == [2, 4, 6]
    assert [row["step"] for row in rows_of(gcs, "runs/one/eval.jsonl")] == [3, 6]
    assert bytes(content) == gcs.objects["bucket", largest.replace("/4/", "/4.damaged/")][0]  # set aside, not deleted
    assert str(resumed.folder) == "gs://bucket/runs/one"

    code, out, _ = call(command.main, monkeypatch, capsys, "list", "gs://bucket/runs/one")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "2", "4", "4.damaged", "6"]
    code, out, _ = call(command.main, monkeypatch, capsys, "inspect", "gs://bucket/runs/one")
    assert code == 0
    assert "model.embed_VD" in out
    code, out, _ = call(report.main, monkeypatch, capsys, "gs://bucket/runs/one")
    assert code == 0
    assert b"gs://bucket/runs/one" in gcs.objects["bucket", "runs/one/report.html"][0]
    loaded = load("gs://bucket/runs/one")
    assert loaded.step == 6
    np.testing.assert_array_equal(loaded.model.embed_VD, jax.device_get(unbroken.state.model.embed_VD))


def test_deletions_are_complete_and_interrupted_saves_are_removed(gcs, messages):
    with Store("gs://bucket/run", keep=1) as store:
        for step in (1, 2):
            store.save(step, tree(step), {})
        store.wait()
        assert store.steps() == [2]
        assert not [name for name in gcs.names("bucket") if name.startswith("run/checkpoints/1")]
        store.save(3, tree(3), {})
        store.wait()
    # A process that was killed before the manifest, as it looks in an object store.
    del gcs.objects["bucket", "run/checkpoints/3/manifest.json"]
    gcs.put("bucket", "run/checkpoints/3.saving", b"")
    with Store("gs://bucket/run") as store:
        assert store.latest_complete(set_aside=True) is None
        assert messages == ["checkpoint 3: its save was interrupted; renamed to 3.unfinished"]
        store.save(4, tree(4), {})
        store.wait()
        np.testing.assert_array_equal(store.restore(4, LIKE)[0]["a"], tree(4)["a"])
    assert {name.split("/")[2] for name in gcs.names("bucket")} == {"4"}


@pytest.mark.parametrize("status", [403, 418])  # an OSError of gcsfs, and an error of another kind
@pytest.mark.parametrize("part", ["/state/", "/manifest.json"])
def test_a_failing_object_store_is_retried(gcs, part, status, caplog, messages):
    gcs.status = status
    with Store("gs://bucket/run") as store:
        saver = saver_of(store)
        saver.save(tree(1), 1, {}, wait=True)
        gcs.refuse = lambda method, name: method in ("POST", "PUT") and part in name
        saver.save(tree(2), 2, {})
        until_due(saver)
        assert len(messages) == 1
        assert messages[0].startswith("checkpoint 2 could not be written (")
        end = "training continues, retrying in 0.05 s; the run stops if saving still fails in 0.35 s"
        assert messages[0].endswith(f"gs://bucket/run/checkpoints); {end}")
        gcs.refuse = None
        saver.save(tree(3), 3, {}, wait=True)
        assert messages[1:] == ["saved checkpoint 3 after 1 failed attempt"]
        assert store.steps() == store.finished() == [1, 3]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("unread", ["1/values/metadata", "1/manifest.json"])
def test_nothing_is_deleted_while_the_store_does_not_answer(gcs, unread):
    """The best checkpoint stays while the store does not say that it is the best, or that it is finished."""
    with Store("gs://bucket/run", keep=1) as store:
        store.save(1, tree(1), {"evaluation": {"eval/loss": 1.0}})
        store.wait()
        gcs.refuse = lambda method, name: method == "GET" and name.endswith(unread)
        store.save(2, tree(2), {"evaluation": {"eval/loss": 2.0}})
        store.wait()  # the save itself is whole
        gcs.refuse = None
        assert store.finished() == [1, 2]
        store.save(3, tree(3), {"evaluation": {"eval/loss": 3.0}})
        store.wait()
        assert store.finished() == [1, 3]


@pytest.mark.parametrize("unread", ["2/values/metadata", "2/manifest.json", ""])
def test_a_silent_store_marks_no_checkpoint_as_damaged(gcs, unread):
    with Store("gs://bucket/run") as store:
        for step in (1, 2):
            store.save(step, tree(step), {})
        store.wait()
        before = gcs.names("bucket")
        gcs.refuse = lambda method, name: method == "GET" and name.endswith(unread)
        with pytest.raises((ConfigError, OSError), match="the storage says no"):
            store.latest_complete(set_aside=True)
        gcs.refuse = None
        assert gcs.names("bucket") == before
        assert store.latest_complete(set_aside=True) == 2


def test_a_remote_log_is_uploaded_from_time_to_time_and_at_the_end(gcs):
    gcs.put("bucket", "run/rows", b"1\n")
    file = RemoteLog(to_path("gs://bucket/run/rows"), pause=0.0)
    gcs.refuse = lambda method, name: method != "GET"
    file.add(b"2\n")
    file.flush()
    with pytest.raises(OSError, match="the storage says no"):
        while True:
            file.flush()
    assert file.waiting == [b"2\n"]
    gcs.refuse = None
    file.add(b"3\n")
    while file.waiting:
        file.flush()
    assert gcs.objects["bucket", "run/rows"][0] == b"1\n2\n3\n"
    file = RemoteLog(to_path("gs://bucket/run/rows"), pause=1000.0)
    with gcs.lock:  # the store takes its time, and the loop does not wait for it
        file.add(b"4\n")
        file.flush()
        file.add(b"5\n")
        file.flush()
    while file.waiting != [b"5\n"]:
        file.flush()
    assert file._upload is None  # the next one is due later
    assert gcs.objects["bucket", "run/rows"][0] == b"1\n2\n3\n4\n"
    file.flush(last=True)
    assert gcs.objects["bucket", "run/rows"][0] == b"1\n2\n3\n4\n5\n"
    assert file.waiting == []


@pytest.mark.parametrize("status", [403, 418])
def test_an_unwritable_bucket_is_a_one_line_error(gcs, status):
    gcs.status = status
    gcs.refuse = lambda method, name: method != "GET"
    with pytest.raises(ConfigError, match=r"--checkpoint-dir gs://bucket/run: cannot be written \(.*; choose another folder"):
        at("gs://bucket/run")


def test_an_unreadable_bucket_is_a_one_line_error(gcs, monkeypatch, capsys):
    gcs.refuse = lambda method, name: True
    for act in (
        lambda: at("gs://bucket/run"),
        lambda: at("run", resume_from="gs://bucket/run"),
        lambda: load("gs://bucket/run"),
    ):
        with pytest.raises(ConfigError, match=r"gs://bucket/run: cannot be reached \(.*the storage says no"):
            act()
    for main, words in ((command.main, ["list"]), (report.main, [])):
        code, out, err = call(main, monkeypatch, capsys, *words, "gs://bucket/run")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "gs://bucket/run: cannot be reached (" in err
    assert not Path("run").exists()


def test_compiled_programs_of_a_run_in_a_bucket_are_cached_locally(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_compilation_cache(to_path("gs://bucket/run"))
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "runs" / ".jax_cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_missing_gcsfs_is_reported_with_the_remedy(monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gcsfs" else known(name, *rest))
    with pytest.raises(ConfigError, match=r"gs://bucket/run: gs:// folders need .* pip install 'nash_mhc\[gcs\]'"):
        at("gs://bucket/run")
    assert not Path("gs:").exists()
