"""Checks in a process of their own: one that hangs is ended, one that dies is told of, and the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from nash_mhc.doctor.findings import PROBLEM, SKIPPED, Finding, told

_CLEANS_UP_S = 5.0  # the time to remove what it has written, before it is killed


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it may have started. One that even SIGKILL does not end, for its file system is dead, is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLEANS_UP_S)


def _last_words(log: IO[bytes]) -> str:
    """The last line of what it has said that is no frame of a stack."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    plain = [line for line in lines if line and not line.startswith(("File ", "*** ", "@ ", "~", "^", "PC: "))]
    return told(plain[-1]) if plain else ""


def _listen(out: IO[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # a line that was cut off; a pipe that is closed at our own end
        for line in out:
            events.put(json.loads(line))
    events.put(None)


class Watched:
    """One task of `child.py`: `shown` hears each finding as it comes, `busy` what it is at."""

    def __init__(self, shown: Callable[[Finding], None], busy: Callable[[str], None], limit: float) -> None:
        self._shown, self._busy, self._limit = shown, busy, limit
        self._part, self._doing, self._remedy, self._patience, self._status = "", "", "", 1.0, PROBLEM

    def run(self, task: str, checks: Sequence[str], settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """A line for each of `checks` at least, whatever happens."""
        told_of: set[str] = set()
        self._part, self._doing, self._patience, self._status = checks[0], "starting", 1.0, PROBLEM
        self._remedy = "install this package again: pip install --force-reinstall nash_mhc"
        argv = [sys.executable, "-m", "nash_mhc.doctor.child", task, json.dumps(settings)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                start_new_session=True,
                bufsize=0,
            )
            try:
                ended = self._follow(process, told_of)
            finally:
                if process.poll() is None:
                    _end(process)
                for pipe in (process.stdin, process.stdout):
                    # One that could not be ended still holds the other end, and our own listener waits at this one.
                    if pipe is not None and process.poll() is not None:
                        pipe.close()
            if not ended:
                self._lost(f"no answer within {self._limit * self._patience:g} s while {self._doing}", told_of)
            elif process.returncode:
                self._lost(
                    f"the process died {self._death(process.returncode)} while {self._doing}: {_last_words(log)}", told_of
                )
        for check in checks:
            if check not in told_of:
                self._shown(Finding(check, SKIPPED, f"because of {self._part}"))

    @staticmethod
    def _death(code: int) -> str:
        return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def _lost(self, text: str, told_of: set[str]) -> None:
        told_of.add(self._part)
        self._shown(Finding(self._part, self._status, text.rstrip(": "), self._remedy))

    def _follow(self, process: subprocess.Popen[bytes], told_of: set[str]) -> bool:
        """Whether it came to an end by itself."""
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_listen, args=(process.stdout, events), daemon=True).start()
        until = time.monotonic() + self._limit
        while True:
            try:
                event = events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return False
            if event is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CLEANS_UP_S)
                return process.poll() is not None
            if "part" in event:
                self._part, self._remedy, self._patience = event["part"], event["remedy"], event["patience"]
                self._status = event["status"]
            if "say" in event:
                self._doing = event["say"]
                self._busy(f"{self._part}: {self._doing} ...")
            if "finding" in event:
                finding = Finding(**event["finding"])
                told_of.add(finding.check)
                self._shown(finding)
            until = time.monotonic() + self._limit * self._patience
