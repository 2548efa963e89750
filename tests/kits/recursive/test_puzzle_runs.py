"""Runs on puzzles learn, resume with their carry, and report how many puzzles are solved."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest
from runs import assert_equal_states, at

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import presets
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.data.inspection import of_run
from nash_mhc.evaluate import __main__ as evaluate
from nash_mhc.generate import __main__ as generate
from nash_mhc.kits.recursive.puzzles.maze import OPEN, PATH
from nash_mhc.kits.recursive.puzzles.rows import PuzzleRows, find_kind
from nash_mhc.loading.load import load
from nash_mhc.model.architectures import architecture_of
from nash_mhc.train.__main__ import next_commands
from nash_mhc.train.inferred_settings import infer_settings

PUZZLE = presets.run("sudoku4", "recursive")


@pytest.fixture(scope="module")
def solving(tmp_path_factory):
    """Return (configuration, run). At any step, some puzzles are between their first and last pass.

    One cycle per pass, and AdamW, halve the compilation.
    """
    folder = tmp_path_factory.mktemp("puzzles")
    model = dataclasses.replace(PUZZLE.model, width=32, ffn=64, inner_cycles=1, outer_cycles=1, most_passes=4)
    data = dataclasses.replace(PUZZLE.data, batch_size=16, cache_dir=str(folder / "cache"))
    train = dataclasses.replace(
        PUZZLE.train, total_steps=30, eval_interval=15, eval_batches=4, checkpoint_interval=10, log_interval=5
    )
    optim = dataclasses.replace(PUZZLE.optim, warmup_steps=5, optimizer="adamw")
    cfg = dataclasses.replace(PUZZLE, model=model, data=data, train=train, optim=optim)
    return cfg, at(folder / "run", cfg)


def test_a_run_learns_and_measures_whole_puzzles(solving):
    _, run = solving
    found = run.evaluation
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["objective"] == pytest.approx(rows[-1]["loss"] + rows[-1]["loss/stopping"], rel=1e-5)
    assert {"eval/exact", "eval/exact_stopping", "eval/passes", "eval/exact_after/1", "eval/exact_after/4"} <= set(found)
    assert found["eval/exact"] == found["eval/exact_after/4"] <= found["eval/accuracy"] <= 1
    proposed = next_commands(run)  # each must work, and this model cannot generate text
    assert f"-m nash_mhc.evaluate {run.folder} --tasks held_out\n" in proposed and "generate" not in proposed


def test_inspect_shows_the_question_beside_the_solution(solving):
    cfg, run = solving
    title, head, *lines = of_run(RunFolder(run.folder), 2, 3).splitlines()
    source = PuzzleRows("sudoku4", seed=cfg.train.seed, split="train", cache_dir=cfg.data.cache_dir)
    row, kind = source[cfg.data.batch_size + 3], source.kind
    assert "step 2, row 3" in title and head.split() == ["question", "solution"]
    given, answers = zip(*(line.split() for line in lines), strict=True)
    np.testing.assert_array_equal(kind.tokenizer().encode("".join(given)), row.inputs)
    np.testing.assert_array_equal(kind.tokenizer().encode("".join(answers)), row.targets)


def test_a_resumed_run_continues_with_its_carry(solving, tmp_path):
    cfg, run = solving
    passes = np.asarray(run.state.carry.passes)
    assert 0 < passes.min() < passes.max() <= 4 or (passes != 4).any()  # some are in progress
    copy = shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "30")
    assert_equal_states(at(copy, cfg).state, run.state, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"data.batch_size \(16 in that run, 8 in this command\)"):
        smaller = dataclasses.replace(cfg.data, batch_size=8)
        at(copy, dataclasses.replace(cfg, data=smaller, train=dataclasses.replace(cfg.train, grad_accum=2)))


@pytest.mark.long
def test_a_mesh_resumes_with_the_carry(solving, tmp_path):
    cfg, run = solving
    copy = shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "30")
    meshed = at(copy, dataclasses.replace(cfg, mesh=MeshConfig(data=2, fsdp=2, tp=2)))
    for name in ("inputs", "targets", "passes", "taken", "done"):
        np.testing.assert_array_equal(getattr(meshed.state.carry, name), getattr(run.state.carry, name))
    np.testing.assert_allclose(meshed.evaluation["eval/loss"], run.evaluation["eval/loss"], rtol=2e-2)


def test_evaluate_agrees_with_training_and_generate_refuses(solving, monkeypatch, capsys):
    _, run = solving
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run.folder), "--tasks", "held_out", "--batch-size", "16"])
    assert evaluate.main() == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    (loss,) = [line[-2] for line in shown if "loss" in line]
    assert loss == f"{run.evaluation['eval/loss_ema']:.4f}"  # the averaged weights are the run's
    assert {"exact", "exact_stopping", "passes", "accuracy", "exact_after/1"} <= {line[-3] for line in shown if len(line) > 2}
    model = load(run.folder).config.model
    with pytest.raises(ConfigError, match="cannot generate text"):
        architecture_of(model).empty_cache(model, 1, 8, "float32")


def test_a_given_grid_is_solved_and_checked(solving, monkeypatch, capsys):
    _, run = solving

    def command(*argv):
        monkeypatch.setattr(sys, "argv", ["generate", str(run.folder), *argv])
        return one_line_errors(generate.main), *capsys.readouterr()

    grid = "..2.4......1.3.."
    code, out, err = command("--puzzle", grid)
    *lines, verdict = out.splitlines()
    assert (code, [len(line) for line in lines]) == (0, [4] * 4)
    answer = "".join(lines)
    right = answer == "3124421324311342"  # the only solution
    assert verdict == "valid" if right else verdict.startswith("not valid: ")
    assert command("--puzzle", "\n".join(grid[i : i + 4] for i in range(0, 16, 4)))[1] == out  # in lines, too
    for text, says in (
        ("..2.4", "has 5 cells, but this model solves grids of 16"),
        ("x" * 16, "'x' is not a symbol"),
        ("11" + "." * 14, "no solution"),
        ("." * 16, "more than one solution"),
    ):
        code, out, err = command("--puzzle", text)
        assert (code, out) == (2, "") and says in err.splitlines()[-1]
    assert command("--puzzle", grid, "--prompt", "x")[0] == 2


def test_answers_are_checked_by_the_rules(tmp_path):
    four, maze = find_kind("sudoku4"), find_kind("maze9x9")
    cells = four.tokenizer().encode("..2.4......1.3..")
    judge = lambda answer: four.mistake(cells, four.tokenizer().encode(answer))
    assert judge("3124421324311342") is None
    assert "1 of the given cells is changed" in judge("3134421324311342")
    assert "lacks a digit" in judge("3124421324311344")
    rows = PuzzleRows("maze9x9", seed=0, split="validation", cache_dir=tmp_path, sizes=(3, 3))
    given, right = rows.take([0])[:2]
    assert maze.mistake(given[0], right[0]) is None
    way = np.flatnonzero(right[0] == PATH)
    assert "do not connect" in maze.mistake(given[0], np.where(np.arange(81) == way[0], given[0], right[0]))
    opened = np.flatnonzero(right[0] == OPEN)
    assert "not the shortest" in maze.mistake(given[0], np.where(np.arange(81) == opened[-1], PATH, right[0]))
    assert "changed" in maze.mistake(given[0], np.zeros(81, np.int32))


def test_the_dataset_sets_cells_and_tokenizer(solving, tmp_path):
    given = ["--model-kind", "recursive", "--model-size", "sudoku4", "--cache-dir", str(tmp_path)]
    parsed = parse([*given, "--dataset", "sudoku9"], found=infer_settings).config
    assert (parsed.data.seq_len, parsed.data.tokenizer, parsed.model.cells, parsed.model.vocab_size) == (81, "sudoku9", 81, 11)
    rows = PuzzleRows("sudoku4", seed=0, split="train", cache_dir=tmp_path).take(np.arange(40))
    lines = [",".join("".join(map(str, grid)) for grid in both) for both in zip(rows.inputs, rows.targets, strict=True)]
    (tmp_path / "mine.csv").write_text("question,answer\n" + "\n".join(lines) + "\n")
    own = parse([*given, "--dataset", str(tmp_path / "mine.csv"), "--validation-fraction", "0.3"], found=infer_settings).config
    assert (own.data.seq_len, own.data.tokenizer, own.model.cells) == (16, "sudoku4", 16)
    assert own.model == PUZZLE.model
    small, _ = solving  # reuses its compiled programs
    train = dataclasses.replace(small.train, total_steps=2, eval_batches=1)
    data, optim = dataclasses.replace(own.data, batch_size=16), dataclasses.replace(small.optim, warmup_steps=0)
    cfg = dataclasses.replace(small, data=data, optim=optim, train=train)
    assert np.isfinite(at(tmp_path / "run", cfg).evaluation["eval/loss"])


def test_text_for_puzzles_and_puzzles_for_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--dataset sudoku9: .*--objective puzzle"):
        parse(["--dataset", "sudoku9"], found=infer_settings)
    text = dataclasses.replace(PUZZLE, data=dataclasses.replace(PUZZLE.data, dataset="stories", tokenizer="bytes"))
    text = dataclasses.replace(text, model=dataclasses.replace(text.model, vocab_size=257))
    with pytest.raises(ConfigError, match=r"--objective puzzle needs puzzles .*--dataset stories"):
        at(tmp_path / "run", text)
    assert not (tmp_path / "run").exists()
