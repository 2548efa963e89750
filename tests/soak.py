"""`python -m tests.soak`: two runs of thousands of steps, one in a single process and one in two, killed and signalled
at random moments, hundreds of times, and compared bit for bit with runs that were left alone. Half an hour on two
cores; not part of `make test`, which does the same on a smaller scale.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import conftest  # noqa: F401  (the environment of the tests: host devices, a compilation cache)
import numpy as np
from runs import rows
from training_process import DENSE, TrainingProcess, arrays, pair

from nash_mhc.checkpoint import manifest
from nash_mhc.config.humanize import duration
from nash_mhc.runtime.signals import TRY_AGAIN

ENDS = {signal.SIGKILL: 0.5, signal.SIGTERM: 0.3, signal.SIGINT: 0.1, signal.SIGHUP: 0.1}
MESH = "--mesh-data 2 --stall-timeout 10".split()


def flags(steps: int) -> list[str]:
    told = f"--total-steps {steps} --checkpoint-interval 20 --log-interval 7 --eval-interval 60 --keep-last 2 --ema-decay 0.9"
    return [*told.split(), "--wait-for-lock", "60"]


class Soaked:
    """One run, started as often as it takes."""

    def __init__(self, folder: Path, processes: int, steps: int) -> None:
        self.folder, self.processes, self.steps, self.done = folder, processes, steps, 0

    def start(self) -> tuple[TrainingProcess, ...]:
        if self.processes == 1:
            return (TrainingProcess(self.folder, *flags(self.steps), model=DENSE),)
        return pair(self.folder, *flags(self.steps), *MESH)

    def disturb(self, chance: random.Random) -> str:
        """One start that is not left alone: what was done to it, and how it ended."""
        lives = self.start()
        if chance.random() < 0.3:  # anywhere in the start
            lives[0].until_listening()
            time.sleep(chance.uniform(0, 4.0))
        else:
            lives[0].until("starting from").until(f"/{self.steps}")
            time.sleep(chance.expovariate(1 / 0.5))
        kind = chance.choices(list(ENDS), list(ENDS.values()))[0]
        hit = [life for life in lives if chance.random() < 0.5] or [chance.choice(lives)]
        gone = not all(life.alive for life in lives)
        for life in hit:
            if life.alive:
                life.send(kind)
        if len(hit) < len(lives) and " in 2 processes" not in lives[0].said:
            # They had not found each other yet, and the one that is left would wait for minutes for the other to come.
            # A scheduler that sees a task end ends the job.
            for life in lives:
                if life not in hit and life.until_listening().alive:
                    life.send(signal.SIGTERM)
        codes = [life.end() for life in lives]
        for life, code in zip(lives, codes, strict=True):
            allowed = {TRY_AGAIN, -signal.SIGKILL} if life in hit and kind == signal.SIGKILL else {TRY_AGAIN}
            # The run may have come to its end just before;
            # and JAX ends a process whose first one is killed as it likes.
            allowed |= {0} if gone or f"held-out loss at step {self.steps}:" in lives[0].said else set()
            allowed |= {-signal.SIGABRT} if kind == signal.SIGKILL and len(lives) > 1 else set()
            assert code in allowed, f"{kind.name} ended it with {code}:\n{life.said}"
            assert "Traceback" not in life.said, life.said
        self.done += 1
        saved = manifest.saved_steps(self.folder / "checkpoints")
        return f"{kind.name} to {len(hit)} of {len(lives)} -> {codes}, step {saved[-1] if saved else 0} is saved"

    def finish(self) -> None:
        lives = self.start()
        codes = [life.end() for life in lives]
        assert set(codes) == {0}, "\n".join(life.said for life in lives)


def difference(soaked: Path, calm: Path, steps: int) -> list[str]:
    """Everything in which the two runs are not the same."""
    wrong = []
    timed = ("tokens_per_s", "mfu", "step_ms", "data_wait_ms", "save_ms", "last_checkpoint")  # of the process, not of the run
    for name in ("metrics.jsonl", "eval.jsonl"):
        got, want = ([{k: v for k, v in row.items() if k not in timed} for row in rows(f, name)] for f in (soaked, calm))
        wrong += [f"{name}: row {i}" for i in range(max(len(got), len(want))) if got[i : i + 1] != want[i : i + 1]]
    got, want = arrays(soaked, steps), arrays(calm, steps)
    wrong += [name for name in want if name not in got or not np.array_equal(got[name], want[name])]
    left = [path.name for path in (soaked / "checkpoints").iterdir() if not path.name.isdecimal()]
    wrong += [f"left behind: {name}" for name in left]
    bad = {step: manifest.problem(soaked / "checkpoints" / str(step)) for step in manifest.saved_steps(soaked / "checkpoints")}
    return wrong + [f"checkpoint {step}: {problem}" for step, problem in bad.items() if problem]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills and signals in all [200]")
    parser.add_argument("--share", type=float, default=0.3, help="share of them for the run in two processes [0.3]")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each run [4000]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    args = parser.parse_args()
    folder, chance, began = Path(tempfile.mkdtemp(prefix="soak-")), random.Random(args.seed), time.monotonic()
    os.chdir(folder)
    runs = [Soaked(folder / "one", 1, args.steps), Soaked(folder / "two", 2, args.steps)]
    for number in range(args.kills):
        run = runs[chance.random() < args.share]
        told = run.disturb(chance)
        print(f"{number + 1}/{args.kills} ({duration(time.monotonic() - began)}): {run.folder.name}: {told}", flush=True)
    equal = True
    for run in runs:
        print(f"{run.folder.name}: to its end, and once more without a kill ...", flush=True)
        run.finish()
        calm = Soaked(folder / f"{run.folder.name}-calm", run.processes, args.steps)
        calm.finish()
        wrong = difference(run.folder, calm.folder, args.steps)
        equal &= not wrong
        verdict = f"NOT EQUAL: {', '.join(wrong[:5])}" if wrong else "every row and every array is equal, bit for bit"
        print(f"{run.folder.name}: {args.steps} steps, {run.done} kills and signals: {verdict}", flush=True)
    print(f"{duration(time.monotonic() - began)} in all")
    if equal:
        shutil.rmtree(folder)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
