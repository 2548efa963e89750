"""Run checks that may hang or crash in a child process, and show their findings as they arrive.

The child writes one JSON object per line. A `section` event carries the remedy to report if the child then goes silent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from nash_mhc.config.schema import ConfigError
from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, Finding, one_line

# Task -> the function that the child calls with a Reporter and the settings.
TASKS = {
    "accelerators": ("nash_mhc.doctor.machine", "report_accelerators"),
    "devices": ("nash_mhc.doctor.devices", "check"),
    "storage": ("nash_mhc.doctor.trial", "check_storage"),
    "smoke": ("nash_mhc.doctor.trial", "smoke_test"),
}
_CHILD = "from nash_mhc.doctor.isolated import child; child()"
_GRACE_S = 5.0  # between SIGTERM and SIGKILL: the child removes its files
_REINSTALL = "install this package again: pip install --force-reinstall nash_mhc"


class Section(NamedTuple):
    """A part of a task. `status` and `remedy` are those of the finding if the section fails."""

    check: str
    doing: str
    remedy: str
    patience: float = 1.0  # factor on the time limit
    status: str = PROBLEM


class CheckFailed(Exception):
    """A section has failed and reported it. The sections after it cannot run."""


class Reporter:
    """The child's side: sends events to the parent through a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def _send(self, **event: Any) -> None:
        os.write(self._descriptor, (json.dumps(event) + "\n").encode())

    def progress(self, text: str) -> None:
        """Report the current activity; this restarts the time limit."""
        self._send(doing=text)

    def found(self, finding: Finding) -> None:
        self._send(finding=finding.as_dict())

    def ok(self, check: str, text: str, **figures: Any) -> None:
        self.found(Finding(check, OK, text, figures=figures))

    @contextlib.contextmanager
    def section(self, check: str, doing: str, remedy: str, *, patience: float = 1.0, status: str = PROBLEM) -> Iterator[None]:
        """Report any exception inside as a finding of `check`, then raise CheckFailed."""
        self._send(section=Section(check, doing, remedy, patience, status))
        try:
            yield
        except CheckFailed:
            raise
        except Exception as error:
            text = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
            if isinstance(error, ConfigError) and "; " in str(error):  # brings its own remedy
                text, _, remedy = text.partition("; ")
            self.found(Finding(check, status, text, remedy))
            raise CheckFailed from None


def child() -> None:
    """Run the task named on the command line, with its settings as JSON."""
    task, settings = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs every `finally`
    reporter = Reporter(os.dup(1))
    os.dup2(2, 1)  # output of libraries goes to stderr
    threading.Thread(target=_exit_with_parent, args=(settings.get("scratch"),), daemon=True).start()
    module, function = TASKS[task]
    with contextlib.suppress(CheckFailed):
        getattr(importlib.import_module(module), function)(reporter, **settings)
    os._exit(0)  # a normal exit would wait for threads of a device that does not answer


def _exit_with_parent(scratch: str | None) -> None:
    """Wait until the parent closes our standard input, which happens even if it is killed."""
    os.read(0, 1)  # sys.stdin would hold a lock that the interpreter needs to exit
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


class IsolatedChecks:
    """The parent's side: `show` receives each finding, `busy` the current activity."""

    def __init__(self, show: Callable[[Finding], None], busy: Callable[[str], None], limit_s: float) -> None:
        self._show_finding, self._busy, self._limit_s = show, busy, limit_s
        self._section = Section("", "", "")
        self._reported: set[str] = set()

    def run(self, task: str, checks: Sequence[str], settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Run a task of TASKS. Each of `checks` gets at least one finding."""
        self._reported, self._section = set(), Section(checks[0], "starting", _REINSTALL)
        argv = [sys.executable, "-c", _CHILD, task, json.dumps(settings)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(env),
                start_new_session=True, bufsize=0,
            )  # fmt: skip
            try:
                has_ended = self._follow(process)
            finally:
                if process.poll() is None:
                    _terminate(process)
                for pipe in (process.stdin, process.stdout):
                    # A child that cannot be killed keeps its end open, and closing ours would block on the reader.
                    if pipe is not None and process.poll() is not None:
                        pipe.close()
            section = self._section
            if not has_ended:
                limit_s = self._limit_s * section.patience
                self._show(Finding(
                    section.check, section.status, f"no answer within {limit_s:g} s while {section.doing}", section.remedy
                ))  # fmt: skip
            elif code := process.returncode:
                cause = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                text = f"the process died {cause} while {section.doing}: {_last_line(log)}".rstrip(": ")
                self._show(Finding(section.check, section.status, text, section.remedy))
        for check in checks:
            if check not in self._reported:
                self._show(Finding(check, SKIPPED, f"because of {section.check}"))

    def _show(self, finding: Finding) -> None:
        self._reported.add(finding.check)
        self._show_finding(finding)

    def _follow(self, process: subprocess.Popen[bytes]) -> bool:
        """Handle events until the child exits (True) or is silent for too long (False)."""
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_read_events, args=(process.stdout, events), daemon=True).start()
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                event = events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if event is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                return process.poll() is not None
            if "finding" in event:
                self._show(Finding(**event["finding"]))
            else:
                new = Section(*event["section"]) if "section" in event else self._section._replace(doing=event["doing"])
                self._section = new
                self._busy(f"{new.check}: {new.doing} ...")
            deadline = time.monotonic() + self._limit_s * self._section.patience


def _read_events(out: IO[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # a truncated line, or the parent has closed the pipe
        for line in out:
            events.put(json.loads(line))
    events.put(None)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End the child's process group. A process that hangs in a dead file system survives SIGKILL and is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _last_line(log: IO[bytes]) -> str:
    """Return the last line of the log that is not part of a stack trace."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    plain = [line for line in lines if line and not line.startswith(("File ", "*** ", "@ ", "~", "^", "PC: "))]
    return one_line(plain[-1]) if plain else ""
