"""A thread that watches a run: detects stalled and dead processes, and lets all processes stop at the same step."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import ANSWER_S, Board, LostProcess, coordinator_answers, is_waiting, process_names
from nash_mhc.parallel.processes import on_lost_coordinator, report_lost_coordinator
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, exit_now

log = logging.getLogger(__name__)
SILENCE_S = 20.0  # a process without a heartbeat for this long counts as dead
BEGIN_S = 120.0  # the same for a process that has connected but not sent its first heartbeat
_MAX_WAIT_S = 300.0  # upper limit while waiting for the thread to find the lost process
_ACTIVE = 0.05  # CPU seconds per second; the watchdog itself uses less
_runs = 0  # number of runs in this process, whose entries on the board must not mix

Beat = dict[str, Any]  # a heartbeat: name, phase, moves, at, ended, still, waits

# All times below are counted in ticks of the thread instead of by a clock: a suspended machine has lost no process.


@dataclass
class _Peer:
    beat: Beat  # the latest
    silent: float = 0.0  # seconds since it changed


class Heartbeats:
    """Sends this process's heartbeat and follows those of the others."""

    def __init__(self, board: Board, index: int, count: int, tick: float) -> None:
        self._board, self._index, self._count, self._tick = board, index, count, tick
        self._peers: dict[str, _Peer] = {}
        self.looked = 0.0  # seconds with an answer from process 0
        self._unanswered = 0.0  # seconds since its last answer
        self.missing: list[int] = []  # processes that have never sent a heartbeat
        self.all_running = False  # whether no process with a heartbeat has ended

    def exchange(self, own: Beat) -> dict[str, Any] | None:
        """Send a heartbeat, read the others' and return the notes on the board; None if process 0 does not answer."""
        try:
            self._board.write(f"life/{self._index}", own)
            beats, notes = self._board.read("life"), self._board.read("notes")
        except jax.errors.JaxRuntimeError as error:
            # A frozen process 0 has been silent for ANSWER_S by now; a dead one fails immediately.
            self._unanswered += ANSWER_S if isinstance(error, LostProcess) and error.frozen else self._tick
            return None
        self.looked, self._unanswered = self.looked + self._tick, 0.0
        self.missing = [index for index in range(self._count) if str(index) not in beats]
        running = {index: beat for index, beat in beats.items() if not beat["ended"]}
        self.all_running = len(running) == len(beats)
        for index, beat in running.items():
            peer = self._peers.setdefault(index, _Peer(beat))
            peer.silent, peer.beat = (peer.silent + self._tick if beat == peer.beat else 0.0), beat
        return notes

    def lost(self, stall_timeout: float) -> str | None:
        """Return a message that names a dead or frozen process, if there is one."""
        if self.missing and self.looked >= BEGIN_S:
            return self.never_started()
        for peer in self._peers.values():
            if peer.silent >= min(SILENCE_S, stall_timeout):
                name, phase = peer.beat["name"], peer.beat["phase"]
                return f"{name} is dead or frozen: no heartbeat for {peer.silent:.0f} s, last phase: {phase}"
        return None

    def lost_coordinator(self) -> str | None:
        """Return a message if process 0, which stores the board, does not answer."""
        if self._unanswered < min(SILENCE_S, ANSWER_S):
            return None
        known = self._peers.get("0")
        name, phase = (known.beat["name"], f", last phase: {known.beat['phase']}") if known else ("process 0", "")
        return f"{name} is dead or frozen: no answer for {self._unanswered:.0f} s{phase}"

    def never_started(self) -> str:
        return f"{process_names(self.missing)} connected but never sent a heartbeat, and has probably died"

    def beats(self) -> dict[str, Beat]:
        """Return the latest heartbeat of each process."""
        return {index: peer.beat for index, peer in self._peers.items()}

    def end(self, own: Beat) -> None:
        """Tell the others that this process has finished and will be silent."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.write(f"life/{self._index}", own | {"ended": True})


class StoppingPoint:
    """The main thread calls `reached` wherever it could stop; the watchdog thread agrees with the other processes.

    `board` is None for a single process.
    """

    def __init__(self, board: Board | None, index: int, count: int) -> None:
        self._board, self._index, self._count = board, index, count
        self._points = 0  # passed so far
        self._stop_at: int | None = None
        self._lock = threading.Lock()

    def reached(self) -> bool:
        """Pass a point; return whether to stop there."""
        with self._lock:
            self._points += 1
            if self._board is None:
                return SIGNALS.caught is not None
            return self._stop_at is not None and self._points >= self._stop_at

    @property
    def agreed(self) -> bool:
        return self._stop_at is not None

    def agree(self, why: str, give_up: Callable[[str], None]) -> None:
        """Find the first point that no process has passed; the lock keeps the main thread from passing another one.

        Threads do this because main threads may wait for each other inside a step.
        """
        assert self._board is not None
        with self._lock:
            self._board.write("notes/stop", why)
            self._board.write(f"points/{self._index}", self._points)
            points, missing = self._board.gather("points", self._count, 3 * SILENCE_S)
            if missing:  # with the lock held, so that this process passes no other point before it exits
                give_up(f"{why}, but {process_names(missing)} did not answer")
            else:
                self._stop_at = 1 + max(points.values())


class Verdicts:
    """Ends a run that cannot continue, in all of its processes. `board` is None for a single process."""

    def __init__(self, board: Board | None, index: int, name: str, tick: float) -> None:
        self._board, self._index, self._name, self._tick = board, index, name, tick

    def post(self, verdict: str, culprits: Sequence[str] = (), code: int = TRY_AGAIN) -> None:
        """Make the other processes exit with this message."""
        if self._board is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a board, their own watchdogs notice
                self._board.write("notes/verdict", [verdict, list(culprits), code])

    def carry_out(self, verdict: str, culprits: Sequence[str], code: int = TRY_AGAIN) -> None:
        """Print the message and the stacks of the `culprits` and exit. Returns only in a notebook, which survives."""
        if str(self._index) in culprits:
            stack = "(no space to write it)"
            with contextlib.suppress(OSError):  # the disk is full
                stack = _all_stacks()
            print(f"stack of {self._name}:\n{stack}", file=sys.stderr)
            if self._board is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._board.write(f"stacks/{self._index}", stack)
        if self._board is not None and self._index == 0:
            time.sleep(3 * self._tick)  # the board ends with process 0, so the others must have read it
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for index, stack in self._board.read("stacks").items():  # so that one log contains everything
                    print(f"stack of process {index}:\n{stack}", file=sys.stderr)
        print(f"error: {verdict}; start the run again to resume from the last checkpoint", file=sys.stderr)
        if SIGNALS.listening or self._board is not None:
            exit_now(code)
        SIGNALS.interrupt()


def _all_stacks() -> str:
    """Return the stacks of all threads; faulthandler can only write them to a real file."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def _activity() -> float:
    """Return the CPU seconds of this process so far, plus one for every megabyte read or written."""
    seconds = time.process_time()
    with contextlib.suppress(OSError, ValueError):  # Linux only
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        seconds += (int(counts["rchar"]) + int(counts["wchar"])) / 2**20
    return seconds


