"""`python -m nash_mhc.train --verify-resume`:
is a run that was killed and resumed the run that was not? Tried, not promised.

Real processes train a few steps of the user's own run, in a temporary folder; one of them kills itself. The process
that starts and compares them uses no accelerator, so that each of the others finds all devices free.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ConfigError, MeshConfig, RunConfig
from nash_mhc.parallel.mesh import misfits
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.place import find_place
from nash_mhc.train.callbacks import EachStep
from nash_mhc.train.restore_check import wanted_state
from nash_mhc.train.trainer import run

STEPS, SAVED, KILLED = 8, 3, 5  # of the check; the checkpoint that is resumed from; the last step that the killed run finishes
# Of losses on another mesh, relative: sums are added up in another order there, and in bfloat16 with fewer digits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}


def short_run(cfg: RunConfig, folder: Path) -> RunConfig:
    """A few steps of the user's run, a row each, in a folder of ours; without samples."""
    train = dataclasses.replace(
        cfg.train, total_steps=STEPS, checkpoint_interval=SAVED, checkpoint_dir=str(folder), log_interval=1, eval_interval=0,
        eval_batches=1, keep_last=STEPS, keep_every=0, resume="auto", resume_from=None,
    )  # fmt: skip
    optim = dataclasses.replace(cfg.optim, warmup_steps=min(cfg.optim.warmup_steps, STEPS))
    telemetry = dataclasses.replace(cfg.telemetry, sample_tokens=0)  # two more programs, for a text that nobody compares
    return dataclasses.replace(cfg, train=train, optim=optim, telemetry=telemetry)


def other_mesh(cfg: RunConfig, platform: str, there: int) -> MeshConfig | None:
    """Another mesh that this run fits on: of as many devices if it can be, split along several axes;
    None where there is none.

    `cfg` has its mesh resolved. Devices of a CPU are emulated, as many as one likes.
    """
    axes, now = tuple(cfg.mesh.axes), tuple(cfg.mesh.axes.values())
    sizes = [4, 2, 8, 1] if platform == "cpu" else [math.prod(now), *range(there, 0, -1)]
    for size in sizes:
        shapes = [s for s in itertools.product(range(1, size + 1), repeat=len(axes)) if math.prod(s) == size and s != now]
        for shape in sorted(shapes, key=lambda s: (-sum(n > 1 for n in s), max(s), s)):
            other = dict(zip(axes, shape, strict=True))
            if misfits(cfg, other):
                continue
            return dataclasses.replace(MeshConfig(num_devices=size, platform=platform), **other)  # type: ignore[arg-type]
    return None


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in RunFolder(folder).rows()}


def different_losses(unbroken: Path, resumed: Path, tolerance: float) -> Iterator[tuple[float, str]]:
    """(relative difference, what it is) for every step after the checkpoint that is not as in the unbroken run."""
    was, got = _rows(unbroken), _rows(resumed)
    for step in range(SAVED + 1, STEPS + 1):
        a, b = (rows.get(step, {}).get("loss") for rows in (was, got))
        if a is None or b is None:
            yield math.inf, f"step {step} has loss {a} in the unbroken run and {b} in the resumed one"
        elif (apart := abs(a - b) / max(abs(a), 1e-30)) > tolerance:
            yield apart, f"the loss of step {step} is {a!r} in the unbroken run and {b!r} in the resumed one"
        if was.get(step, {}).get("tokens_seen") != got.get(step, {}).get("tokens_seen"):
            yield math.inf, f"the rows of step {step} are other ones: the tokens seen until then differ"


