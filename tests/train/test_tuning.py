"""Runs that end early: --epochs, --patience, the best checkpoint, and the test score."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import small
from runs import RUN, assert_equal_states, at, rows, untrained_run
from sampled import long

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data import __main__ as data
from nash_mhc.loading.load import load
from nash_mhc.train import __main__ as train
from nash_mhc.train.evaluate import Best


def test_the_best_so_far_and_how_long_it_is_ago():
    best = Best()
    for step, loss in enumerate([3.0, 2.0, 2.5, float("nan"), 2.0], start=1):
        best = best.after(step, loss)
    assert (best.loss, best.step, best.since) == (2.0, 2, 3)
    assert Best.of(json.loads(json.dumps(best.to_json()))) == best
    again = Best().after(5, 2.0)
    assert again.after(5, 2.0) == again  # a repeated evaluation counts once


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Sums of two digits, so few that the model memorizes them."""
    file = tmp_path_factory.mktemp("questions") / "sums.jsonl"
    records = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(8)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def tuned(questions, **changes):
    cfg = small.config(
        data__dataset=str(questions), data__cache_dir=str(questions.parent / "cache"), data__validation_fraction=0.3,
        optim__schedule="constant", optim__warmup_steps=0, optim__learning_rate=2e-3, telemetry__sample_tokens=12,
        telemetry__sample_prompt="user", train__eval_interval=2, train__checkpoint_interval=0, train__patience=3,
        train__total_steps=200,
    )  # fmt: skip
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


@pytest.fixture(scope="module")
def ended(questions, tmp_path_factory):
    return at(tmp_path_factory.mktemp("tuning") / "run", tuned(questions))


def test_a_run_ends_when_nothing_gets_better_and_with_its_best(ended):
    scored = {row["step"]: row["eval/loss"] for row in rows(ended.folder, "eval.jsonl")}
    best = min(scored, key=scored.get)
    assert list(scored) == list(range(2, best + 7, 2))  # three evaluations after the best one
    assert all("eval/entropy" in row and "eval/accuracy" in row for row in rows(ended.folder, "eval.jsonl"))
    assert int(ended.state.step) == best + 6
    loaded = load(ended.folder)
    assert loaded.step == best
    assert_equal_states(loaded.model, ended.state.model)
    with pytest.raises(AssertionError):
        assert_equal_states(load(ended.folder, best + 6).model, ended.state.model)
    samples = {row["step"]: row["sample"] for row in rows(ended.folder, "eval.jsonl")}
    assert ended.sample == samples[best]
    assert samples[best] != samples[best + 6]  # otherwise it could be the sample of the last step
    result = json.loads((ended.folder / "result.json").read_text())
    assert result["step"] == best and result["evaluation"]["eval/loss"] == scored[best]
    assert [set(row) for row in result["answers"]] == [{"prompt", "response", "before", "after"}] * 3
    for row in result["answers"]:
        a, b = row["prompt"].removeprefix("user: ").split("=")[0].split("+")
        assert row["response"].strip() == str(int(a) + int(b))


def test_a_stopped_run_ends_where_the_unbroken_one_does(ended, questions, tmp_path):
    copy = shutil.copytree(ended.folder, tmp_path / "run")
    steps = sorted(int(path.name) for path in (copy / "checkpoints").iterdir() if path.name.isdecimal())
    for step in steps[1:]:
        shutil.rmtree(copy / "checkpoints" / str(step))
    gone_on = at(copy, tuned(questions))
    assert rows(copy, "eval.jsonl") == rows(ended.folder, "eval.jsonl")
    assert_equal_states(gone_on.state, ended.state)
    # The run is finished: only more patience trains it further.
    seen = []
    at(copy, tuned(questions), each_step=seen.append)
    assert seen == []
    at(copy, tuned(questions, patience=4), each_step=seen.append)
    assert seen


def test_passes_over_the_data_are_steps(questions, tmp_path):
    cfg = tuned(questions, epochs=2.5, patience=0, eval_interval=0)
    seen = []
    result = at(tmp_path / "run", cfg, each_step=seen.append)
    config = RunConfig.from_dict(json.loads((result.folder / "run.json").read_text())["config"])
    (share,) = [value for name, value in rows(result.folder)[-1].items() if name.startswith("epochs/")]
    assert config.train.total_steps == len(seen)
    a_step = share / len(seen)
    assert share - a_step < 2.5 <= share
    with pytest.raises(ConfigError, match=r"--epochs .* stories has no known end; .*--total-steps"):
        at(tmp_path / "other", dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, epochs=1.0)))
    with pytest.raises(ConfigError, match="fewer than --warmup-steps"):
        slow = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, warmup_steps=100))
        at(tmp_path / "other", slow)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("recipe", ["legal-cot", *long("sft-lora")])
def test_recipes_run(recipe, tmp_path, monkeypatch):
    """With a smaller base, fewer questions and steps, equal small adapters (to share programs) and no dropout."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    untrained_run(tmp_path / "runs" / "base", small.config())

    def call(command, *argv):
        monkeypatch.setattr(sys, "argv", [command.__name__, *argv])
        assert command.main() == 0

    call(data, "questions", "--out", "questions.jsonl", "--count", "60")
    smaller = "--batch-size 4 --seq-len 256 --epochs 0.25 --warmup-steps 1 --eval-batches 2".split()
    smaller += "--lora-dropout 0 --lora-rank 4 --lora-alpha 8 --lora-targets q_proj,down_proj --sample-tokens 2".split()
    call(train, "runs/tuned", "--config", f"recipes/{recipe}.yaml", *smaller)
    result = json.loads(Path("runs/tuned/result.json").read_text())
    assert result["step"] == RunFolder("runs/tuned").best_step() == load("runs/tuned").step
    assert 0 < result["test"]["test/loss"] < 6 and {"test/entropy", "test/accuracy", "test/perplexity"} <= set(result["test"])
    assert len(result["answers"]) == 3
