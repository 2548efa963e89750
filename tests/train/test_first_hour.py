"""The first hour of a new user: printed commands work when pasted, and directories provide settings."""

import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
import small
from command_process import CommandProcess
from corpora import prepared, save_tokenizer, stories, write_jsonl
from runs import RUN, at, untrained_run
from training_process import DENSE

from nash_mhc import __main__ as commands
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import parsing
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.humanize import duration, short
from nash_mhc.config.schema import ConfigError, DataConfig, TrainConfig
from nash_mhc.data.inspection import of_run, summarize_epochs
from nash_mhc.parallel.mesh import describe
from nash_mhc.storage.files import to_path
from nash_mhc.train import __main__ as train
from nash_mhc.train import run
from nash_mhc.train.inferred_settings import infer_settings, recorded_settings

ROOT = Path(__file__).parents[2]
FEW = DENSE[: DENSE.index("--seq-len")]
SMALL = [*FEW, "--batch-size", "8", "--eval-batches", "2", "--total-steps", "2"]
# Only the first run here writes samples, to compile fewer programs.
WITHOUT_SAMPLE = ["--seq-len", "64", "--sample-tokens", "0"]


def typed(line: str, folder: Path, *, shell: bool = True) -> str:
    """Run the line in a shell or a forked process; it must exit with 0 and without warnings."""
    # In an activated environment, commands are printed with a plain `python`; here with its full path.
    elsewhere = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != Path(sys.executable).parent]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(elsewhere)}
    if shell:
        done = subprocess.run(line, shell=True, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False)
    else:
        python, *words = shlex.split(line, comments=True)
        assert python == sys.executable
        done = CommandProcess(words, folder, **env).end()
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert not re.search("warning|error", done.stderr, re.IGNORECASE), done.stderr
    return done.stdout


def proposed(out: str) -> list[str]:
    """The commands behind "Next"."""
    lines = [line.strip() for line in out.partition("Next:")[2].splitlines() if line.strip()]
    for line in lines:
        flags = [word for word in shlex.split(line.partition("   #")[0]) if word.startswith("--")]
        assert len(set(flags)) == len(flags), line
    return lines


@pytest.mark.parametrize("shell", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "shell"])
def test_every_command_that_is_printed_runs_as_it_stands(tmp_path, shell):
    type_ = functools.partial(typed, folder=tmp_path, shell=shell)
    notes = tmp_path / "my notes"
    notes.mkdir()
    for number, text in enumerate(stories(60)):
        (notes / f"{number}.md").write_text(text)
    (notes / "empty.md").write_text("")
    python = shlex.quote(sys.executable)
    quoted = shlex.join(["--dataset", "my notes", *SMALL])
    out = type_(f"{python} -m nash_mhc data train-bpe {quoted} --vocab-size 300 --out 'my tokenizer'")
    assert proposed(out) == [f"{sys.executable} -m nash_mhc.train {quoted} --tokenizer 'my tokenizer'"]
    out = type_(f"{python} -m nash_mhc.data prepare {quoted} --tokenizer 'my tokenizer' --seq_len 64 --out 'my data'")
    assert "60 documents" in out
    assert re.search("61 files, 1 empty document", out)
    (line,) = proposed(out)
    assert line == f"{sys.executable} -m nash_mhc.train --dataset 'my data' {shlex.join(SMALL)}"
    out = type_(f"{line} --checkpoint-dir 'my runs/first one'")
    assert out.startswith("1 x cpu, float32, remat none; ")  # no mesh on one device
    assert re.search(r"\nheld out: \d+ of 60 documents, \d\.\d% of the text", out)
    run = json.loads((tmp_path / "my runs" / "first one" / "run.json").read_text())["config"]
    assert (run["data"]["seq_len"], run["data"]["tokenizer"], run["model"]["vocab_size"]) == (64, "my data/tokenizer", 300)
    generate, report, board, longer = proposed(out)
    assert generate == f"{sys.executable} -m nash_mhc.generate 'my runs/first one'"
    assert type_(f"{generate} --max_tokens 3")
    assert "report.html" in type_(report)
    assert Path(shlex.split(board)[0]).exists()
    out = type_(longer)
    assert "starting from step 2 of this run" in out
    assert "settings changed: train.total_steps 2 -> 20\n" in out  # everything else is as recorded


