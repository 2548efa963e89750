"""Findings of checks: their display, and the child processes of checks that may hang or crash.

A child writes one JSON object per line. A `section` event carries the remedy to report if the child then goes silent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple

from nash_mhc.config.schema import ConfigError

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "not tried"
_COLORS = {OK: 32, WARNING: 33, PROBLEM: 31, SKIPPED: 2}  # ANSI codes: rich may be what is broken
_STATUS_WIDTH = max(map(len, _COLORS))
_LONGEST_ERROR = 300  # characters: some libraries put a stack trace into the message

# Task -> the function that the child calls with a Reporter and the settings.
TASKS = {
    "accelerators": ("nash_mhc.doctor.machine", "report_accelerators"),
    "devices": ("nash_mhc.doctor.trial", "check_devices"),
    "storage": ("nash_mhc.doctor.trial", "check_storage"),
    "smoke": ("nash_mhc.doctor.trial", "smoke_test"),
}
_CHILD = "from nash_mhc.doctor.findings import child; child()"
_GRACE_S = 5.0  # between SIGTERM and SIGKILL: the child removes its files
_REINSTALL = "install this package again: pip install --force-reinstall nash_mhc"


@dataclass(frozen=True)
class Finding:
    check: str
    status: str  # OK, WARNING, PROBLEM (would stop a training run) or SKIPPED
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # the values in the text, for --json


def one_line(error: BaseException | str) -> str:
    """Return an error as one line. A long one is cut in the middle, because reasons are often at the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError | IndexError):  # their messages need the type
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR // 2]} ... {text[-_LONGEST_ERROR // 2 :]}"


def size(count: float) -> str:
    """Format bytes as `812 MB` or `23.4 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


class Lines:
    """Prints each finding as it arrives and, on a terminal, the current activity below."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)
        status = f"{finding.status:<{_STATUS_WIDTH}}"
        status = f"\x1b[{_COLORS[finding.status]}m{status}\x1b[0m" if self._is_terminal else status
        self.say(f"{status}  {finding.check}: {finding.text}" + (f"; {finding.remedy}" if finding.remedy else ""))

    def busy(self, text: str) -> None:
        """Show the current activity. Without a terminal, print only the slow compilation."""
        if self._is_terminal:
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif "compiling the step" in text:
            self.say(f"{'...':<{_STATUS_WIDTH}}  {text}")

    def say(self, text: str) -> None:
        self.end()
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", flush=True)


# --- the child process -----------------------------------------------------------------------------------------------


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
        self._send(finding=asdict(finding))

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


# --- its parent ------------------------------------------------------------------------------------------------------


class IsolatedChecks:
    """Runs tasks in child processes and shows their findings."""

    def __init__(self, lines: Lines, limit_s: float) -> None:
        self._lines, self._limit_s = lines, limit_s
        self._section = Section("", "", "")

    def run(self, task: str, checks: Sequence[str], settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Run a task of TASKS. Each of `checks` gets at least one finding."""
        first, self._section = len(self._lines.findings), Section(checks[0], "starting", _REINSTALL)
        argv = [sys.executable, "-c", _CHILD, task, json.dumps(settings)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(env),
                start_new_session=True, bufsize=0,
            )  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            with process.stdin, process.stdout as events:
                try:
                    has_ended = self._follow(process, events)
                finally:
                    _terminate(process)
            section, text = self._section, ""
            if not has_ended:
                text = f"no answer within {self._limit_s * section.patience:g} s while {section.doing}"
            elif code := process.returncode:
                cause = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                text = f"the process died {cause} while {section.doing}: {_last_line(log)}".rstrip(": ")
        if text:
            self._lines.found(Finding(section.check, section.status, text, section.remedy))
        reported = {finding.check for finding in self._lines.findings[first:]}
        for check in checks:
            if check not in reported:
                self._lines.found(Finding(check, SKIPPED, f"because of {section.check}"))

    def _follow(self, process: subprocess.Popen[bytes], events: IO[bytes]) -> bool:
        """Handle events until the child exits (True) or is silent for too long (False)."""
        while select.select([events], [], [], self._limit_s * self._section.patience)[0]:
            line = events.readline()
            if not line.endswith(b"\n"):  # the child has ended, perhaps within a line
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                return process.poll() is not None
            event = json.loads(line)
            if "finding" in event:
                self._lines.found(Finding(**event["finding"]))
            else:
                new = Section(*event["section"]) if "section" in event else self._section._replace(doing=event["doing"])
                self._section = new
                self._lines.busy(f"{new.check}: {new.doing} ...")
        return False


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End the child's process group. A process that hangs in a dead file system survives SIGKILL and is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
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