def _contents(folder: Path) -> dict[str, str]:
    """Name -> hash of every array of the last checkpoint; and the plain values beside them.
    One state in memory at a time."""
    with Store(folder) as store:
        state, values = store.restore(STEPS, wanted_state(RunFolder(folder).checkpoints / str(STEPS)))
    found = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in named_leaves(state).items()}
    for own in ("config", "clock"):  # one knows its folder, the other how long things took
        values.pop(own, None)
    return found | {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


def different_states(unbroken: Path, resumed: Path) -> list[str]:
    was, got = _contents(unbroken), _contents(resumed)
    return [name for name in was | got if was.get(name) != got.get(name)]


# --- the processes ---------------------------------------------------------------------------------------------------


def kill_after(folder: Path, step: int) -> Callable[[int], None]:
    """Return a function for `EachStep` that kills this process while the step after `step` runs."""

    def finished(number: int) -> None:
        if number >= step:
            while not (RunFolder(folder).checkpoints / str(SAVED) / manifest.FILE).exists():
                time.sleep(0.01)  # the save is under way in its own thread; what is tried is what comes after it
            os.kill(os.getpid(), signal.SIGKILL)

    return finished


class Ended(Exception):
    """A run that came to another end than it should, with this exit code."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ended with exit code {code}; nothing can be said about resuming")
        self.code = code


def _train(config: dict[str, Any], what: str, *, killed: bool = False) -> None:
    """Train in a process of its own, whose lines are shown."""
    file = Path(str(config["train"]["checkpoint_dir"])).with_suffix(".json")
    file.write_text(json.dumps(config))
    argv = [sys.executable, "-u", "-m", "nash_mhc.train.verify_resume", str(file), *(["killed"] if killed else [])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as child:
        try:
            code = child.wait()
        finally:
            child.kill()  # after an interrupt; else it has ended
    if code != (-signal.SIGKILL if killed else 0):
        raise Ended(what, code)


def _end_with_parent(folder: Path) -> None:
    """Whatever ends the process that started this one closes its end of our standard input:
    then nothing shall stay behind."""
    os.read(0, 1)  # sys.stdin would hold a lock that the interpreter wants at its end
    # Deleted from outside and a little later: this process goes on writing until its last moment.
    delete = "import shutil, sys, time; time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    subprocess.Popen([sys.executable, "-c", delete, str(folder)], stdin=subprocess.DEVNULL, start_new_session=True)
    os._exit(1)


def main() -> int:
    """One of the processes: the configuration of a run, and whether it shall kill itself on the way."""
    file, *killed = sys.argv[1:]
    cfg = RunConfig.from_dict(json.loads(Path(file).read_text()))
    threading.Thread(target=_end_with_parent, args=(Path(file).parent,), daemon=True).start()
    kill = EachStep(kill_after(Path(str(cfg.train.checkpoint_dir)), KILLED))
    run(cfg, callbacks=[kill] if killed else [])
    return 0


def _say(differences: list[str], equal: str) -> bool:
    print("\n".join(f"NOT EQUAL: {line}" for line in differences) or f"equal: {equal}", flush=True)
    return not differences


def _resumed(cfg: RunConfig, folder: Path) -> bool:
    """Whether the run that was killed and resumed equals the unbroken one;
    leaves both, and a copy of the killed one."""
    unbroken, resumed = folder / "unbroken", folder / "resumed"
    print(f"1/4 {STEPS} steps without a break ...", flush=True)
    _train(short_run(cfg, unbroken).to_dict(), "the unbroken run")
    print(f"2/4 the same run, killed (SIGKILL) in step {KILLED + 1} with a checkpoint of step {SAVED} ...", flush=True)
    _train(short_run(cfg, resumed).to_dict(), "the run that was to be killed", killed=True)
    if RunFolder(resumed).steps() != [SAVED]:
        raise Ended("the run was killed by somebody else and", -signal.SIGKILL)
    shutil.copytree(resumed, folder / "moved")
    print("3/4 the killed run, resumed ...", flush=True)
    _train(short_run(cfg, resumed).to_dict(), "the resumed run")
    wrong = [what for _, what in different_losses(unbroken, resumed, 0.0)]
    if parts := different_states(unbroken, resumed):
        wrong.append(f"{len(parts)} parts of the last checkpoint differ: {', '.join(parts[:4])}{', ...' * (len(parts) > 4)}")
    return _say(wrong, f"the losses of steps {SAVED + 1} to {STEPS} and all of the last checkpoint, bit for bit")


def _moved(folder: Path) -> bool:
    """Whether the killed run, resumed on another mesh, has the unbroken one's losses."""
    unbroken, moved = folder / "unbroken", folder / "moved"
    run = RunFolder(unbroken)
    cfg, devices = run.config(), run.info()["devices"]
    if (mesh := other_mesh(cfg, devices["platform"], devices["there"])) is None:
        print(f"4/4 no other mesh to try: {devices['there']} x {devices['kind']} is here, and this run fits on no other shape")
        return True
    print(f"4/4 the killed run, resumed on mesh {mesh} ...", flush=True)
    _train(short_run(dataclasses.replace(cfg, mesh=mesh), moved).to_dict(), "the run on another mesh")
    tolerance = TOLERANCE[cfg.train.dtype]
    most = max(apart for apart, _ in different_losses(unbroken, moved, -1.0))
    wrong = [f"{what}, on mesh {mesh}" for _, what in different_losses(unbroken, moved, tolerance)]
    return _say(wrong, f"the losses of these steps on mesh {mesh}, within {tolerance:g} (at most {most:.1g} apart)")


def verify_resume(cfg: RunConfig) -> int:
    """Exit code 0 when all runs are equal, 1 when not (their folders then stay, to be looked at),
    2 for the user's mistakes."""
    if find_place(cfg.mesh, os.environ) is not None:
        raise ConfigError(
            "--verify-resume starts processes of its own; give the command once, without the scheduler's launcher"
        )
    jax.config.update("jax_platforms", "cpu")  # of this process; those that it starts take what the user has
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    code = 2
    try:
        same = [_resumed(cfg, folder), _moved(folder)]
        code = 0 if all(same) else 1
    except Ended as error:
        print(error, file=sys.stderr)
        code = 2 if error.code == 2 else 1  # the run itself has said what is wrong
    finally:
        if code != 1:
            shutil.rmtree(folder, ignore_errors=True)
    if code == 1:
        print(f"the runs are in {folder}")
    return code


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
