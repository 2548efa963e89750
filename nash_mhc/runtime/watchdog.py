"""A thread that watches over a run: who has stalled, who is gone, and where all processes stop together.

heartbeat.py keeps what it knows of the others; stopping.py says where to stop and ends a run that cannot go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from nash_mhc.parallel.board import ANSWER_S, Board, LostProcess, coordinator_answers, is_waiting
from nash_mhc.parallel.processes import coordinator, when_coordinator_is_lost
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, exit_now

SILENCE_S = 20.0  # without a sign of life for this long, a process is taken for dead
BEGIN_S = 120.0  # and for this long, one that has connected and given none yet

Sign = dict[str, Any]  # name, phase, moves, at, ended


@dataclass
class _Peer:
    """Another process: its last sign of life, and for how long there has been no new one."""

    sign: Sign
    silent: float = 0.0


class Heartbeat:
    """Times are counted in looks of `tick` seconds, not by the clock: a machine that was asleep has lost nobody."""

    def __init__(self, board: Board, index: int, count: int, tick: float) -> None:
        self._board, self._index, self._count, self._tick = board, index, count, tick
        self._peers: dict[str, _Peer] = {}
        self.looked = 0.0  # seconds with an answer
        self._unanswered = 0.0  # seconds since the last one
        self.missing: list[int] = []  # who has given no sign of life in all of them
        self.all_run = False  # whether everyone who has given one is still at work

    def exchange(self, mine: Sign) -> dict[str, Any] | None:
        """Leaves a sign of life and reads the others'; returns the notes on the board. None: it cannot be reached,
        because process 0, which holds it, is gone or frozen."""
        try:
            self._board.write(f"life/{self._index}", mine)
            signs, notes = self._board.read("life"), self._board.read("notes")
        except jax.errors.JaxRuntimeError as error:
            # A frozen process has not answered for so long by now, a dead one answers at once.
            self._unanswered += ANSWER_S if isinstance(error, LostProcess) and error.frozen else self._tick
            return None
        self.looked, self._unanswered = self.looked + self._tick, 0.0
        self.missing = [index for index in range(self._count) if str(index) not in signs]
        running = {index: sign for index, sign in signs.items() if not sign["ended"]}
        self.all_run = len(running) == len(signs)
        for index, sign in running.items():
            peer = self._peers.setdefault(index, _Peer(sign))
            peer.silent, peer.sign = (peer.silent + self._tick if sign == peer.sign else 0.0), sign
        return notes

    def lost(self, patience: float) -> str | None:
        """Who is gone, in a sentence: nothing was heard of it for `patience` seconds, or, since the beginning,
        for longer."""
        if self.missing and self.looked >= BEGIN_S:
            return self.never_came()
        for peer in self._peers.values():
            if peer.silent >= min(SILENCE_S, patience):
                name, phase = peer.sign["name"], peer.sign["phase"]
                silence = f"no sign of life for {peer.silent:.0f} s"
                return f"{name} is gone or frozen, {silence}; the last that is known of it: {phase}"
        return None

    def coordinator_lost(self) -> str | None:
        """Process 0 holds the notes, and gives no answer."""
        if self._unanswered < min(SILENCE_S, ANSWER_S):
            return None
        known = self._peers.get("0")
        phase = f"; the last that is known of it: {known.sign['phase']}" if known else ""
        name = known.sign["name"] if known else "process 0"
        return f"{name} is gone or frozen, no answer for {self._unanswered:.0f} s{phase}"

    def never_came(self) -> str:
        """Killed after the processes had found each other, before it had begun to watch over the others."""
        names = " and ".join(f"process {index}" for index in self.missing)
        return f"{names} connected and has given no sign of life since: gone, most likely"

    def signs(self) -> dict[str, Sign]:
        """The last one of each process that was heard of."""
        return {index: peer.sign for index, peer in self._peers.items()}

    def end(self, mine: Sign) -> None:
        """This process has done its work: there will be silence, and nothing to worry about."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.write(f"life/{self._index}", mine | {"ended": True})


class StoppingPoint:
    """The main thread asks at every point where it could stop; another one agrees with the other processes meanwhile.

    `board` is None where there is only one process.
    """

    def __init__(self, board: Board | None, index: int, count: int) -> None:
        self._board, self._index, self._count = board, index, count
        self._points = 0  # passed so far
        self._stop_at: int | None = None
        self._lock = threading.Lock()

    def reached(self) -> bool:
        """Passes a point: whether it is the one to stop at."""
        with self._lock:
            self._points += 1
            if self._board is None:
                return SIGNALS.caught is not None
            return self._stop_at is not None and self._points >= self._stop_at

    @property
    def agreed(self) -> bool:
        return self._stop_at is not None

    def agree(self, why: str, give_up: Callable[[str], None]) -> None:
        """Finds the first point that no process has passed yet; nobody passes another one meanwhile.

        This is between the threads, because the main ones may be waiting for each other inside a step.
        """
        assert self._board is not None
        with self._lock:
            self._board.write("notes/stop", why)
            self._board.write(f"points/{self._index}", self._points)
            try:
                points = [self._board.wait(f"points/{index}", 3 * SILENCE_S) for index in range(self._count)]
            except TimeoutError as late:
                # Still inside: nobody here passes another point before this process leaves.
                give_up(f"{why}, and process {str(late).rpartition('/')[2]} did not answer")
            else:
                self._stop_at = 1 + max(points)