def test_folders_tell_the_run_what_they_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "a.jsonl", stories(30))
    from nash_mhc.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("tok")
    prepared(Path("data"), "a.jsonl", tokenizer, align=16, seq_len=512, validation_fraction=0.2)
    prepared(Path("other"), "a.jsonl", tokenizer, align=16, seq_len=512, max_documents=9)
    parse = lambda *argv: parsing.parse(argv, found=infer_settings, recorded=recorded_settings, folder="train.checkpoint_dir")
    parsed = parse("--dataset", "data")
    assert (parsed.config.data.seq_len, parsed.config.data.validation_fraction) == (512, 0.2)
    assert (parsed.config.data.tokenizer, parsed.config.model.vocab_size) == ("data/tokenizer", 271)
    assert parsed.origins["data.seq_len"] == "prepared data data"
    assert parsed.origins["model.vocab_size"] == "tokenizer data/tokenizer"
    assert parsed.given == {"data.dataset": "data"}
    # The user's settings win, and the vocabulary follows the tokenizer also without prepared data.
    assert parse("--dataset", "data", "--seq-len", "256").config.data.seq_len == 256
    assert parse("--dataset", "data", "--model-vocab-size", "999").config.model.vocab_size == 999
    assert parse("--tokenizer", "tok").config.model.vocab_size == 271
    assert parse("--model-size", "small").config.model.vocab_size == 257
    mixed = parse("--dataset", "data:0.5", "--dataset", "other:0.3", "--dataset", "stories:0.2").config
    assert (mixed.data.seq_len, mixed.model.vocab_size, mixed.data.validation_fraction) == (512, 271, 0.05)
    # --init-from provides model and tokenizer; a resumed run provides its vocabulary.
    model = dataclasses.replace(small.MODEL, vocab_size=300, rope_theta=5e4)
    untrained_run(tmp_path / "base", dataclasses.replace(RUN, model=model))
    started = parse("--init-from", "base", "--model-window", "16")
    assert started.config.model == dataclasses.replace(model, window=16)
    assert started.origins["model.width"] == "--init-from base"
    assert parse("--checkpoint-dir", "base").config.model.vocab_size == 300
    # It keeps its tokenizer even if the data was prepared with another one, so that the data is refused.
    assert parse("--init-from", "base", "--dataset", "data").config.data.tokenizer == "bytes"
    with pytest.raises(ConfigError, match="tokenizer"):
        cfg = parse("--init-from", "base", "--dataset", "data", "--checkpoint-dir", "new").config
        run(cfg, quiet=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("--dataset=~/data").config.data.seq_len == 512
    assert parse("--tokenizer=~/tok").config.model.vocab_size == 271
    with pytest.raises(ConfigError, match="--tokenizer nothing: neither"):
        parse("--tokenizer", "nothing")


def test_home_is_expanded_wherever_a_path_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = DataConfig(dataset="~/a.txt", tokenizer="~/tok", cache_dir="~/cache")
    assert (data.dataset, data.tokenizer, data.cache_dir) == tuple(f"{tmp_path}/{n}" for n in ("a.txt", "tok", "cache"))
    assert DataConfig(dataset="~/a:0.5,b~:0.5").dataset == f"{tmp_path}/a:0.5,b~:0.5"
    train = TrainConfig(checkpoint_dir="~/runs/a", resume_from="~/b")
    assert (train.checkpoint_dir, train.resume_from) == (f"{tmp_path}/runs/a", f"{tmp_path}/b")
    assert TrainConfig(init_from="~/b").init_from == f"{tmp_path}/b"
    (tmp_path / "run.yaml").write_text("train:\n  checkpoint_dir: ~/runs/b\n")
    assert parsing.parse(["--config=~/run.yaml"]).config.train.checkpoint_dir == f"{tmp_path}/runs/b"
    assert parsing.parse(["--dataset=~/x"]).config.data.dataset == f"{tmp_path}/x"
    parsed = parsing.parse(["--dataset=~/x:0.5", "--dataset=y:0.5"])
    assert parsed.given["data.dataset"] == f"{tmp_path}/x:0.5,y:0.5"
    assert str(to_path("~/runs")) == f"{tmp_path}/runs"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 99)
    from nash_mhc.data import __main__ as data_command

    monkeypatch.setattr(sys, "argv", ["data", "prepare", "--dataset=~/a.txt", "--out=~/out"])
    assert one_line_errors(data_command.main) == 0
    assert (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "~").exists()


def test_flags_may_be_written_with_underscores():
    assert parsing.parse(["--learning_rate", "0.5", "--mesh_data=2", "--no-model_qk_norm"]).config.optim.learning_rate == 0.5
    parsed = parsing.parse(["--no_preflight"], own=train._own_flags)
    assert parsed.own.no_preflight
    with pytest.raises(ConfigError, match="unknown flag --learning_rat; did you mean --learning-rate"):
        parsing.parse(["--learning_rat", "1"])


def test_settings_as_a_command_line_come_back():
    argv = ["--dataset", "a b:0.5", "--dataset", "c:0.5", "--no-deterministic", "--model-window", "none", "--seed", "3"]
    given = parsing.parse(argv).given
    assert parsing.as_flags(given) == argv
    assert parsing.parse(parsing.as_flags(given)).config == parsing.parse(argv).config


