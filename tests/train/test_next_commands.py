"""Every command that is printed as the next one runs as it is printed, in a fresh shell.

Needs no network, account or accelerator. The whole walk is long; a stopped run's command is typed in every test run.
"""

import dataclasses
import functools
import os
import re
import shlex
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import small
from corpora import stories, write_jsonl
from runs import RUN, at, drawn_run
from training_process import DENSE, ROOT, TrainingProcess, typed

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import one_line_errors
from nash_mhc.report.contents import contents, open_run
from nash_mhc.train import __main__ as train
from nash_mhc.train import run

TINY = shlex.split(
    "--model-width 16 --model-layers 1 --model-heads 2 --model-kv-heads 2 --model-head-dim 8 --model-ffn 16 --model-scales 1 "
    "--model-conv-taps 0 --model-residual plain --seq-len 32 --sample-tokens 0 --eval-batches 1 --batch-size 2 --total-steps 2"
)


def proposed(said):
    """Return the commands in the text, without trailing comments (`   #`)."""
    return re.findall(r"\S*python\S* -m nash_mhc\S* .*?(?=   #|$)", said, re.MULTILINE)


def python(module, *words):
    return shlex.join([sys.executable, "-m", f"nash_mhc.{module}", *words])


def walk(line, folder, *, depth=2, code=0, done=None):
    """Run the line, then the commands that it prints, and so on; return all of them."""
    done = [] if done is None else done
    done.append(line)
    found, said = typed(line, folder)
    assert found == code, f"{line}\n{said}"
    assert "Traceback" not in said, said
    for command in proposed(said) if depth else []:
        if command not in done:
            walk(command, folder, depth=depth - 1, done=done)
    return done


@pytest.mark.long
def test_the_command_that_a_stopped_run_prints_continues_it(tmp_path):
    run, flags = (
        tmp_path / "my run",
        ["--total-steps", "16", "--log-interval", "1", "--grad-accum", "20", "--model-layers", "1"],
    )
    life = TrainingProcess(run, *flags, model=DENSE).until("step  3/").send(signal.SIGTERM)
    assert life.end() == 75
    saved = RunFolder(run).steps()[-1]
    assert saved < 16
    (command,) = proposed(life.said)  # for the shell that started it, with its directory and PATH
    typed_again = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    said = typed_again.stdout + typed_again.stderr
    assert typed_again.returncode == 0, said
    assert f"starting from step {saved} of this run" in said
    assert RunFolder(run).steps()[-1] == 16


