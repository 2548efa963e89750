"""A thread that watches over a run: who has stalled, who is gone, and where all processes stop together.

heartbeat.py keeps what it knows of the others; stopping.py says where to stop and ends a run that cannot go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import Board, LostProcess, coordinator_answers, waits
from nash_mhc.parallel.processes import coordinator, when_coordinator_is_lost
from nash_mhc.runtime import heartbeat
from nash_mhc.runtime.heartbeat import Heartbeat, Sign
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, leave
from nash_mhc.runtime.stopping import StoppingPoint, Verdicts

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

    def doing(self, phase: str, *, working: bool = False) -> None:
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
        return about | {"still": self._still, "waits": waits()}

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
            leave(SIGNALS.ending)
        if not coordinator_answers():
            print(
                f"error: {coordinator()} is gone; start all processes again to resume from the last checkpoint", file=sys.stderr
            )
            leave()
        # Gloo, too, may end a process that has lost another one.
        self._let_the_thread_find_out()

    def _let_the_thread_find_out(self) -> None:
        """Waits for as many looks as it takes to miss a process. The thread then says whose fault it is, and leaves.

        Not by the clock, which runs on where a busy machine lets nobody look; only without end it does not wait.
        """
        enough, end = self._looked + heartbeat.SILENCE_S + 5 * self._tick, time.monotonic() + _PATIENCE_S
        while self._looked < enough and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(self._tick / 2)
