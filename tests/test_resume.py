"""Runs that go on: from the last whole checkpoint, exactly; --resume auto, never and must."""

import dataclasses

import pytest
from test_checkpoint import data_file, flip
from test_run import RUN, assert_equal_states, at, rows

from nash_mhc.checkpoint import manifest
from nash_mhc.config import ConfigError
from nash_mhc.config.schema import TrainConfig
from nash_mhc.train import run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("resume") / "run", checkpoint_interval=2)


def test_a_checkpoint_holds_its_own_evaluation(unbroken):
    told = {step: manifest.values_of(unbroken.folder / "checkpoints" / str(step))["evaluation"] for step in (2, 4, 6)}
    assert told == {2: None, 4: None, 6: unbroken.evaluation}


def test_a_run_recovers_from_the_checkpoint_before_the_damaged_one_bit_for_bit(unbroken, tmp_path, capsys):
    at(tmp_path / "run", total_steps=4, checkpoint_interval=2)
    flip(data_file(tmp_path / "run" / "checkpoints" / "4"))
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(tmp_path / "run"), checkpoint_interval=2, resume="must")
    resumed = run(dataclasses.replace(RUN, train=train))
    out = capsys.readouterr().out
    assert "checkpoint 4: damaged, the content of state/" in out
    assert "starting from step 2 of this run" in out
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    losses = [[(r["step"], r["loss"]) for r in rows(f)] for f in (tmp_path / "run", unbroken.folder)]
    assert losses[0] == losses[1]
    assert manifest.numbered(tmp_path / "run" / "checkpoints") == [2, 4, 6]


def test_a_run_without_a_whole_checkpoint_stops_and_keeps_its_rows(tmp_path):
    at(tmp_path / "run", total_steps=2)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    flip(data_file(tmp_path / "run" / "checkpoints" / "2"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no checkpoint is whole \(2\.damaged cannot be used\)"):
            at(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_never_and_must_are_kept_to(unbroken, tmp_path):
    with pytest.raises(ConfigError, match=r"--resume never: \S+ holds checkpoints \(up to step 6\); choose another"):
        at(unbroken.folder, resume="never")
    with pytest.raises(ConfigError, match=r"--resume must: \S+ holds no checkpoint; give the --checkpoint-dir"):
        at(tmp_path / "run", resume="must")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"leave out --resume-from"):
        TrainConfig(resume="never", resume_from="x")