@pytest.mark.long
def test_what_training_proposes(tmp_path):
    lines = walk(python("train", *TINY), tmp_path)
    assert [line.split()[2] for line in lines[1:4]] == ["nash_mhc.generate", "nash_mhc.report", "nash_mhc.train"]
    line = python("train", *TINY, "--total-steps", "100000", "--log-interval", "1")
    env, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen(
        f"exec {line}", shell=True, cwd=tmp_path, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as stopped:
        for row in stopped.stdout:
            if "step      3/" in row:
                stopped.send_signal(signal.SIGINT)
                break
        (command,) = proposed(stopped.stdout.read())
    assert stopped.returncode == 75
    folder = RunFolder(tmp_path / shlex.split(command)[-1])
    walk(f"{command} --total-steps {folder.steps()[-1] + 2}", tmp_path, depth=1)


@pytest.mark.long
def test_what_preparing_data_proposes(tmp_path):
    write_jsonl(tmp_path / "my stories.jsonl", stories(60))
    data = ["--dataset", "my stories.jsonl", *TINY]
    assert len(walk(python("data", "train-bpe", *data, "--vocab-size", "280", "--out", "tok"), tmp_path, depth=1)) == 2
    assert len(walk(python("data", "prepare", *data, "--out", "my data"), tmp_path, depth=1)) == 2
    (tmp_path / "qa.jsonl").write_text("\n".join(f'{{"question": "What is {n}?", "answer": "{n}"}}' for n in range(60)))
    code, said = typed(python("train", "--dataset", "qa.jsonl", *TINY), tmp_path)
    (flags,) = re.findall(r"(--format fields .*?); or ", said)
    assert code == 2
    walk(f"{python('train', '--dataset', 'qa.jsonl', *TINY)} {flags}", tmp_path, depth=0)


@pytest.mark.long
def test_what_models_of_hugging_face_and_adapters_propose(tmp_path):
    base = drawn_run(tmp_path / "base", dataclasses.replace(small.config(), model=small.MODEL))
    assert len(walk(python("hub", "export", str(base), "--out", "my model"), tmp_path, depth=1)) == 2
    lora = ["--init-from", "base", "--lora-rank", "2", "--checkpoint-dir", "tuned", *TINY[TINY.index("--sample-tokens") :]]
    walk(python("train", *lora), tmp_path, depth=1)
    walk(python("hub", "export", "tuned", "--out", "adapters"), tmp_path)
    lines = walk(python("hub", "import", "adapters", "--base", "base", "--out", "both"), tmp_path)
    assert len(lines) >= 3
    code, said = typed(python("train", "--init-from", "adapters"), tmp_path)
    (command,) = proposed(said)
    assert code == 2
    walk(command.replace("BASE", "base").replace("RUN", "another"), tmp_path, depth=0)


@pytest.mark.long
def test_what_distilling_proposes(tmp_path):
    drawn_run(tmp_path / "teacher", small.config())
    cache = ["cache", "--teacher", "teacher", "--out", "my cache", "--max-documents", "40", "--top-k", "4", "--batch-size", "4"]
    write_jsonl(tmp_path / "a.jsonl", stories(40))
    code, said = typed(python("distill", *cache, "--dataset", "a.jsonl", "--seq-len", "32"), tmp_path)
    assert code == 0, said
    (command,) = proposed(said)
    walk(f"{command} {shlex.join(TINY[: TINY.index('--seq-len')] + TINY[TINY.index('--sample-tokens') :])}", tmp_path, depth=0)


CHAIN = """
teacher: teacher
cache: {dataset: stories, max_documents: 4, seq_len: 32, batch_size: 4, top_k: 4, model_scales: 1}
student: {objective: distill, batch_size: 4, seq_len: 32, warmup_steps: 0, eval_batches: 1, sample_tokens: 0, log_interval: 1}
stages:
  - {name: few, quantize: "none,2/0", quantize_group: 8, total_steps: STEPS}
pack: few
"""


def linked(said):
    """Return the commands that a chain prints."""
    return proposed("\n".join(re.findall(r"^== .*", said, re.MULTILINE)))


@pytest.mark.long
def test_what_a_chain_proposes(tmp_path):
    """Interrupt the chain and its run, as a terminal does."""
    drawn_run(tmp_path / "teacher", small.config())
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("STEPS", "100000"))
    line, env = python("distill", "chain", "chain.yaml", "--out", "my chain"), os.environ | {"PYTHONPATH": str(ROOT)}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(shlex.split(line), cwd=tmp_path, env=env, start_new_session=True, **out) as chain:
        said = []
        for row in chain.stdout:
            said.append(row)
            if "step      3/" in row:
                os.killpg(chain.pid, signal.SIGINT)
        said = "".join(said)
    assert chain.returncode == 75, said
    (cache, run_), again = linked(said), proposed(said)[-1]
    saved = RunFolder(tmp_path / "my chain" / "few").steps()[-1]
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("STEPS", str(saved + 2)))
    assert "nash_mhc.train 'my chain/few' " in run_ and again == line
    code, said = typed(again, tmp_path)
    assert code == 0 and f"starting from step {saved} of this run" in said, said
    (few, pack), ask = linked(said), proposed(said)[-1]
    (tmp_path / "my chain").rename(tmp_path / "done")
    for command in (cache, few, pack, ask):
        walk(command, tmp_path, depth=0)