class Watch:
    """Watches a run. The main thread calls `set_phase` when its work changes, `should_stop` wherever it could stop."""

    def __init__(self, *, stall_timeout: float) -> None:
        global _runs  # noqa: PLW0603
        _runs += 1
        index, count = jax.process_index(), jax.process_count()
        self._index = index
        self._timeout = stall_timeout or float("inf")
        self._tick = min(1.0, self._timeout / 10) * max(1, count / 64)  # slower with many processes, which share a board
        self._phase, self._moves, self._idle = "starting", 0, 0.0
        self._last_activity, self._still = 0.0, 0.0
        self._working = self._begun = False
        self._looked = 0.0
        self._ended = threading.Event()
        self._board = board = Board(f"nash_mhc/run{_runs}") if count > 1 else None
        self._name = f"process {index} ({socket.gethostname()}, pid {os.getpid()})" if board else "this process"
        self._others = Heartbeats(board, index, count, self._tick) if board is not None else None
        self._stopping = StoppingPoint(board, index, count)
        self._verdicts = Verdicts(board, index, self._name, self._tick)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._board is not None:
            SIGNALS.before_leaving = lambda name: self._judge(f"{self._name} received {name} before training started")
            self._catch_aborts()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._others is not None and isinstance(error, Exception):
            if isinstance(error, LostProcess) and not error.frozen:
                self._judge(str(error), *map(str, error.missing))
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._wait_for_verdict()  # most likely caused by a lost process
                if self._others.missing:
                    self._judge(self._others.never_started())
            self._ended.set()
            reason = (str(error).splitlines() or [kind.__name__ if kind else ""])[0][:300]
            code = 2 if isinstance(error, ConfigError) else TRY_AGAIN
            self._verdicts.post(f"{self._name} has ended: {reason}", code=code)
            time.sleep(3 * self._tick * (self._index == 0))
        self._ended.set()
        self._thread.join()
        SIGNALS.before_leaving = lambda _: None
        if self._others is not None:
            self._others.end(self._beat())

    def set_phase(self, phase: str, *, working: bool = False) -> None:
        """Record what the main thread does next. Only while `working` does the stall timeout count its time."""
        self._phase, self._working, self._begun = phase, working, self._begun or working
        self._moves += 1
        log.debug(phase)

    def should_stop(self) -> bool:
        """Return whether to stop here, at the same point in every process, no matter which received the signal."""
        return self._stopping.reached()

    def _run(self) -> None:
        moves = -1
        while not self._ended.wait(self._tick):
            self._looked += self._tick
            self._idle, moves = (self._idle + self._tick if self._moves == moves else 0.0), self._moves
            if SIGNALS.listening and self._timeout < float("inf"):
                # Dumps the stacks even if C code holds the interpreter and this thread cannot run.
                faulthandler.dump_traceback_later(self._timeout + 5 * self._tick)
            if self._others is not None:
                self._check_others(self._others)
            self._still = self._still + self._tick if self._idle and not self._is_active() else 0.0
            if self._working and self._idle >= self._timeout:
                self._report_stall()
            elif self._others is not None and self._still >= self._timeout:
                self._report_standstill(self._others)
        if SIGNALS.listening:
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> Beat:
        about = {"name": self._name, "phase": self._phase, "moves": self._moves, "at": time.monotonic(), "ended": False}
        return about | {"still": self._still, "waits": is_waiting()}

    def _is_active(self) -> bool:
        """Return whether this process has computed, read or written something since the last call.

        Preparing data or compiling may take hours, and looks from outside like a disk that does not answer.
        """
        before, self._last_activity = self._last_activity, _activity()
        is_waiting_for_run = self._phase.startswith("waiting for")  # which has its own timeout
        return self._last_activity - before > _ACTIVE * self._tick or is_waiting_for_run

    def _check_others(self, others: Heartbeats) -> None:
        """React to lost processes, to verdicts of others, and to signals."""
        if (notes := others.exchange(self._beat())) is None:
            if (lost := others.lost_coordinator()) is not None:
                self._carry_out(lost, ())  # without a board, each process has to notice
            return
        if "verdict" in notes:
            self._carry_out(*notes["verdict"])
        if (lost := others.lost(self._timeout)) is not None:
            self._judge(lost)
        if (SIGNALS.caught or "stop" in notes) and not self._stopping.agreed and others.all_running:
            why = notes.get("stop") or f"{self._name} received {SIGNALS.caught}"
            if not self._begun:
                self._judge(f"{why} before training started everywhere")
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 does not answer: the next tick reports it
                self._stopping.agree(why, self._judge)

    def _report_stall(self) -> None:
        """This process has made no progress for too long: blame the process that has come least far."""
        everyone = (self._others.beats() if self._others else {}) | {str(self._index): self._beat()}
        least = min(beat["moves"] for beat in everyone.values())
        self._judge_stuck(self._idle, {index: beat for index, beat in everyone.items() if beat["moves"] == least})

    def _report_standstill(self, others: Heartbeats) -> None:
        """If no process has been active for too long, blame those that do not wait for another one."""
        everyone = others.beats() | {str(self._index): self._beat()}
        if all(beat.get("still", 0.0) > 0.9 * self._timeout for beat in everyone.values()) and len(everyone) > 1:
            stuck = {index: beat for index, beat in everyone.items() if not beat.get("waits")} or everyone
            self._judge_stuck(self._still, stuck)

    def _judge_stuck(self, seconds: float, stuck: dict[str, Beat]) -> None:
        names = " and ".join(f"{beat['name']} is stuck in phase '{beat['phase']}'" for beat in stuck.values())
        self._judge(f"no progress for {seconds:.0f} s (--stall-timeout): {names}", *stuck)

    def _judge(self, verdict: str, *culprits: str) -> None:
        self._verdicts.post(verdict, culprits)
        self._carry_out(verdict, culprits)

    def _carry_out(self, verdict: str, culprits: Any, code: int = TRY_AGAIN) -> None:
        self._verdicts.carry_out(verdict, culprits, code)
        self._ended.set()  # reached only in a notebook

    def _catch_aborts(self) -> None:
        """Have `_aborted` called where JAX would abort because it cannot reach process 0."""
        on_lost_coordinator(self._aborted)

    def _aborted(self) -> None:
        """Exit with a message that names the lost process; return if the abort has another reason."""
        if SIGNALS.ending is not None:
            exit_now(SIGNALS.ending)  # all work is done, but process 0 exited before JAX had disconnected from it
        if not coordinator_answers():
            report_lost_coordinator()
            exit_now()
        # Gloo may also abort a process that has lost another one.
        self._wait_for_verdict()

    def _wait_for_verdict(self) -> None:
        """Wait for as many ticks as the thread needs to notice a lost process; it then names the process and exits.

        Ticks are slow on a busy machine, so there is a limit in seconds, too.
        """
        enough, end = self._looked + SILENCE_S + 5 * self._tick, time.monotonic() + _MAX_WAIT_S
        while self._looked < enough and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(self._tick / 2)
