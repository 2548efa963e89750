"""Start, watch and stop a training run from a notebook. The run is a separate process, which survives the kernel."""

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

_LOCK_SECONDS = "600"  # the process of an earlier kernel may still be saving
_IDLE_PER_DRAWING = 9  # seconds without drawing per second of drawing, to leave the CPU to the training
_BUCKET_SECONDS = 20.0  # between looks at an object store, where metrics arrive every half minute
TRANSFORMERS = "transformers"  # folder of the archive with the exported model
_TAIL = 20  # lines of the log that are shown after a failure


class CellError(Exception):
    """Ends a cell, and with it "run all", with one line and no traceback."""

    def _render_traceback_(self) -> list[str]:
        """Called by IPython."""
        return [str(self)]


class Training:
    """The process of a run, with its output in a log file."""

    def __init__(self, folder: str, flags: Sequence[str]) -> None:
        self.folder = RunFolder(folder)
        with tempfile.NamedTemporaryFile("w", prefix="nash_mhc-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            argv = [sys.executable, "-m", "nash_mhc.train", *flags]
            argv += ["--checkpoint-dir", folder, "--log-format", "json", "--wait-for-lock", _LOCK_SECONDS]
            # In its own session: "interrupt the kernel" signals the kernel's whole process group, and together with
            # `request_stop` the run would receive two signals, which means "stop without saving".
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        atexit.register(self.request_stop)

    def request_stop(self) -> None:
        """Ask the run to save its last finished step and exit."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def messages(self) -> list[str]:
        """Return the text lines of the log, without the metrics."""
        messages = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
                text = event.get("text") if event["event"] == "message" else None
            except (ValueError, TypeError, KeyError):
                text = line
            if text:
                messages.append(text)
        return messages

    def rows(self, name: str = METRICS) -> list[Row]:
        """Return the metrics written so far; empty while the file cannot be read."""
        with contextlib.suppress(OSError, ConfigError):
            return self.folder.rows(name)
        return []


def start(folder: str, flags: Sequence[str]) -> Training:
    """Start or resume the run in that directory, with flags of `nash_mhc.train`."""
    if not folder.strip():
        raise CellError("no folder given; set one for the run's checkpoints and metrics")
    return Training(folder, flags)


def follow(training: Training, *, pause: float = 1.0) -> None:
    """Show the curves of a run until it ends; interrupting the cell stops the run with its last step saved.

    CellError if the run did not finish, so that the cells below do not use half of it.
    """
    try:  # from the first line on: an interrupt may come while the plotting library is imported
        _show(training, pause)
    except KeyboardInterrupt:
        training.request_stop()
        training.process.wait()
    _check_exit(training)


def _show(training: Training, pause: float) -> None:
    """Redraw the curves until the run ends."""
    from IPython.display import display

    from nash_mhc.notebook.pictures import curves

    if is_remote(training.folder.path):
        pause = max(pause, _BUCKET_SECONDS)
    text = lambda text: {"text/plain": text}
    status = display(text(f"process {training.process.pid}: starting ..."), raw=True, display_id=True)
    picture: Any = None
    drawn_counts, draw_at = (0, 0), 0.0
    running = True
    while running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(pause)
        running = training.process.poll() is None
        rows, evaluations = training.rows(), training.rows(EVALUATIONS)
        status.update(text(_status(training, rows)), raw=True)
        start_time, counts = time.monotonic(), (len(rows), len(evaluations))
        if not rows or counts == drawn_counts or (running and start_time < draw_at):
            continue
        drawn_counts, drawn = counts, curves(rows, evaluations, _floor(training.folder))
        if picture is None:
            picture = display(drawn, display_id=True)
        else:
            picture.update(drawn)
        now = time.monotonic()
        draw_at = now + _IDLE_PER_DRAWING * (now - start_time)


def _check_exit(training: Training) -> None:
    code, messages = training.process.returncode, training.messages()
    last = messages[-1] if messages else ""
    if code == TRY_AGAIN:
        raise CellError(f"{last}   # or run this cell again")
    if code == 2:
        raise CellError(last)
    if code != 0:
        end = "\n".join(messages[-_TAIL:])
        raise CellError(f"training failed with exit code {code}; its output is in {training.log} and ends with\n{end}")


def _status(training: Training, rows: list[Row]) -> str:
    who = "done" if training.process.returncode == 0 else f"process {training.process.pid}"
    if not rows:
        return f"{who}: {(training.messages() or ['starting ...'])[-1]}"
    # Values that are not numbers (the speed of the first step, the loss of a bad one) are null in the file.
    shown = (("loss", ".4f", "loss {}"), ("tokens_per_s", ",.0f", "{} tokens/s"))
    known = [text.format(format(rows[-1][name], form)) for name, form, text in shown if rows[-1].get(name) is not None]
    return ", ".join([f"{who}: step {rows[-1]['step']:,}", *known])


def _floor(folder: RunFolder) -> float | None:
    """Return the lowest possible loss; None if unknown."""
    try:
        return float(folder.info()["floor"]["nats_per_token"])
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def generate(folder: str, *flags: str) -> str:
    """Generate text from the run's latest checkpoint, with flags of `nash_mhc.generate`."""
    return _run_command("nash_mhc.generate", folder, *flags)


def _run_command(module: str, *argv: str) -> str:
    """Return a command's output; CellError with its last line if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *argv], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise CellError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout


def pack(folder: str, archive: str) -> Path:
    """Zip the latest complete checkpoint, the run's metadata and metrics, and the model exported for transformers."""
    run = RunFolder(folder)
    if is_remote(run.path):
        raise CellError(f"{folder} is already in a bucket; download it with: gcloud storage cp --recursive {folder} .")
    complete = [step for step in run.steps() if run.completed_at(step) is not None]
    if not complete:
        raise CellError(f"{folder} has no complete checkpoint yet; let the run reach its first save")
    checkpoint = run.checkpoints / str(complete[-1])
    files = [path for name in (RUN, PARAMETERS, METRICS, EVALUATIONS) if (path := run.path / name).is_file()]
    files += [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    target = Path(archive)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:  # arrays are compressed already
        for path in files:
            out.write(path, Path(run.path.absolute().name) / path.relative_to(run.path))
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / TRANSFORMERS
            _run_command("nash_mhc.hub", "export", folder, "--out", str(exported))
            for path in sorted(exported.iterdir()):
                out.write(path, path.relative_to(scratch))
    return target