def test_the_package_itself_says_what_there_is_and_its_version(monkeypatch, capsys):
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["nash_mhc", *argv])
        return one_line_errors(commands.main), *capsys.readouterr()

    code, out, _ = call()
    assert code == 0
    assert all(f"  {name} " in out for name in ("train", "generate", "data", "checkpoint", "plan", "report", "bench"))
    assert call("--help")[1] == out
    code, out, err = call("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"nash_mhc \d\S*, jax {re.escape(jax.__version__)}, Python 3\.\d+\.\d+\n", out)
    code, _, err = call("trian")
    assert code == 2
    assert err.startswith("error: unknown command 'trian'; did you mean train?")
    with pytest.raises(SystemExit):
        call("checkpoint", "--help")
    assert "verify" in capsys.readouterr().out


@pytest.fixture
def console_script(tmp_path):
    """Like an installed script: a file that calls the entry point, whose name the help shows."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["nash-mhc"]
    module, _, function = entry.partition(":")
    script = tmp_path / "nash-mhc"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)


def test_the_console_script_is_every_command(console_script, tmp_path):
    assert "usage: nash-mhc COMMAND" in typed("./nash-mhc --help", tmp_path)


@pytest.mark.long
def test_the_console_script_starts_worker_processes(console_script, tmp_path):
    # Worker processes start with the script as well, and signals stop a run.
    flags = shlex.join([*SMALL, *WITHOUT_SAMPLE, "--num-workers", "1", "--checkpoint-dir", "run"])
    assert "held-out loss at step 2:" in typed(f"./nash-mhc train {flags}", tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "nash_mhc",
        pytest.param("nash_mhc.train --help", marks=pytest.mark.long),
        pytest.param("nash_mhc.train --print-config", marks=pytest.mark.long),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_error(command, tmp_path):
    out = typed(f"{shlex.quote(sys.executable)} -u -m {command} | head -c 10", tmp_path)  # fails on any warning
    assert len(out) == 10


def test_a_step_that_never_ran_is_not_shown(tmp_path):
    folder = at(tmp_path / "run", total_steps=5, evaluated=False).folder
    assert "step 5, row 0" in of_run(RunFolder(folder), 5, 0)
    with pytest.raises(ConfigError, match=r"--step 6: .*last step .*\(5, by its .*checkpoints"):
        of_run(RunFolder(folder), 6, 0)
    with pytest.raises(ConfigError, match=r"--step 1000"):
        of_run(RunFolder(folder), 1000, None)


def test_a_blank_sample_says_so(capsys):
    for text, blank in (("", True), (" \n", True), ("a", False)):
        train._show_sample(text)
        out = capsys.readouterr().out
        assert out.startswith("\nA sample (temperature 0.8):\n")
        assert ("(blank: the model has not learned to begin a text yet)" in out) == blank


def test_too_little_memory_is_one_line_with_what_to_change(monkeypatch, capsys):
    """With the error of a GPU or TPU; a CPU never runs out of device memory."""
    said = (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96.5GiB with allocator GPU_0_bfc on device 0. "
        "[executable_name='jit_traced']\nBufferAssignment ..."
    )

    def run(cfg, **_):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(sys, "argv", ["train", *FEW, "--batch-size", "6", "--grad-accum", "2", "--remat", "dots"])
    assert one_line_errors(train.main) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "(Out of memory while trying to allocate 96.5GiB); " in line
    assert re.search(r"; try --batch-size \d --grad-accum \d+ \([\d.]+ MiB\), or ", line)  # keeps the step
    assert "--remat full" in line
    said = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError):
        one_line_errors(train.main)


def test_the_snippet_of_the_readme_runs(tmp_path):
    """Unchanged except for the size of its data and model."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert code.count('presets.run("tiny")') == code.count('presets.model("tiny")') == 1
    code = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport small\n{code}"
    code = code.replace('presets.run("tiny")', "small.config()").replace('presets.model("tiny")', "small.MODEL")
    (tmp_path / "snippet.py").write_text(code)
    out = typed(f"{shlex.quote(sys.executable)} snippet.py", tmp_path, shell=False)
    assert "(1, 16, 257)" in out
    assert len(list(tmp_path.glob("runs/*/checkpoints/50"))) == 1


def test_one_device_is_no_mesh():
    assert describe(small.make_mesh(small.config().mesh)) == "1 x cpu"
    assert (
        describe(small.make_mesh(small.mesh_config(small.config(), 2, 2, 2).mesh)) == "8 x cpu, mesh 2x2x2 (data x fsdp x tp)"
    )


def test_numbers_are_written_as_people_read_them():
    seconds = {0.04: "0.04 s", 9.96: "10 s", 12.4: "12 s", 60: "1 min", 185: "3 min 5 s", 3600: "1 h", 9660: "2 h 41 min"}
    assert {s: duration(s) for s in seconds} == seconds
    assert duration(3 * 86400 + 4 * 3600 + 59 * 60) == "3 d 4 h"
    assert [short(n) for n in (0, 812, 41_000, 1_250_000, 3.1e9)] == ["0", "812", "41k", "1.25M", "3.1B"]
    assert summarize_epochs({"notes/": 0.354, "web": 3.21}) == "reads 35% of notes/, web 3.21 times"
    assert summarize_epochs({}) == ""
