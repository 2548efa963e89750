"""Findings of checks, and the child processes of checks that may hang or crash.

A check is a generator of events: what it does next (`Doing`), and what it has found (`Finding`).
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from nash_mhc.config.schema import ConfigError

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "not tried"
_COLORS = {OK: 32, WARNING: 33, PROBLEM: 31, SKIPPED: 2}  # ANSI codes: rich may be what is broken
_LONGEST_ERROR = 300  # characters: some libraries put a stack trace into the message
_GRACE_S = 5.0  # between SIGTERM and SIGKILL: the child removes its files
_CHILD = "from nash_mhc.doctor.findings import child; child()"
_REINSTALL = "install this package again: pip install --force-reinstall nash_mhc"


@dataclass(frozen=True)
class Finding:
    check: str
    status: str  # OK, WARNING, PROBLEM (would stop a training run) or SKIPPED
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # the values in the text, for --json


@dataclass(frozen=True)
class Doing:
    """The next part of a check, and the remedy to report if it fails, hangs or crashes."""

    check: str
    text: str
    remedy: str


Event = Finding | Doing


def one_line(error: BaseException | str) -> str:
    """Return an error as one line. A long one is cut in the middle, because reasons are often at the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError | IndexError):  # their messages need the type
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR // 2]} ... {text[-_LONGEST_ERROR // 2 :]}"


class Lines:
    """Prints each finding as it arrives and, on a terminal, the current activity below."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)
        status = f"{finding.status:<9}"
        status = f"\x1b[{_COLORS[finding.status]}m{status}\x1b[0m" if self._is_terminal else status
        self.say(f"{status}  {finding.check}: {finding.text}" + (f"; {finding.remedy}" if finding.remedy else ""))

    def busy(self, doing: Doing) -> None:
        if self._is_terminal:
            text = f"{doing.check}: {doing.text} ..."
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def say(self, text: str) -> None:
        self.end()
        print(text, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", flush=True)

    def figures(self, check: str) -> dict[str, Any]:
        return next((f.figures for f in self.findings if f.check == check and f.status == OK), {})


# --- the child process -----------------------------------------------------------------------------------------------


def child() -> None:
    """Run the check named on the command line, with its settings as JSON, and write an event per line."""
    module, _, function = sys.argv[1].partition(":")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs every `finally`
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to stderr
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    doing = Doing("", "", "")
    send = lambda event: os.write(out, (json.dumps({type(event).__name__: asdict(event)}) + "\n").encode())
    try:
        for event in getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2])):
            doing = event if isinstance(event, Doing) else doing
            send(event)
    except Exception as error:
        text = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        remedy = doing.remedy
        if isinstance(error, ConfigError) and "; " in text:  # brings its own remedy
            text, _, remedy = text.partition("; ")
        send(Finding(doing.check, PROBLEM, text, remedy))
    os._exit(0)  # a normal exit would wait for threads of a device that does not answer


def _exit_with_parent() -> None:
    """Wait until the parent closes our standard input, which happens even if it is killed."""
    os.read(0, 1)  # sys.stdin would hold a lock that the interpreter needs to exit
    os._exit(1)


# --- its parent ------------------------------------------------------------------------------------------------------


def run_isolated(
    lines: Lines, function: str, checks: Sequence[str], settings: Mapping[str, Any], limit_s: float, env: Mapping[str, str]
) -> None:
    """Run `module:function` in a child process and show its findings: at least one for each of `checks`."""
    first, doing = len(lines.findings), Doing(checks[0], "starting", _REINSTALL)
    argv = [sys.executable, "-c", _CHILD, function, json.dumps(settings)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(env), start_new_session=True, bufsize=0
        )
        assert process.stdin is not None and process.stdout is not None
        failure = f"no answer within {limit_s:g} s"
        with process.stdin, process.stdout as events:
            try:
                while select.select([events], [], [], limit_s)[0]:
                    line = events.readline()
                    if not line.endswith(b"\n"):  # the child has ended, perhaps within a line
                        failure = _failure(process, log)
                        break
                    ((kind, values),) = json.loads(line).items()
                    if kind == "Finding":
                        lines.found(Finding(**values))
                    else:
                        lines.busy(doing := Doing(**values))
            finally:
                _terminate(process)
    if failure:
        lines.found(Finding(doing.check, PROBLEM, f"{failure} while {doing.text}", doing.remedy))
    reported = {finding.check for finding in lines.findings[first:]}
    for check in checks:
        if check not in reported:
            lines.found(Finding(check, SKIPPED, f"because of {doing.check}"))


def _failure(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Return why a child has ended early, with the last line of its log that is not part of a stack trace; or ""."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    if not (code := process.poll()):
        return ""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
    written = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    plain = [line for line in written if line and not line.startswith(("File ", "*** ", "@ ", "~", "^", "PC: "))]
    cause = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the process died {cause}" + (f" ({one_line(plain[-1])})" if plain else "")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End the child's process group. A process that hangs in a dead file system survives SIGKILL and is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
