"""What can happen to one of the two processes of a run, with real signals and real files: killed, frozen, its disk gone
or full, started with other flags. It is named and all leave, or the run recovers; a resume is bit-equal."""

import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from runs import rows
from training_process import arrays, pair

from nash_mhc.runtime.signals import TRY_AGAIN

STEPS = 120
FLAGS = f"--mesh-fsdp 2 --total-steps {STEPS} --checkpoint-interval 20 --log-interval 10 --schedule constant --warmup-steps 0"
PATIENCE_S, LATE_S = 20, 90  # no process may wait longer than both together
VIEWS = ("first", "second")


def start(place, *flags, second=None, disks=None, **env):
    """Each process reaches the run's folder by a relative path and a link of its own: as long as that is there, it has
    its disk."""
    (place / "disk").mkdir(parents=True, exist_ok=True)
    for view in VIEWS:
        (place / view).mkdir(exist_ok=True)
        (place / view / "disk").unlink(missing_ok=True)
        (place / view / "disk").symlink_to(place / (disks or {}).get(view, "disk"))
    env = {"NO_EVALUATION": "1", "IMPATIENT": "1", "WORK_IN": str(place / "first")} | env
    more = {"WORK_IN": str(place / "second")} | (second or {})
    return pair(Path("disk/run"), *FLAGS.split(), f"--stall-timeout={PATIENCE_S}", *flags, second=more, **env)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    place = tmp_path_factory.mktemp("faults")
    both = start(place)
    assert [life.end() for life in both] == [0, 0], both[0].said + both[1].said
    return place / "disk" / "run"


def assert_resumed_bit_for_bit(place, unbroken):
    both = start(place)
    assert [life.end() for life in both] == [0, 0], both[0].said + both[1].said
    assert_same(place, unbroken)


def assert_same(place, unbroken):
    found, wanted = arrays(place / "disk" / "run", STEPS), arrays(unbroken, STEPS)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    losses = [[(row["step"], row["loss"]) for row in rows(folder)] for folder in (place / "disk" / "run", unbroken)]
    assert losses[0] == losses[1]


def last_line(life):
    return life.said.splitlines()[-1]


def assert_left(life, began):
    assert life.end() == TRY_AGAIN, life.said
    assert time.monotonic() - began < PATIENCE_S + LATE_S
    assert "Traceback" not in life.said


def lost(kind, place, who, both, unbroken):
    """One process is killed or frozen: the other one names it and leaves, and so does the frozen one when it wakes."""
    both[0].until(f"step  30/{STEPS}")
    began = time.monotonic()
    both[who].send(kind)
    assert_left(both[1 - who], began)
    assert last_line(both[1 - who]).startswith(f"error: process {who} ("), both[1 - who].said
    if kind == signal.SIGSTOP:
        both[who].send(signal.SIGCONT)
    assert both[who].end() == (-signal.SIGKILL if kind == signal.SIGKILL else TRY_AGAIN), both[who].said
    assert_resumed_bit_for_bit(place, unbroken)


def take_disk(fault, place, who, both):
    if fault == "gone":
        (place / VIEWS[who] / "disk").unlink()
    else:  # no file of this process may grow over 20 kB: its part of a checkpoint does, its log does not
        resource.prlimit(both[who].pid, resource.RLIMIT_FSIZE, (20_000, -1))


def give_back(fault, place, who, both):
    if fault == "gone":
        (place / VIEWS[who] / "disk").symlink_to(place / "disk")
    else:
        resource.prlimit(both[who].pid, resource.RLIMIT_FSIZE, (-1, -1))


def without_disk_for_a_while(fault, place, who, unbroken):
    both = start(place)
    both[0].until(f"step  30/{STEPS}")
    take_disk(fault, place, who, both)
    both[0].until(f"could not be written (process {who}: ")
    give_back(fault, place, who, both)
    assert [life.end() for life in both] == [0, 0], both[0].said + both[1].said
    assert "failed attempt" in both[0].said
    assert_same(place, unbroken)


def started_with(flags, who, place, message):
    began = time.monotonic()
    both = pair(place / "run", *FLAGS.split(), flags_of={who: flags}, NO_EVALUATION="1")
    assert [life.end() for life in both] == [2, 2], both[0].said + both[1].said
    assert time.monotonic() - began < 30 + LATE_S
    for life in both:
        assert message in last_line(life)
        assert "in process 0" in last_line(life)
        assert "in process 1" in last_line(life)
        assert life.said.count("\n") == 1, life.said
    assert not (place / "run").exists()


