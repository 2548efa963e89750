"""Every command that is printed as the next one runs as it is printed, in a fresh shell.

Needs no network, account or accelerator. The whole walk is long; a stopped run's command is typed in every test run.
"""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small
from corpora import stories, write_jsonl
from runs import drawn_run
from training_process import DENSE, TrainingProcess

from nash_mhc.checkpoint.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
TINY = shlex.split(
    "--model-width 16 --model-layers 1 --model-heads 2 --model-kv-heads 2 --model-head-dim 8 --model-ffn 16 --model-scales 1 "
    "--model-conv-taps 0 --model-residual plain --seq-len 32 --sample-tokens 0 --eval-batches 1 --batch-size 2 --total-steps 2"
)


def typed(line, folder):
    """(exit code, stdout and stderr) of the line in a shell of its own, where `python` is another one or none."""
    others = [path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != Path(sys.executable).parent]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(others)}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def proposed(said):
    """The commands in it, each to the end of its line; what stands behind `   #` is a remark."""
    return re.findall(r"\S*python\S* -m nash_mhc\S* .*?(?=   #|$)", said, re.MULTILINE)


def python(module, *words):
    return shlex.join([sys.executable, "-m", f"nash_mhc.{module}", *words])


def walk(line, folder, *, depth=2, code=0, done=None):
    """Types the line and what it proposes, and so on; returns the lines that were typed."""
    done = [] if done is None else done
    done.append(line)
    found, said = typed(line, folder)
    assert found == code, f"{line}\n{said}"
    assert "Traceback" not in said, said
    for command in proposed(said) if depth else []:
        if command not in done:
            walk(command, folder, depth=depth - 1, done=done)
    return done


def test_the_command_that_a_stopped_run_prints_continues_it(tmp_path):
    run, flags = (
        tmp_path / "my run",
        ["--total-steps", "40", "--log-interval", "1", "--grad-accum", "20", "--model-layers", "1"],
    )
    life = TrainingProcess(run, *flags, model=DENSE).until("step  3/").send(signal.SIGTERM)
    assert life.end() == 75
    saved = RunFolder(run).steps()[-1]
    assert saved < 40
    (command,) = proposed(life.said)  # for the shell that started it: its folder, its PATH
    typed_again = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    said = typed_again.stdout + typed_again.stderr
    assert typed_again.returncode == 0, said
    assert f"starting from step {saved} of this run" in said
    assert RunFolder(run).steps()[-1] == 40


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


@pytest.mark.long
def test_what_distilling_proposes(tmp_path):
    drawn_run(tmp_path / "teacher", small.config())
    cache = ["cache", "--teacher", "teacher", "--out", "my cache", "--max-documents", "40", "--top-k", "4", "--batch-size", "4"]
    write_jsonl(tmp_path / "a.jsonl", stories(40))
    code, said = typed(python("distill", *cache, "--dataset", "a.jsonl", "--seq-len", "32"), tmp_path)
    assert code == 0, said
    (command,) = proposed(said)
    walk(f"{command} {shlex.join(TINY[: TINY.index('--seq-len')] + TINY[TINY.index('--sample-tokens') :])}", tmp_path, depth=0)


@pytest.mark.long
def test_what_refusals_propose(tmp_path):
    """Each refusal with a command or flags in it; with those, the same start is not refused."""
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
