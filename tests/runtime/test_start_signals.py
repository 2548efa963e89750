"""Signals at random moments of the start:
always exit code 75, never a traceback, and the next start just works."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from runs import losses
from storms import times
from training_process import TrainingProcess, arrays, children_of

from nash_mhc.checkpoint import manifest
from nash_mhc.runtime.signals import TRY_AGAIN

STEPS = 100_000  # more than all starts together come to
PLAIN, CROWDED = times(90, 30), times(10, 4)
FLAGS = f"--total-steps {STEPS} --checkpoint-interval 50 --log-interval 1 --schedule constant --warmup-steps 0".split()
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def family(pid: int) -> list[int]:
    return [pid, *(other for child in children_of(pid) for other in family(child))]


def started_and_signalled(folder: Path, seed: int, count: int, *flags: str, longest: float) -> list[str]:
    """So many starts of the same run, each stopped by a signal to all of its processes, in any order:
    what they said."""
    chance, said = random.Random(seed), []
    for number in range(count):
        caches = ["--cache-dir", str(folder.with_name(f"cache-{seed}-{number}"))] if flags else []
        evaluation = {} if flags else {"NO_EVALUATION": "1"}
        life = TrainingProcess(folder, *FLAGS, *flags, *caches, log=f"log{number}", **evaluation)
        life.until_listening()
        if chance.random() < 0.3:  # however slow the machine is, all of the start is seen
            life.until(chance.choice(["compiling the step", "compiled in", f"/{STEPS}"]))
        time.sleep(chance.uniform(0, longest))
        kind, everyone = chance.choice(NUMBERS), family(life.pid)
        for pid in chance.sample(everyone, len(everyone)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        code = life.end()
        assert code == TRY_AGAIN, f"{code}: {life.said}"
        assert "Traceback" not in life.said, life.said
        said.append(life.said)
    return said


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "{i} {"words and more words " * 40}"}}\n' for i in range(12_000)))
    # Two chunks for two processes, and one that reads rows: each may be hit before it has begun.
    crowded = ("--dataset", str(text), "--num-workers", "1", "--seed", "1")
    said: dict[str, list[str]] = {}

    def work(name: str, *args, **options) -> None:
        said[name] = started_and_signalled(folder / name, *args, **options)

    threads = [
        threading.Thread(target=work, args=("plain", 1, PLAIN), kwargs={"longest": 0.7}),
        threading.Thread(target=work, args=("crowded", 2, CROWDED, *crowded), kwargs={"longest": 4.0}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder, said


@pytest.mark.long
def test_signals_at_any_moment_of_the_start_are_handled(starts):
    _, said = starts
    assert {name: len(lines) for name, lines in said.items()} == {"plain": PLAIN, "crowded": CROWDED}
    phases = {
        "nothing had been made": lambda text: "run in" not in text,
        "compiling": lambda text: "compiling the step" in text and "compiled in" not in text,
        "training": lambda text: f"/{STEPS}" in text,
    }
    everything = [text for lines in said.values() for text in lines]
    for name, reached in phases.items():
        assert sum(map(reached, everything)) >= 3, f"no signal came while {name}"


@pytest.mark.long
def test_an_interrupted_run_ends_like_an_undisturbed_one(starts):
    folder, _ = starts
    end = max(manifest.saved_steps(folder / "plain" / "checkpoints"), default=0) + 5
    last, unbroken = (TrainingProcess(folder / name, *FLAGS, "--total-steps", str(end)) for name in ("plain", "unbroken"))
    assert (last.end(), unbroken.end()) == (0, 0), last.said
    assert losses(folder / "plain") == losses(folder / "unbroken")
    wanted = arrays(folder / "unbroken", end)
    for name, value in arrays(folder / "plain", end).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
