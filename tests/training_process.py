"""Training runs as real processes that can be signalled and killed,
forked from a server that has done the slow imports."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import bigram
import jax
import numpy as np
import orbax.checkpoint as ocp
import small

from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.data.pack import Rows
from nash_mhc.runtime.compiled import CompiledStep, Program
from nash_mhc.runtime.watchdog import Watch

# What is tested with a process does not depend on the model, and of a short life most goes into tracing the step.
_SHORT = "--seq-len 32 --batch-size 8 --learning-rate 3e-4 --eval-batches 2 --eval-interval 0 --sample-tokens 0"
BIGRAM = f"--model-kind bigram {_SHORT}".split()
DENSE = (
    "--model-width 32 --model-layers 2 --model-heads 8 --model-kv-heads 8 --model-head-dim 4 --model-ffn 64 --model-scales 1 "
    f"--model-window none --model-conv-taps 0 --model-residual plain {_SHORT}"
).split()

ROOT = Path(__file__).parent.parent
_HANGS_S = 900.0  # on no machine, however busy, does anything here take so long: only what would never end

_server = multiprocessing.get_context("forkserver")
# The second is what every run imports late, for the table in run.json, and with it comes flax: a fifth of a short life.
_server.set_forkserver_preload(["nash_mhc.train.__main__", "clu.parameter_overview", "bigram"])
# `multiprocessing` asks after all processes whenever one is started, and an exit code can be read once: of two threads
# that ask at the same time, one would be told 255.
_asking = threading.Lock()


def _train(argv: list[str], out: str, env: dict[str, str]) -> None:
    """What `python -m nash_mhc.train` does, from its first line to its last, in the forked process."""
    from nash_mhc.runtime.signals import SIGNALS
    from nash_mhc.train.__main__ import command

    bigram.register()
    log = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    if view := env.get("WORK_IN"):  # a folder of its own, where a relative path may lead to another disk
        os.chdir(view)
    if at := env.get("STALL_AT_STEP"):
        _stall_at(int(at))
    if file := env.get("SHORT_STALL_ONCE"):
        _shorten_the_stall_once(Path(file))
    if step := int(env.get("STUCK_AT_SAVE", "0")):
        _stick_at_save(step)
    if env.get("STUCK_AT_DATA"):
        sys.modules["nash_mhc.train.inputs"].open_source = lambda *_, **__: _stuck()  # type: ignore[attr-defined]
    if "IMPATIENT" in env:
        _save_again_at_once(int(env.get("ATTEMPTS", "500")))
    if "NO_EVALUATION" in env:  # another program less to trace, where what is tested is not about it
        sys.modules["nash_mhc.train.inputs"].open_held_out = lambda *_, **__: None  # type: ignore[attr-defined]
    if "TELL_OF_THE_COMPILER" in env:
        _tell_of_the_compiler()
    if "NO_PROGRAM_OF_THE_EVALUATION" in env:
        _hold_up_the_evaluation()
    if "NEVER_LEAVES" in env:
        atexit.register(lambda: (print("on its way out", flush=True), time.sleep(1e6)))  # before JAX takes leave of the others
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # as in conftest.py
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # the next life begins with what this one compiled
    sys.argv = ["nash_mhc.train", *argv]
    SIGNALS.listen()
    code = command()
    atexit._run_exitfuncs()  # a forked process leaves without: processes of one run would not wait for each other at its end
    sys.exit(code)


def _stall_at(stalled: int) -> None:
    """The rows of that step never come: what a disk that has gone away does to a process."""

    def never_comes(step: int, rows: Rows) -> Rows:
        if step == stalled:
            print("stalled", flush=True)
            time.sleep(1e6)
        return rows

    small.change_batches(never_comes)


def _shorten_the_stall_once(file: Path) -> None:
    """As soon as the file is there, a few seconds without progress are too many.
    A busy machine's first steps take as long."""
    module = sys.modules["nash_mhc.train.trainer"]

    class Shortened(Watch):
        def _run(self) -> None:
            threading.Thread(target=self._shorten, daemon=True).start()
            super()._run()

        def _shorten(self) -> None:
            while not file.exists():
                time.sleep(0.05)
            print(f"patient for {self._timeout:g} s so far", flush=True)
            self._timeout = 5.0

    module.Watch = Shortened  # type: ignore[attr-defined]


def _stuck() -> None:
    print("stuck", flush=True)
    time.sleep(1e6)


def _stick_at_save(stuck: int) -> None:
    """The storage does not answer when that step is saved."""
    mark = Store._mark

    def never_ends(store: Store, step: int) -> None:
        if step == stuck:
            _stuck()
        mark(store, step)

    Store._mark = never_ends  # type: ignore[method-assign]


def _save_again_at_once(attempts: int) -> None:
    """Pauses after failed saves are short, and it hardly ever gives up: for storage that fails all the time."""
    module = sys.modules["nash_mhc.train.trainer"]
    module.Saver = functools.partial(Saver, first_pause=0.01, longest_pause=0.05, attempts=attempts)  # type: ignore[attr-defined]