def test_a_frozen_coordinator_is_named_and_the_resume_is_bit_equal(unbroken, tmp_path):
    lost(signal.SIGSTOP, tmp_path, 0, start(tmp_path), unbroken)


def test_a_temporarily_full_disk_of_one_process_loses_nothing(unbroken, tmp_path):
    without_disk_for_a_while("full", tmp_path, 1, unbroken)


def test_a_different_batch_size_is_named(tmp_path):
    started_with(["--batch-size", "4"], 1, tmp_path, "--batch-size 8 in process 0, 4 in process 1")


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_and_the_resume_is_bit_equal(kind, who, unbroken, tmp_path):
    lost(kind, tmp_path, who, start(tmp_path), unbroken)


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["gone", "full"])
def test_a_temporarily_missing_disk_loses_nothing(fault, who, unbroken, tmp_path):
    without_disk_for_a_while(fault, tmp_path, who, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["gone", "full"])
def test_a_permanently_missing_disk_ends_the_run_and_names_the_process(fault, who, unbroken, tmp_path):
    both = start(tmp_path, ATTEMPTS="3")
    both[0].until(f"step  30/{STEPS}")
    began = time.monotonic()
    take_disk(fault, tmp_path, who, both)
    assert [life.end() for life in both] == [2, 2], both[0].said + both[1].said
    assert time.monotonic() - began < PATIENCE_S + LATE_S
    for life in both:
        assert f"could not be written (process {who}: " in last_line(life)
        assert "Traceback" not in life.said
    assert_resumed_bit_for_bit(tmp_path, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_with_a_hanging_disk_is_named(who, unbroken, tmp_path):
    """What a network disk does whose server is gone: whoever touches it waits."""
    both = start(tmp_path, STUCK_AT_SAVE=str(40 * (who == 0)), second={"STUCK_AT_SAVE": str(40 * (who == 1))})
    both[0].until(f"step  40/{STEPS}")
    began = time.monotonic()
    for life in both:
        assert_left(life, began)
        assert f"process {who} " in last_line(life)
    assert_resumed_bit_for_bit(tmp_path, unbroken)


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_with_hanging_data_is_named(who, tmp_path):
    both = start(tmp_path, STUCK_AT_DATA="1" * (who == 0), second={"STUCK_AT_DATA": "1" * (who == 1)})
    both[who].until("stuck")
    began = time.monotonic()
    for life in both:
        assert_left(life, began)
        assert re.search(rf"process {who} \(.*\) is stuck in phase 'preparing the data'", last_line(life))


@pytest.mark.long
def test_a_directory_that_is_not_shared_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    both = start(tmp_path, disks={"second": "other"})
    assert [life.end() for life in both] == [2, 2], both[0].said + both[1].said
    for life in both:
        assert "--checkpoint-dir disk/run" in last_line(life)
        assert "share" in last_line(life)


@pytest.mark.long
def test_different_data_files_are_refused(tmp_path):
    for number, view in enumerate(VIEWS):
        (tmp_path / view).mkdir()
        (tmp_path / view / "text.txt").write_text(f"{number} is what it begins with.\n" * 1000)
    both = start(tmp_path, "--dataset", "text.txt")
    assert [life.end() for life in both] == [2, 2], both[0].said + both[1].said
    for life in both:
        assert "the files of text.txt" in last_line(life)


OTHER_FLAGS = {
    "--batch-size": ["--batch-size", "4"],
    "--seed": ["--seed", "1"],
    "--learning-rate": ["--learning-rate", "1e-3"],
    "--total-steps": ["--total-steps", "100"],
    "--max-grad-norm": ["--max-grad-norm", "0.5"],
    "--model-width": ["--model-width", "64"],
    "--checkpoint-dir": ["--checkpoint-dir", "elsewhere"],
    "--mesh-fsdp": ["--mesh-fsdp", "1", "--mesh-data", "2"],
}


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_different_flags_are_named(flag, who, tmp_path):
    started_with(OTHER_FLAGS[flag], who, tmp_path, f"{flag} ")
