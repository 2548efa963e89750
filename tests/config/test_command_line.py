"""Help, a command's own flags, exit codes, and what the commands themselves make of their arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import yaml
from settings import REQUIRED

from nash_mhc.config import commands, parsing, presets
from nash_mhc.config.keys import further
from nash_mhc.config.schema import ConfigError
from nash_mhc.train.inferred_settings import infer_settings


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as caught:
        parsing.parse(["--batchsize", "-h"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m nash_mhc.train ")
    assert out.count("\n  python -m nash_mhc.train ") == 3, "three examples"
    assert max(map(len, out.splitlines())) <= (100 if columns == "200" else 80)
    words = set(out.replace(",", " ").split())
    shown = [k for k in parsing.keys().values() if k.section not in further()]
    flags = {k.flag for k in shown} | set(REQUIRED)
    assert flags | {"--config", "--print-config", "--help", "-h", "--use-small-model"} <= words
    flat = " ".join(out.split())
    for key in shown:
        assert key.metadata["help"] in flat
        assert all(choice in flat for choice in key.metadata["choices"] or ())
    assert f"{parsing.keys()['data.batch_size'].metadata['help']} [{presets.run().data.batch_size}]" in flat
    for section in ("data", "train", "optim", "mesh", "model"):
        assert f" ({section}.*):\n" in out


def test_help_of_a_section(capsys):
    with pytest.raises(SystemExit):
        parsing.parse(["--help"])
    whole = capsys.readouterr().out
    for section in {*parsing.sections(), *further()}:
        with pytest.raises(SystemExit) as caught:
            parsing.parse(["--help", section])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        mine = [key for key in parsing.keys().values() if key.section == section]
        assert mine and all(f"  {key.flag} " in out for key in mine)
        assert out.count("\n  --") == len(mine)
        assert (f"--help {section} " in whole) == (section in further()) == (f" ({section}.*):" not in whole)
    with pytest.raises(ConfigError, match=r"^--help optm: no such section; did you mean optim\?$"):
        parsing.parse(["--help", "optm"])


def own(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--iters", type=int, default=3, help="timed steps")
    group.add_argument("--quick", action="store_true")


def test_own_flags_of_a_command(capsys):
    argv = ["--mesh-data", "-1", "--iters", "5", "dataset=a b", "--seed=2", "--quick", "--seed", "4"]
    parsed = parsing.parse(argv, own=own)
    assert vars(parsed.own) == {"iters": 5, "quick": True}
    config = parsed.config
    assert (config.mesh.data, config.data.dataset, config.train.seed) == (-1, "a b", 4)
    assert parsing.parse([], own=own).own.iters == 3
    for argv, message in [
        (["--iters", "x"], "--iters: invalid int value: 'x'"),
        (["--iters"], "--iters: expected one argument"),
        (["--iter", "3"], "unknown flag --iter; did you mean --iters?"),
        (["--batchsize", "3"], "unknown flag --batchsize; did you mean --batch-size?"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parsing.parse(argv, own=own)
        assert str(caught.value) == message
    with pytest.raises(SystemExit):
        parsing.parse(["--help"], own=own)
    out = capsys.readouterr().out
    assert "timed steps" in out and "--batch-size" in out and out.count("usage:") == 1


def test_one_line_errors(capsys):
    def mistake() -> int:
        raise ConfigError("two\nlines")

    def interrupted() -> int:
        raise KeyboardInterrupt

    def broken() -> int:
        raise ZeroDivisionError

    assert commands.one_line_errors(lambda: 0) == 0
    assert commands.one_line_errors(lambda: 3) == 3
    assert commands.one_line_errors(mistake) == 2
    assert capsys.readouterr() == ("", "error: two lines\n")
    assert commands.one_line_errors(interrupted) == 130
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        commands.one_line_errors(broken)


def test_the_folder_of_a_run_needs_no_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    parse = lambda *argv: parsing.parse(argv, folder="train.checkpoint_dir")
    for name in ("runs/notes", "./notes", "gs://bucket/run", "there"):
        assert parse("--seed", "1", name).config == parsing.parse(["--checkpoint-dir", name, "--seed", "1"]).config
    assert parse("runs/notes").origins["train.checkpoint_dir"] == "argument runs/notes"
    for two in (["runs/a", "runs/b"], ["--checkpoint-dir", "runs/a", "runs/b"], ["runs/b", "--checkpoint-dir", "runs/a"]):
        with pytest.raises(ConfigError, match="two folders were given, runs/a and runs/b; give only one"):
            parse(*two)
    (tmp_path / "run.yaml").write_text("train:\n  checkpoint_dir: null\n")  # as --print-config writes it
    for argv in (["runs/a", "--config", "run.yaml"], ["--config", "run.yaml", "runs/a"]):
        assert parse(*argv).config.train.checkpoint_dir == "runs/a"
    (tmp_path / "there" / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"^there: .*--dataset there"):
        parse("there")
    (tmp_path / "there" / "run.json").write_text("{}")
    assert parse("there").config.train.checkpoint_dir == "there"
    with pytest.raises(ConfigError, match=r"unexpected argument 'smal'; .*runs/smal"):
        parse("smal")  # a typo begins no run
    with pytest.raises(ConfigError, match=r"unexpected argument 'runs/notes'; write --flag value or section.key=value$"):
        parsing.parse(["runs/notes"])  # of a command that has no run's folder


@pytest.mark.parametrize("command", ["bench step", "bench quality", "data prepare", "data train-bpe"])
def test_every_command_with_keys_shows_its_configuration_and_stops(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, name = command.split()
    main = importlib.import_module(f"nash_mhc.{package}.__main__").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [package, name, "--batch-size", "3", "--print-config"])
    assert main() == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["batch_size"] == 3
    assert not list(tmp_path.iterdir())


def test_steps_that_are_typed_go_before_epochs_in_a_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train:\n  epochs: 3\noptim:\n  warmup_steps: 2\n")
    recipe = ["--config", str(tmp_path / "recipe.yaml")]
    parsed = parsing.parse([*recipe, "--total-steps", "40"])
    assert (parsed.config.train.epochs, parsed.config.train.total_steps) == (None, 40)
    assert parsed.given["train.epochs"] is None
    assert parsing.parse(recipe).config.train.epochs == 3
    (tmp_path / "steps.yaml").write_text("train:\n  total_steps: 40\n")
    assert parsing.parse(["--config", str(tmp_path / "steps.yaml"), "--epochs", "2"]).config.train.epochs == 2
    with pytest.raises(ConfigError, match=r"^--epochs 2 and --total-steps 40 [^(]*$"):
        parsing.parse(["--epochs", "2", "--total-steps", "40"])


def test_a_model_to_start_from_that_is_not_there_is_said_before_anything_else(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--init-from \S+Qwen: no such folder; .* \(hf download OWNER/NAME --local-dir \S+Qwen\)"
    ):
        parsing.parse(["--init-from", str(tmp_path / "Qwen")], found=infer_settings)
