"""Wall time splits into parts that add up, across restarts."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
from runs import RUN, at, rows

from nash_mhc.config.schema import TelemetryConfig
from nash_mhc.telemetry import wall_clock
from nash_mhc.telemetry.wall_clock import PARTS, WallClock
from nash_mhc.train import run


@pytest.fixture
def calendar(monkeypatch):
    """A clock that is set by hand; the one that is never set runs beside it."""
    now = SimpleNamespace(at=1000.0)
    monkeypatch.setattr(wall_clock, "time", SimpleNamespace(time=lambda: now.at, monotonic=lambda: now.at - 900.0))
    return now


def test_every_moment_has_one_part(calendar):
    clock = WallClock(started=990.0)
    for part, seconds in (("compile", 5), ("input", 1), ("step", 30)):
        clock.enter(part)
        calendar.at += seconds
    with clock.during("evaluation"):
        calendar.at += 4
        with clock.during("checkpoint"):
            calendar.at += 2
    calendar.at += 10
    found = clock.seconds()
    assert found == dict.fromkeys(PARTS, 0.0) | {
        "start": 10, "compile": 5, "input": 1, "step": 40, "evaluation": 4, "checkpoint": 2,
    }  # fmt: skip
    assert clock.row()["goodput"] == pytest.approx(40 / 62)


def at_row(*, step=40.0, down=0.0):
    """A row of a run whose checkpoint was saved 40 s after its start: the time of everything since is in it."""
    return {f"time/{part}": 0.0 for part in PARTS} | {"time/step": step, "time/down": down}


@pytest.mark.parametrize(
    ("written", "row", "lost", "checkpoint", "down"),
    [
        (1050.0, at_row(step=80.0), 40.0, 0.0, 120.0),  # killed 40 s after its last checkpoint, the next start 120 s later
        (1050.0, at_row(step=30.0), 0.0, 10.0, 150.0),  # asked to stop: it ended with the checkpoint
        (1050.0, at_row(step=60.0, down=90.0), 20.0, 0.0, 140.0),  # killed in a later start, which had come 90 s later
        (None, {}, 0.0, 0.0, 160.0),  # what cannot be found out is not made up
        (9999.0, at_row(step=9999.0), 0.0, 160.0, 0.0),  # a folder that was copied, and has later times
    ],
)
def test_a_resumed_run_counts_lost_and_down_time(calendar, written, row, lost, checkpoint, down):
    saved = {"at": 1040.0, "seconds": {"step": 40.0}}
    calendar.at = 1200.0
    clock = WallClock()
    clock.resume(saved, written=written, row=row)
    found = clock.seconds()
    assert (found["lost"], found["checkpoint"], found["down"]) == (lost, checkpoint, down)
    assert sum(found.values()) == 1200.0 - 1000.0  # since the first start, whatever became of it


def test_a_clock_that_is_behind_gives_no_negative_time(calendar):
    clock = WallClock()
    clock.resume({"at": 2000.0, "seconds": {"step": 40.0}}, written=2010.0, row=at_row(step=60.0))
    calendar.at += 5.0
    assert clock.seconds() == dict.fromkeys(PARTS, 0.0) | {"step": 40.0, "start": 5.0}


def test_the_parts_add_up_over_a_kill_and_a_resume(tmp_path):
    def killed(step):
        while step == 5 and not (tmp_path / "checkpoints" / "3" / "manifest.json").exists():
            time.sleep(0.01)
        if step == 5:
            time.sleep(0.05)  # its row comes after the checkpoint, by more than the milliseconds to which it rounds each part
        if step == 6:
            raise MemoryError

    settings = {"total_steps": 8, "log_interval": 1, "checkpoint_interval": 3}
    began = time.time()
    with pytest.raises(MemoryError):
        at(tmp_path, **settings, each_step=killed)
    time.sleep(0.5)
    at(tmp_path, **settings)
    last = rows(tmp_path)[-1]
    found = {part: last[f"time/{part}"] for part in PARTS}
    wall = (tmp_path / "metrics.jsonl").stat().st_mtime - began
    assert sum(found.values()) == pytest.approx(wall, rel=0.02, abs=0.1)
    assert found["down"] >= 0.5
    assert min(found[part] for part in ("start", "compile", "input", "step", "evaluation", "checkpoint", "lost")) > 0.0
    assert last["goodput"] == pytest.approx(found["step"] / sum(found.values()), abs=1e-3)
    # A start from another folder's checkpoint is another run, with a clock of its own.
    began = time.time()
    at(tmp_path / "next", resume_from=str(tmp_path), total_steps=10, log_interval=1)
    last = rows(tmp_path / "next")[-1]
    wall = (tmp_path / "next" / "metrics.jsonl").stat().st_mtime - began
    assert sum(last[f"time/{part}"] for part in PARTS) == pytest.approx(wall, rel=0.02, abs=0.1)
    assert last["time/down"] == last["time/lost"] == 0.0


def test_json_output_contains_the_rows_of_the_files(tmp_path, capsys):
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(tmp_path / "run"))
    cfg = dataclasses.replace(RUN, train=train, telemetry=TelemetryConfig(sample_tokens=0, log_format="json"))
    run(cfg)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(entry) >= {"event", "at"} for entry in said)
    of = lambda event: [{k: v for k, v in e.items() if k not in ("event", "at")} for e in said if e["event"] == event]
    assert of("metrics") == rows(tmp_path / "run")
    held_out = rows(tmp_path / "run", "eval.jsonl")
    assert [{k: v for k, v in e.items() if not k.startswith("floor_")} for e in of("evaluation")] == held_out
    assert any("compiled in" in entry["text"] for entry in of("message"))
    assert of("training") == [{"step": 0}]
