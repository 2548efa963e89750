"""A path with a scheme that is not supported is refused by name, wherever a path can be given; nothing is made."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import nash_mhc
from nash_mhc.config import kits
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.keys import keys
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.files import to_path

NAME = "s3://bucket/run"
# Each command with every path that it takes; X stands for the path in question.
COMMANDS = [
    ("train", "X"),
    *[("train", flag, "X") for flag in ("--config", *(key.flag for key in keys().values() if key.metadata["path"]))],
    ("train", "--dataset", "X:0.5", "--dataset", "stories:0.5"),
    ("train", "--dataset", "hf:X"),
    ("plan", "--chip", "v6e-8", "--init-from", "X"),
    ("plan", "--chip", "v6e-8", "--chips", "X"),
    ("plan", "--chip", "v6e-8", "--json", "X"),
    ("bench", "step", "--json", "X"),
    ("bench", "corpus", "--out", "X"),
    ("generate", "X"),
    ("generate", "--checkpoint-dir", "X"),
    ("generate", "runs/x", "--prompts", "X"),
    ("generate", "runs/x", "--out", "X"),
    ("evaluate", "X"),
    ("evaluate", "runs/x", "--json", "X"),
    ("report", "X"),
    ("report", "runs/x", "--out", "X"),
    ("checkpoint", "list", "X"),
    ("checkpoint", "verify", "X"),
    ("data", "prepare", "--out", "X"),
    ("data", "prepare", "--dataset", "X", "--out", "prepared"),
    ("data", "inspect", "X"),
    ("data", "train-bpe", "--out", "X"),
    ("data", "questions", "--out", "X"),
    ("hub", "import", "X", "--out", "out"),
    ("hub", "import", "model", "--out", "X"),
    ("hub", "import", "model", "--out", "out", "--base", "X"),
    ("hub", "export", "X", "--out", "out"),
    ("hub", "export", "runs/x", "--out", "X"),
    ("hub", "pack", "X", "--out", "out"),
    ("hub", "pack", "runs/x", "--out", "X"),
    ("hub", "check", "X", "model"),
    ("hub", "check", "model", "X"),
    ("hub", "check", "model", "model", "--text", "X"),
    ("distill", "cache", "--teacher", "X", "--out", "out"),
    ("distill", "cache", "--teacher", "runs/x", "--out", "X"),
    ("distill", "chain", "X", "--out", "out"),
    ("distill", "chain", "chain.yaml", "--out", "X"),
    ("doctor", "--quick", "X"),
    ("doctor", "--quick", "--json", "X"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_unknown_scheme_is_refused_by_name(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, *argv = (word.replace("X", NAME) for word in words)
    monkeypatch.setattr(sys, "argv", [command, *argv])
    if command in kits.COMMANDS:
        main = kits.load(kits.COMMANDS[command].main)
    else:
        main = importlib.import_module(f"nash_mhc.{command}.__main__").main
    code = one_line_errors(main)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "s3:// is not supported" in err and NAME in err
    assert list(tmp_path.iterdir()) == []


def test_it_is_refused_in_files_and_by_the_reader_of_runs_too(write):
    from nash_mhc.config.parsing import parse
    from nash_mhc.evaluate.tasks import read_text
    from nash_mhc.kits.distill.chain import read_chain

    for read in (
        lambda: parse(["--config", write(f"data:\n  dataset: {NAME}\n")]),
        lambda: read_chain(Path(write(f"teacher: {NAME}\nstages:\n  - name: one\n", "chain.yaml")), Path("out")),
        lambda: read_text(f"bytes:{NAME}"),
        lambda: to_path(NAME),
    ):
        with pytest.raises(ConfigError, match="s3:// is not supported"):
            read()


@pytest.mark.parametrize(("flag", "taken"), [("--checkpoint-dir", True), ("--init-from", True), ("--dataset", False)])
def test_a_bucket_of_google_holds_runs_and_no_datasets(flag, taken):
    from nash_mhc.config.parsing import parse

    if taken:
        parse([flag, "gs://bucket/run"])
        return
    with pytest.raises(ConfigError, match=r"gs://bucket/run: gs:// is not supported; give a path on this machine$"):
        parse([flag, "gs://bucket/run"])


def test_every_argument_that_names_a_file_or_folder_is_checked():
    """By its source: an argument with such a metavar has one of the two types."""
    for file in Path(nash_mhc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                given = {word.arg: word.value for word in node.keywords}
                if getattr(given.get("metavar"), "value", "") in ("DIR", "FOLDER", "FILE"):
                    type_ = getattr(given.get("type"), "id", None)
                    assert type_ in ("local_path", "run_path"), f"{file.name}:{node.lineno}"
