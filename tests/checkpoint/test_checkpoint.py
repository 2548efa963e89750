"""Checkpoints: damage is detected, the right ones are retained, and saving does not block the loop."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saves import data_file, flip

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError


def tree(value):
    return {"a": jnp.full((8, 16), value, jnp.float32), "b": {"c": jnp.asarray(value, jnp.int32)}}


LIKE = jax.eval_shape(lambda: tree(0))


def save(folder, losses, **options):
    """Save one checkpoint per step, whose arrays contain the step number."""
    with Store(folder, **options) as store:
        for step, loss in losses.items():
            store.save(step, tree(step), {"step": step, "evaluation": None if loss is None else {"eval/loss": loss}})
        store.wait()
        return store.steps()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save(folder, {3: 2.0, 6: 1.0})
    return folder


@pytest.fixture
def run(two, tmp_path):
    return shutil.copytree(two, tmp_path / "run")


DAMAGES = {
    "a flipped bit": (lambda c: flip(data_file(c)), r"the content of state/\S+ has changed"),
    "a cut file": (lambda c: data_file(c).write_bytes(data_file(c).read_bytes()[:-1]), r"state/\S+ has \d+ bytes instead of"),
    "a missing file": (lambda c: data_file(c).unlink(), r"state/\S+ is missing"),
    "a missing part": (lambda c: shutil.rmtree(c / "values"), r"values/\S+ is missing"),
    "another file": (lambda c: (c / "state" / "more").touch(), "unexpected file state/more"),
    "no manifest": (lambda c: (c / manifest.FILE).unlink(), "the manifest is missing"),
    "half a manifest": (lambda c: (c / manifest.FILE).write_text('{"version": 1, "fi'), "the manifest is damaged"),
    "a manifest of another form": (lambda c: (c / manifest.FILE).write_text('{"version": 9}'), "the manifest has version 9"),
    "an empty folder": (lambda c: (shutil.rmtree(c), c.mkdir()), "the manifest is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(run, name, messages):
    damage, message = DAMAGES[name]
    damage(run / "checkpoints" / "6")
    with Store(run) as store:
        assert store.latest_complete(set_aside=True) == 3
        state, values = store.restore(3, LIKE)
        np.testing.assert_array_equal(state["a"], tree(3)["a"])
        assert (int(state["b"]["c"]), values["step"]) == (3, 3)
        assert len(messages) == 1
        assert re.fullmatch(rf"checkpoint 6: damaged, {message}.*; renamed to 6\.damaged$", messages[0])
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["3", "6.damaged"]
        # The run gets there again, and its new checkpoint takes the name.
        store.save(6, tree(6), {"step": 6})
    with Store(run) as store:
        assert store.latest_complete() == 6
    assert len(messages) == 1


def test_a_flipped_bit_in_any_file_is_detected(run):
    checkpoint = run / "checkpoints" / "6"
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size]
    assert set(json.loads((checkpoint / manifest.FILE).read_text())["files"]) | {manifest.FILE} == {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
    }
    for path in files:
        before = path.read_bytes()
        flip(path)
        assert manifest.problem(checkpoint) is not None, path
        path.write_bytes(before)
        assert manifest.problem(checkpoint) is None


def test_reading_renames_nothing_and_refuses_a_damaged_step(run, messages):
    flip(data_file(run / "checkpoints" / "6"))
    with Store(run) as store:
        assert store.latest_complete() == 3
        assert messages[0].endswith("skipped")
        assert store.steps() == [3, 6]
        with pytest.raises(ConfigError, match=r"checkpoints/6: damaged \(the content of state/"):
            store.restore(6, LIKE)


def test_a_run_stops_if_all_checkpoints_are_damaged(run):
    for step in ("3", "6"):
        flip(data_file(run / "checkpoints" / step))
    for set_aside in (False, True, True):  # also if they were renamed before
        with Store(run) as store, pytest.raises(ConfigError, match=r"all checkpoints are damaged \(3\S*, 6\S*\)"):
            store.latest_complete(set_aside=set_aside)


def test_an_interrupted_save_is_not_reported_as_damage(run, messages):
    """Killed after Orbax's commit and before the manifest; or while an old checkpoint was being deleted."""
    for step in ("3", "6"):
        (run / "checkpoints" / step / manifest.FILE).unlink()
        (run / "checkpoints" / f"{step}.saving").touch()
    with Store(run) as store:
        assert store.latest_complete() is None
        assert store.latest_complete(set_aside=True) is None
        assert messages[2:] == [f"checkpoint {n}: its save was interrupted; renamed to {n}.unfinished" for n in (6, 3)]
        assert store.latest_complete(set_aside=True) is None
        store.save(4, tree(4), {})
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["4"]