@pytest.mark.long
def test_what_refusals_propose(tmp_path):
    """Each error that proposes a command or flags; with those, the same start works."""
    code, said = typed(python("train", *TINY, "--mesh-data", "3", "--mesh-tp", "5"), tmp_path)
    assert code == 2
    _, _, remedies = said.strip().partition("; try ")
    for flags in remedies.split(", or "):
        walk(f"{python('train', *TINY, '--mesh-data', '3', '--mesh-tp', '5')} {flags}", tmp_path, depth=0)
    walk(python("train", *TINY, "--checkpoint-dir", "run"), tmp_path, depth=0)
    code, said = typed(python("train", "run", "--batch-size", "1"), tmp_path)
    assert code == 2
    (flags,) = re.findall(r"(--batch-size \d+ --grad-accum \d+) keeps", said)
    walk(f"{python('train', 'run')} {flags}", tmp_path, depth=0)
    walk(python("plan", *TINY, "--chip", "cpu"), tmp_path, depth=1)
    assert typed(python("doctor", "--quick"), tmp_path)[0] in (0, 1)


# --- runs that end early, in this process -------------------------------------------------------------------------


def of(stopped, capsys):
    """Return the last command in the error that `stopped` ends with, and the whole error."""
    assert one_line_errors(stopped) == 2
    said = capsys.readouterr().err
    *_, command = proposed(said)
    return command, said


@pytest.mark.long
def test_what_a_run_out_of_memory_proposes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run_out(cfg, **how):
        run(cfg, **how, quiet=True)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96.5GiB.")

    monkeypatch.setattr(train, "run", run_out)
    argv = ["train", *TINY, "--batch-size", "4", "--no-preflight", "--checkpoint-dir", "my run"]
    monkeypatch.setattr(sys, "argv", argv)
    command, said = of(train.main, capsys)
    remedies = re.findall(r"(?:try|or) (--[^(]+) \([\d.]+ [KMG]iB\)", said)
    assert remedies
    for steps, flags in enumerate(["", *remedies], start=3):
        out = typed(f"{command} {flags} --total-steps {steps}", tmp_path)
        assert out[0] == 0, out[1]
        assert f"starting from step {steps - 1} of this run" in out[1]


@pytest.mark.long
def test_what_bad_steps_propose(tmp_path, monkeypatch, capsys):
    """The commands to inspect the data of bad steps, from the run and from its report."""
    spoilt = lambda rows: rows._replace(weights=rows.weights * np.float32(np.nan))
    small.change_batches(lambda step, rows: spoilt(rows) if step > 3 else rows, monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my run"
    command, _ = of(lambda: at(folder, evaluated=False, max_bad_steps=2, log_interval=1, total_steps=9), capsys)
    code, said = typed(command, tmp_path)
    assert code == 0 and "step 4" in said, said
    marks = contents(open_run(str(folder)))["marks"]
    assert [mark["command"] for mark in marks][:1] == [command]


@pytest.mark.long
def test_what_a_disk_that_fails_proposes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save, folder = Store.save, tmp_path / "my run"

    def full(self, step, *args, **options):
        if step == 4:
            raise OSError(28, "No space left on device")
        return save(self, step, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", full)
        patch.setattr("nash_mhc.train.trainer.Saver", functools.partial(Saver, attempts=1))
        command, _ = of(lambda: at(folder, evaluated=False, checkpoint_interval=2), capsys)
    code, said = typed(command, tmp_path)
    assert code == 0 and "starting from step 2 of this run" in said, said
    assert RunFolder(folder).steps()[-1] == RUN.train.total_steps


@pytest.mark.long
def test_what_a_folder_of_damaged_checkpoints_proposes(tmp_path):
    run_ = drawn_run(tmp_path / "my run", small.config())
    (run_ / "checkpoints" / "0").rename(run_ / "checkpoints" / "0.damaged")
    code, said = typed(python("checkpoint", "inspect", "my run"), tmp_path)
    assert code == 2
    (command,) = proposed(said)
    assert "damaged, renamed" in typed(command, tmp_path)[1]