class Verdicts:
    """Of one process; `board` (None for a run of one process) is where the others read them."""

    def __init__(self, board: Board | None, index: int, name: str, tick: float) -> None:
        self._board, self._index, self._name, self._tick = board, index, name, tick

    def post(self, verdict: str, culprits: Sequence[str] = (), code: int = TRY_AGAIN) -> None:
        """For the others, who leave when they read it."""
        if self._board is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a board they find out by themselves
                self._board.write("notes/verdict", [verdict, list(culprits), code])

    def carry_out(self, verdict: str, culprits: Sequence[str], code: int = TRY_AGAIN) -> None:
        """Leaves, with the stacks of those who held up the others.
        Returns only in a notebook, which is to stay alive."""
        if str(self._index) in culprits:
            stack = "(no room to write it)"
            with contextlib.suppress(OSError):  # on a full disk
                stack = _stack()
            print(f"stack of {self._name}:\n{stack}", file=sys.stderr)
            if self._board is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._board.write(f"stacks/{self._index}", stack)
        if self._board is not None and self._index == 0:
            time.sleep(3 * self._tick)  # the board ends with process 0: the others read it first
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for index, stack in self._board.read("stacks").items():  # one log shall tell it all
                    print(f"stack of process {index}:\n{stack}", file=sys.stderr)
        print(f"error: {verdict}; start it again to resume from the last checkpoint", file=sys.stderr)
        if SIGNALS.listening or self._board is not None:
            exit_now(code)
        SIGNALS.interrupt()