def _tell_of_the_compiler() -> None:
    """The first program that is compiled while the step is awaited says so before and behind."""
    compile_it = jax.stages.Lowered.compile

    def told(self: jax.stages.Lowered, *args: Any, **options: Any) -> Any:
        print("in the compiler", flush=True)
        compiled = compile_it(self, *args, **options)
        print("out of the compiler", flush=True)
        return compiled

    jax.stages.Lowered.compile = told  # type: ignore[method-assign]


def _hold_up_the_evaluation() -> None:
    """What is compiled behind another program never is."""
    compile_in_background = CompiledStep.compile_in_background

    def held_up(step: CompiledStep, state: Any, batch: Any, *, after: Program | None = None) -> Program:
        return compile_in_background(step, state, batch, after=None if after is None else Program())

    CompiledStep.compile_in_background = held_up  # type: ignore[method-assign]


class TrainingProcess:
    """One process of a run."""

    _left: ClassVar[list[TrainingProcess]] = []  # those that have not been waited for

    def __init__(self, folder: Path, *flags: str, model: list[str] = BIGRAM, log: str = "log", **env: str) -> None:
        self.log = Path(env["WORK_IN"]) / log if "WORK_IN" in env else folder.with_name(f"{folder.name}.{log}")
        self.log.write_text("")
        argv = [*model, "--checkpoint-dir", str(folder), *flags]
        self._process = _server.Process(target=_train, args=(argv, str(self.log), env))
        with _asking:
            self._process.start()
        TrainingProcess._left.append(self)

    @staticmethod
    def kill_those_left() -> None:
        """After a test that has failed: what runs on would take its time from all others."""
        while TrainingProcess._left:
            life = TrainingProcess._left.pop()
            if life.alive:
                life._process.kill()
                life._process.join()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, text: str) -> TrainingProcess:
        """Waits for a text in what it says."""
        end = time.monotonic() + _HANGS_S
        while text not in self.said:
            assert self.alive or text in self.said, f"ended without saying {text!r}:\n{self.said}"
            assert time.monotonic() < end, f"did not say {text!r}:\n{self.said}"
            time.sleep(0.01)
        return self

    def until_listening(self) -> TrainingProcess:
        """Before that, the interpreter has not come to our first line, and signals are none of our business."""
        while self.alive and not catches(self.pid, signal.SIGTERM):
            time.sleep(0.001)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, number: signal.Signals = signal.SIGTERM) -> TrainingProcess:
        os.kill(self.pid, number)
        return self

    def end(self) -> int:
        """Its exit code; negative for the signal that killed it."""
        multiprocessing.connection.wait([self._process.sentinel], _HANGS_S)
        assert not self.alive, f"still there after {_HANGS_S} s:\n{self.said}"
        if self in TrainingProcess._left:
            TrainingProcess._left.remove(self)
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        with _asking:
            return self._process.is_alive()


def catches(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) & (1 << (number - 1)))
    return False


def children_of(pid: int) -> list[int]:
    """Those processes that it has started and that are still there."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whatever mesh wrote it."""
    checkpoint = folder.absolute() / "checkpoints" / str(step)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {k: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for k, (shape, dtype) in array_metadata(checkpoint).items()}
    with ocp.StandardCheckpointer() as reader:
        return jax.device_get(reader.restore(checkpoint / "state", like))


def pair(
    folder: Path,
    *flags: str,
    model: list[str] = BIGRAM,
    second: dict[str, str] | None = None,
    flags_of: dict[int, list[str]] | None = None,
    **env: str,
) -> tuple[TrainingProcess, TrainingProcess]:
    """A run in two processes, which share its devices; `second` is added to the environment of the second one, and
    `flags_of` to the flags of either."""
    own = flags_of or {}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    where = ("--coordinator-address", address, "--num-processes", "2", "--process-id")
    return (
        TrainingProcess(folder, *flags, *where, "0", *own.get(0, []), model=model, log="log0", **env),
        TrainingProcess(folder, *flags, *where, "1", *own.get(1, []), model=model, log="log1", **env | (second or {})),
    )


def slurm_pair(folder: Path, *flags: str, **more: str) -> tuple[TrainingProcess, TrainingProcess]:
    """The same, as srun would start it."""
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", 61440 + job % 4096))
            break
    env = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    first, second = (env | more | {"SLURM_PROCID": number, "SLURM_LOCALID": number} for number in "01")
    return TrainingProcess(folder, *flags, log="log0", **first), TrainingProcess(folder, *flags, log="log1", **second)


def typed(line: str, folder: Path) -> tuple[int, str]:
    """Run a line in a fresh shell whose `python` is another one or none; return its exit code, stdout and stderr."""
    others = [path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != Path(sys.executable).parent]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(others)}
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