def test_the_last_the_best_and_every_mth_are_retained(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 3.0, 5: None, 6: 4.0, 7: 2.0, 8: 9.0}
    # The newest is the worst and stays: a run that is continued goes on from it.
    assert save(tmp_path / "a", losses, keep=2, keep_every=3) == [2, 3, 6, 7, 8]
    assert save(tmp_path / "b", losses, keep=1) == [2, 8]
    assert save(tmp_path / "c", dict.fromkeys(losses), keep=3) == [6, 7, 8]


def test_replicated_arrays_compile_nothing_in_the_first_save(tmp_path, caplog):
    """By default, Orbax slices each replica with programs that are compiled while the loop waits."""
    mesh = jax.make_mesh((8,), ("data",))
    same, divided = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))
    state = {"a": jax.device_put(np.arange(16.0), same), "b": jax.device_put(np.arange(24.0).reshape(8, 3), divided)}
    with Store(tmp_path) as store:
        with jax.log_compiles():
            store.save(1, state, {})
        store.wait()
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        restored, _ = store.restore(1, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=same), state))
    for name, value in state.items():
        np.testing.assert_array_equal(restored[name], value)


def test_hashing_runs_in_the_background_and_its_failure_is_raised(tmp_path, monkeypatch):
    go, write = threading.Event(), manifest.write

    def slow(checkpoint):
        assert go.wait(60)
        write(checkpoint)

    monkeypatch.setattr(manifest, "write", slow)
    with Store(tmp_path) as store:
        store.save(1, tree(1), {})
        assert not (tmp_path / "checkpoints" / "1" / manifest.FILE).exists()
        assert (tmp_path / "checkpoints" / "1.saving").exists()
        go.set()
        store.wait()
        assert store.latest_complete() == 1

        def full(checkpoint):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(manifest, "write", full)
        store.save(2, tree(2), {})
        with pytest.raises(OSError, match="No space left"):
            store.wait()
        assert store.latest_complete() == 1


def test_files_are_synced_before_the_manifest_and_it_before_an_old_checkpoint_is_deleted(tmp_path, monkeypatch):
    """The order of writes decides what a power loss would leave."""
    events = []
    fsync, replace, rmtree = os.fsync, Path.replace, shutil.rmtree
    name = lambda path: Path(path).relative_to(tmp_path).as_posix()
    monkeypatch.setattr(os, "fsync", lambda f: (events.append(("sync", name(os.readlink(f"/proc/self/fd/{f}")))), fsync(f))[1])
    monkeypatch.setattr(Path, "replace", lambda p, to: (events.append(("appears", name(to))), replace(p, to))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda p, **k: (events.append(("goes", name(p))), rmtree(p, **k))[1])
    save(tmp_path, {3: 2.0, 6: 1.0}, keep=1)
    at = {event: index for index, event in enumerate(events)}  # the last time of each
    appears, goes = at["appears", "checkpoints/6/manifest.json"], at["goes", "checkpoints/3"]
    part = at["sync", "checkpoints/6.manifest.json.part"]
    written = [path for path in (tmp_path / "checkpoints" / "6").rglob("*") if path.name != manifest.FILE]
    assert len(written) > 8
    for path in [*written, tmp_path / "checkpoints"]:  # the folder's own name as well
        assert min(index for index, event in enumerate(events) if event == ("sync", name(path))) < appears, path
    assert part < appears < at["sync", "checkpoints/6"] < goes