def _stack() -> str:
    """Of all threads, as text; the interpreter writes it to a real file only."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


_PATIENCE_S = 300.0  # that nobody waits longer than, whatever becomes of the board
_EFFORT = 0.05  # CPU seconds per second: less is what looking costs
_runs = 0


def effort() -> float:
    """CPU seconds of this process so far; a megabyte read or written counts like a second."""
    done = time.process_time()
    with contextlib.suppress(OSError, ValueError):  # Linux only
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        done += (int(counts["rchar"]) + int(counts["wchar"])) / 2**20
    return done


class Watch:
    """`doing(phase)` hears what comes next, `should_stop()` is asked wherever all processes could stop together."""

    def __init__(self, *, stall_timeout: float) -> None:
        global _runs  # noqa: PLW0603  (a process may train several times; the notes of each time are its own)
        _runs += 1
        index, count = jax.process_index(), jax.process_count()
        self._index = index
        self._timeout = stall_timeout or float("inf")
        self._tick = min(1.0, self._timeout / 10) * max(1, count / 64)  # many processes share one board
        self._phase, self._moves, self._idle = "starting", 0, 0.0
        self._effort, self._still = 0.0, 0.0
        self._working = self._begun = False
        self._looked = 0.0  # seconds so far, counted in looks
        self._ended = threading.Event()
        self._board = board = Board(f"nash_mhc/run{_runs}") if count > 1 else None
        self._name = f"process {index} ({socket.gethostname()}, pid {os.getpid()})" if board else "this process"
        self._others = Heartbeat(board, index, count, self._tick) if board is not None else None
        self._stopping = StoppingPoint(board, index, count)
        self._verdicts = Verdicts(board, index, self._name, self._tick)
        self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._board is not None:
            SIGNALS.before_leaving = lambda name: self._judge(f"{self._name} was sent {name} before training had begun")
            self._catch_aborts()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._others is not None and isinstance(error, Exception):
            if isinstance(error, LostProcess) and not error.frozen:
                self._judge(str(error), *map(str, error.missing))
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._let_the_thread_find_out()  # a lost peer's doing, most likely
                if self._others.missing:
                    self._judge(self._others.never_came())
            self._ended.set()
            reason = (str(error).splitlines() or [kind.__name__ if kind else ""])[0][:300]
            code = 2 if isinstance(error, ConfigError) else TRY_AGAIN
            self._verdicts.post(f"{self._name} has ended: {reason}", code=code)
            time.sleep(3 * self._tick * (self._index == 0))
        self._ended.set()
        self._thread.join()
        SIGNALS.before_leaving = lambda _: None
        if self._others is not None:
            self._others.end(self._sign())

    def set_phase(self, phase: str, *, working: bool = False) -> None:
        """The main thread goes over to `phase`.
        Only while it is `working` does standing still for long mean anything."""
        self._phase, self._working, self._begun = phase, working, self._begun or working
        self._moves += 1

    def should_stop(self) -> bool:
        """Whether to stop here: in every process at the same point of its work,
        whichever of them was sent the signal."""
        return self._stopping.reached()

    def _look_after(self) -> None:
        moves = -1
        while not self._ended.wait(self._tick):
            self._looked += self._tick
            # Counted in looks, not by the clock: a machine that was asleep has not stalled.
            self._idle, moves = (self._idle + self._tick if self._moves == moves else 0.0), self._moves
            if SIGNALS.listening and self._timeout < float("inf"):
                # A stack even where this thread does not come to run, because C code holds the interpreter.
                faulthandler.dump_traceback_later(self._timeout + 5 * self._tick)
            if self._others is not None:
                self._look_at(self._others)
            self._still = self._still + self._tick if self._idle and not self._makes_an_effort() else 0.0
            if self._working and self._idle >= self._timeout:
                self._accuse()
            elif self._others is not None and self._still >= self._timeout:
                self._accuse_of_standstill(self._others)
        if SIGNALS.listening:
            faulthandler.cancel_dump_traceback_later()

    def _sign(self) -> Sign:
        about = {"name": self._name, "phase": self._phase, "moves": self._moves, "at": time.monotonic(), "ended": False}
        return about | {"still": self._still, "waits": is_waiting()}

    def _makes_an_effort(self) -> bool:
        """Whether this process has computed, read or written something since the last look: preparing data or compiling
        may take hours, and a disk that does not answer looks the same from outside."""
        before, self._effort = self._effort, effort()
        return self._effort - before > _EFFORT * self._tick or self._phase.startswith("waiting for")  # which has its own end

    def _look_at(self, others: Heartbeat) -> None:
        """Whether someone is gone, has judged, or was asked to stop."""
        if (notes := others.exchange(self._sign())) is None:
            if (lost := others.coordinator_lost()) is not None:
                self._carry_out(lost, ())  # there is no board to post it on: each process finds out by itself
            return
        if "verdict" in notes:
            self._carry_out(*notes["verdict"])
        if (lost := others.lost(self._timeout)) is not None:
            self._judge(lost)
        if (SIGNALS.caught or "stop" in notes) and not self._stopping.agreed and others.all_run:
            why = notes.get("stop") or f"{self._name} was sent {SIGNALS.caught}"
            if not self._begun:
                self._judge(f"{why}, and training had not begun everywhere")
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 does not answer: the next look finds out
                self._stopping.agree(why, self._judge)

    def _accuse(self) -> None:
        """This process has not moved for too long. Whoever has come least far is what the others wait for."""
        everyone = (self._others.signs() if self._others else {}) | {str(self._index): self._sign()}
        least = min(sign["moves"] for sign in everyone.values())
        slowest = {index: sign for index, sign in everyone.items() if sign["moves"] == least}
        named = " and ".join(f"{sign['name']}, in the phase: {sign['phase']}" for sign in slowest.values())
        self._judge(f"no progress for {self._idle:.0f} s (--stall-timeout): held up by {named}", *slowest)

    def _accuse_of_standstill(self, others: Heartbeat) -> None:
        """Nobody has done anything for too long: those who do not wait for another process hold up the rest."""
        everyone = others.signs() | {str(self._index): self._sign()}
        if all(sign.get("still", 0.0) > 0.9 * self._timeout for sign in everyone.values()) and len(everyone) > 1:
            stuck = {index: sign for index, sign in everyone.items() if not sign.get("waits")} or everyone
            names = " and ".join(f"{sign['name']}, in the phase: {sign['phase']}" for sign in stuck.values())
            self._judge(f"no progress for {self._still:.0f} s (--stall-timeout): held up by {names}", *stuck)

    def _judge(self, verdict: str, *culprits: str) -> None:
        self._verdicts.post(verdict, culprits)
        self._carry_out(verdict, culprits)

    def _carry_out(self, verdict: str, culprits: Any, code: int = TRY_AGAIN) -> None:
        self._verdicts.carry_out(verdict, culprits, code)
        self._ended.set()  # still here: in a notebook

    def _catch_aborts(self) -> None:
        """JAX aborts a process that cannot reach process 0 any more. That shall be a word and a clean end."""
        when_coordinator_is_lost(self._aborted)

    def _aborted(self) -> None:
        """What else the abort means; returns where it is one."""
        if SIGNALS.ending is not None:
            # Process 0 may be gone a moment before JAX has taken leave of it here: everything is done, and that counts.
            exit_now(SIGNALS.ending)
        if not coordinator_answers():
            print(
                f"error: {coordinator()} is gone; start all processes again to resume from the last checkpoint", file=sys.stderr
            )
            exit_now()
        # Gloo, too, may end a process that has lost another one.
        self._let_the_thread_find_out()

    def _let_the_thread_find_out(self) -> None:
        """Waits for as many looks as it takes to miss a process. The thread then says whose fault it is, and leaves.

        Not by the clock, which runs on where a busy machine lets nobody look; only without end it does not wait.
        """
        enough, end = self._looked + SILENCE_S + 5 * self._tick, time.monotonic() + _PATIENCE_S
        while self._looked < enough and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(self._tick / 2)
