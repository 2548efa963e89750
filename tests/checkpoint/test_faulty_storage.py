"""Runs on failing storage: training continues, a permanent failure stops cleanly, and no row is lost."""

import contextlib
import functools
import shutil
import time

import pytest
from runs import assert_equal_states, at, config, rows
from saves import full_disk

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.config import ConfigError
from nash_mhc.config.commands import one_line_errors
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.train import run as train
from nash_mhc.train import run_record, trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("unbroken") / "run")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(trainer, "Saver", functools.partial(Saver, first_pause=0.01, longest_pause=0.01))


def during(step, fault):
    """A telemetry that, once it has written the row of `step`, lets the fault happen."""

    class Faulty(Telemetry):
        def write(self, at_step, row, *, file="metrics.jsonl"):
            super().write(at_step, row, file=file)
            if at_step == step and file == "metrics.jsonl":
                fault()

    return Faulty


def test_a_run_whose_directory_vanishes_ends_like_an_undisturbed_one(unbroken, tmp_path, monkeypatch, capsys):
    folder, moments = tmp_path / "run", []

    def vanish():
        shutil.rmtree(folder)
        folder.write_text("")  # and cannot be made again at first

    class MendedAfterOneFailure(Saver):
        def save(self, *args, **options):
            moments.append(time.monotonic())
            super().save(*args, **options)
            moments.append(time.monotonic())

        def _note(self, *args, **options):
            super()._note(*args, **options)
            folder.unlink()

    monkeypatch.setattr(run_record, "Telemetry", during(2, vanish))
    monkeypatch.setattr(trainer, "Saver", functools.partial(MendedAfterOneFailure, first_pause=0.0))
    result = train(config(folder, checkpoint_interval=4, eval_interval=0))
    assert_equal_states(result.state, unbroken.state, rtol=0, atol=0)
    out = capsys.readouterr().out
    assert "metrics.jsonl could not be written (the folder has vanished" in out
    assert f"checkpoint 4 could not be written (Not a directory, {folder / 'checkpoints'}); training continues, retry" in out
    assert f"{folder}: recreated checkpoints, run.json, parameters.txt, which had vanished, without the earlier" in out
    assert f"metrics are written to {folder} again, including the buffered rows" in out
    assert "saved checkpoint 5 after 1 failed attempt" in out  # after the next step, not at the next interval
    assert manifest.saved_steps(folder / "checkpoints") == [5, 6]
    written = rows(folder)
    assert [row["step"] for row in written] == [4, 6]
    assert written[0]["save_ms"] == 0
    (first, last), calls = (moments[0], moments[3]), (moments[1] - moments[0]) + (moments[3] - moments[2])
    assert calls * 500 <= written[1]["save_ms"] <= (last - first) * 1000  # two calls in two steps
    assert {"run.json", "parameters.txt"} <= {path.name for path in folder.iterdir()}
    # What is there is a run like any other.
    again = at(folder, resume="must")
    assert_equal_states(again.state, unbroken.state, rtol=0, atol=0)


def test_a_run_on_a_full_disk_stops_with_a_one_line_error(quick, tmp_path, monkeypatch, capsys):
    first = tmp_path / "run" / "checkpoints" / "2"

    def fill():
        while not (first / manifest.FILE).exists():
            time.sleep(0.01)
        faults.enter_context(full_disk())

    with contextlib.ExitStack() as faults:
        monkeypatch.setattr(run_record, "Telemetry", during(4, fill))
        monkeypatch.setattr(trainer, "Saver", functools.partial(trainer.Saver, attempts=3))
        cfg = config(tmp_path / "run", checkpoint_interval=2, eval_interval=0)
        assert one_line_errors(lambda: train(cfg, quiet=True) and 0) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "stopping after 3 failed attempts in a row; the latest complete checkpoint is step 2" in err
    assert [row["step"] for row in rows(tmp_path / "run")] == [2, 4, 6]  # it has trained on, and these files had room
    assert manifest.problem(first) is None
    assert manifest.saved_steps(first.parent) == [2]


def test_an_unwritable_directory_is_refused_at_the_start(tmp_path):
    (tmp_path / "run" / "run.json").mkdir(parents=True)  # no file can take its place
    with pytest.raises(ConfigError, match=r"--checkpoint-dir \S+run: cannot be written \(Is a directory\); "):
        at(tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.part")) + list((tmp_path / "run").glob("metrics.jsonl"))


def test_rows_wait_while_the_disk_is_full(tmp_path, messages):
    telemetry = Telemetry(tmp_path)
    telemetry.write(1, {"loss": 1.0})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "kept")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # every write: no space left on device
    for step in (2, 3):
        telemetry.write(step, {"loss": 1.0})
    telemetry.write(3, {"eval/loss": 1.0}, file="eval.jsonl")
    assert messages == [
        f"metrics.jsonl could not be written (No space left on device, {tmp_path}); buffering its rows, training continues"
    ]
    (tmp_path / "kept").replace(tmp_path / "metrics.jsonl")
    telemetry.write(4, {"loss": 1.0})
    assert messages[1:] == [f"metrics are written to {tmp_path} again, including the buffered rows"]
    telemetry.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert len(messages) == 2


def test_a_row_is_never_written_partly(tmp_path, messages):
    telemetry = Telemetry(tmp_path)
    with full_disk():
        for step in range(1, 4):
            telemetry.write(step, {"losses": [1.5] * 5000})  # 25,000 bytes: the second finds room for a part
    assert [row["step"] for row in rows(tmp_path)] == [1]
    telemetry.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert sum("could not be written (File too large" in line for line in messages) == 1


def test_lost_rows_are_reported(tmp_path, messages):
    (tmp_path / "run").mkdir()
    telemetry = Telemetry(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    telemetry.write(1, {"loss": 1.0})
    telemetry.close()
    assert messages[-1] == f"1 row of metrics could not be written to {tmp_path / 'run'}"
