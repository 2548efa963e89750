"""A training run beside the notebook: started as a process of its own, watched while it runs, stopped with its state
saved.

The kernel stays free of it: it holds neither the accelerator nor the run, and a kernel that dies takes nothing along.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, PARAMETERS, RUN, Row, RunFolder
from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.signals import TRY_AGAIN
from nash_mhc.storage.files import is_remote

_WAIT_FOR_LOCK = "600"  # seconds: the process that the kernel before this one has started may still be saving
_DRAWING = 9  # for each second of drawing, so many without: a CPU that trains needs them
_BUCKET_PAUSE = 20.0  # seconds: rows reach an object store every half a minute
TRANSFORMERS = "transformers"  # folder of an archive with the model as transformers reads it
_TAIL = 20  # lines of a log that are shown when something went wrong


class Stopped(Exception):
    """What ends a cell, and with it "run all": in one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it."""
        return [str(self)]


class Training:
    """One process of a run. Its output is in a file: nobody has to read it for the run to go on."""

    def __init__(self, folder: str, flags: Sequence[str]) -> None:
        self.folder = RunFolder(folder)
        with tempfile.NamedTemporaryFile("w", prefix="nash_mhc-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            argv = [sys.executable, "-m", "nash_mhc.train", *flags]
            argv += ["--checkpoint-dir", folder, "--log-format", "json", "--wait-for-lock", _WAIT_FOR_LOCK]
            # In a session of its own: "interrupt the kernel" is sent to all processes of the kernel's. This one would
            # hear of it twice, and the second signal means "at once".
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        atexit.register(self.ask_to_stop)

    def ask_to_stop(self) -> None:
        """It saves its last finished step, and leaves."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def said(self) -> list[str]:
        """Line by line, without the numbers, which are in the run's folder."""
        told = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
                text = event.get("text") if event["event"] == "message" else None
            except (ValueError, TypeError, KeyError):
                text = line
            if text:
                told.append(text)
        return told

    def rows(self, name: str = METRICS) -> list[Row]:
        """As far as they are written; the last one may be being written just now."""
        with contextlib.suppress(OSError, ConfigError):
            return self.folder.rows(name)
        return []


def start(folder: str, flags: Sequence[str]) -> Training:
    """Begins a run in that folder, or goes on with the one that it holds. The flags are those of `nash_mhc.train`."""
    if not folder.strip():
        raise Stopped("name a folder for the run: checkpoints and metrics go there")
    return Training(folder, flags)


def follow(training: Training, *, pause: float = 1.0) -> None:
    """Shows the curves of a run until it ends. Interrupting the cell stops the run, with its last step saved.

    Raises Stopped where the run has not come to its end, so that the cells below do not run on half of it.
    """
    try:  # around all of it: the run goes on while pictures are imported, and while the first line is shown
        _show(training, pause)
    except KeyboardInterrupt:
        training.ask_to_stop()
        training.process.wait()
    _judge(training)


def _show(training: Training, pause: float) -> None:
    """The curves, drawn again and again until the run ends."""
    from IPython.display import display

    from nash_mhc.notebook.pictures import curves

    if is_remote(training.folder.path):
        pause = max(pause, _BUCKET_PAUSE)
    status = display(_Text(f"process {training.process.pid}: starting ..."), display_id=True)
    picture: Any = None
    seen, draw_at = (0, 0), 0.0
    running = True
    while running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(pause)
        running = training.process.poll() is None
        rows, evaluations = training.rows(), training.rows(EVALUATIONS)
        status.update(_Text(_status(training, rows)))
        began, there = time.monotonic(), (len(rows), len(evaluations))
        if not rows or there == seen or (running and began < draw_at):
            continue
        seen, drawn = there, curves(rows, evaluations, _floor(training.folder))
        if picture is None:
            picture = display(drawn, display_id=True)
        else:
            picture.update(drawn)
        now = time.monotonic()
        draw_at = now + _DRAWING * (now - began)


def _judge(training: Training) -> None:
    code, said = training.process.returncode, training.said()
    last = said[-1] if said else ""
    if code == TRY_AGAIN:
        raise Stopped(f"{last}   # or run this cell again")
    if code == 2:
        raise Stopped(last)
    if code != 0:
        end = "\n".join(said[-_TAIL:])
        raise Stopped(f"training ended with exit code {code}; its output is in {training.log}, and ends with\n{end}")


class _Text:
    """Plain text as a display: without the quotes of a string."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _status(training: Training, rows: list[Row]) -> str:
    who = "done" if training.process.returncode == 0 else f"process {training.process.pid}"
    if not rows:
        return f"{who}: {(training.said() or ['starting ...'])[-1]}"
    # What is no number (the speed of the first step, the loss of a bad one) is null in the file.
    shown = (("loss", ".4f", "loss {}"), ("tokens_per_s", ",.0f", "{} tokens a second"))
    known = [text.format(format(rows[-1][name], form)) for name, form, text in shown if rows[-1].get(name) is not None]
    return ", ".join([f"{who}: step {rows[-1]['step']:,}", *known])


def _floor(folder: RunFolder) -> float | None:
    """Below which no loss can fall, where the data knows it."""
    try:
        return float(folder.info()["floor"]["nats_per_token"])
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def generate(folder: str, *flags: str) -> str:
    """What the run's newest checkpoint writes; the flags are those of `nash_mhc.generate`."""
    return _command("nash_mhc.generate", folder, *flags)


def _command(module: str, *argv: str) -> str:
    """What a command writes; Stopped with its last line where it fails."""
    words = [sys.executable, "-m", module, *argv]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Stopped((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout


def pack(folder: str, archive: str) -> Path:
    """A zip of the newest complete checkpoint and what the run says about itself: enough to generate, or to continue.
    The same model as transformers reads it goes along."""
    run = RunFolder(folder)
    if is_remote(run.path):
        raise Stopped(f"{folder} is in a bucket already; fetch it with: gcloud storage cp --recursive {folder} .")
    whole = [step for step in run.steps() if run.completed_at(step) is not None]
    if not whole:
        raise Stopped(f"{folder} holds no whole checkpoint yet; let the run reach its first save")
    checkpoint = run.checkpoints / str(whole[-1])
    files = [path for name in (RUN, PARAMETERS, METRICS, EVALUATIONS) if (path := run.path / name).is_file()]
    files += [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    target = Path(archive)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:  # arrays are compressed already
        for path in files:
            out.write(path, Path(run.path.absolute().name) / path.relative_to(run.path))
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / TRANSFORMERS
            _command("nash_mhc.hub", "export", folder, "--out", str(exported))
            for path in sorted(exported.iterdir()):
                out.write(path, path.relative_to(scratch))
    return target
