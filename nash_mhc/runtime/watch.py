"""What each process of a run is doing: where all of them stop together, and which one holds up the others.

A thread looks after it. With several processes, each leaves a sign of life on a shared board every second or so; whoever is
silent, or does not move while the others wait for it, is named with its phase and its stack, and all leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.processes import Board, coordinator_answers
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, leave

_SILENCE_S = 20.0  # without a sign of life for this long, a process is taken for dead
_BEGIN_S = 120.0  # and for this long, one that has connected and given none yet
_PATIENCE_S = 300.0  # that nobody waits longer than, whatever becomes of the board
_runs = 0
_kept: list[Any] = []  # C calls these until the process ends


@dataclass
class _Peer:
    """Another process: its last sign of life, and for how long there has been no new one."""

    sign: dict[str, Any]
    silent: float = 0.0


class Watch:
    """`doing(phase)` is told what comes next, `should_stop()` asked wherever all processes could stop together."""

    def __init__(self, *, stall_timeout: float) -> None:
        global _runs  # noqa: PLW0603  (a process may train several times; the notes of each time are its own)
        _runs += 1
        self._index, self._count = jax.process_index(), jax.process_count()
        self._timeout = stall_timeout or float("inf")
        self._tick = min(1.0, self._timeout / 10) * max(1, self._count / 64)  # many processes share one board
        self._phase, self._moves, self._idle = "starting", 0, 0.0
        self._working = self._begun = False
        self._points = 0
        self._stop_at: int | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._board = Board(f"nash_mhc/run{_runs}") if self._count > 1 else None
        self._name = f"process {self._index} ({socket.gethostname()}, pid {os.getpid()})" if self._board else "this process"
        self._peers: dict[str, _Peer] = {}
        self._looked = 0.0  # seconds so far, counted in looks
        self._watched = 0.0  # those with an answer
        self._missing: list[int] = []  # who has given no sign of life in all of them
        self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._board is not None:
            SIGNALS.before_leaving = lambda name: self._judge(f"{self._name} was sent {name} before training had begun")
            self._catch_aborts()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._board is not None and isinstance(error, Exception):
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._let_the_thread_find_out()  # a lost peer's doing, most likely
                if self._missing:
                    self._judge(self._never_came())
            self._ended.set()
            reason = (str(error).splitlines() or [kind.__name__ if kind else ""])[0][:300]
            self._post(f"{self._name} has ended: {reason}", code=2 if isinstance(error, ConfigError) else TRY_AGAIN)
            time.sleep(3 * self._tick * (self._index == 0))
        self._ended.set()
        self._thread.join()
        SIGNALS.before_leaving = lambda _: None
        if self._board is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._board.write(f"life/{self._index}", self._sign() | {"ended": True})  # no silence to worry about

    def doing(self, phase: str, *, working: bool = False) -> None:
        """The main thread goes over to `phase`. Only while it is `working` does standing still for long mean anything."""
        self._phase, self._working, self._begun = phase, working, self._begun or working
        self._moves += 1

    def should_stop(self) -> bool:
        """Whether to stop here: in every process at the same point of its work, whichever of them was sent the signal."""
        with self._lock:
            self._points += 1
            if self._board is None:
                return SIGNALS.caught is not None
            return self._stop_at is not None and self._points >= self._stop_at

    def _look_after(self) -> None:
        moves = -1
        while not self._ended.wait(self._tick):
            self._looked += self._tick
            # Counted in looks, not by the clock: a machine that was asleep has not stalled.
            self._idle, moves = (self._idle + self._tick if self._moves == moves else 0.0), self._moves
            if SIGNALS.listening and self._timeout < float("inf"):
                # A stack even where this thread does not come to run, because C code holds the interpreter.
                faulthandler.dump_traceback_later(self._timeout + 5 * self._tick)
            if self._board is not None:
                self._exchange(self._board)
            if self._working and self._idle >= self._timeout:
                self._accuse()
        if SIGNALS.listening:
            faulthandler.cancel_dump_traceback_later()

    def _sign(self) -> dict[str, Any]:
        return {"name": self._name, "phase": self._phase, "moves": self._moves, "at": time.monotonic(), "ended": False}

    def _exchange(self, board: Board) -> None:
        """Leaves a sign of life; reads those of the others and what they have to say."""
        try:
            board.write(f"life/{self._index}", self._sign())
            signs, notes = board.read("life"), board.read("notes")
        except jax.errors.JaxRuntimeError:
            return  # process 0, which holds the board, is gone: see _catch_aborts
        if "verdict" in notes:
            self._end(*notes["verdict"])
        self._watched += self._tick
        self._missing = [index for index in range(self._count) if str(index) not in signs]
        if self._missing and self._watched >= _BEGIN_S:
            self._judge(self._never_came())
        running = {index: sign for index, sign in signs.items() if not sign["ended"]}
        for index, sign in running.items():
            peer = self._peers.setdefault(index, _Peer(sign))
            peer.silent, peer.sign = (peer.silent + self._tick if sign == peer.sign else 0.0), sign
            if peer.silent >= min(_SILENCE_S, self._timeout):
                silence = f"no sign of life for {peer.silent:.0f} s"
                self._judge(f"{sign['name']} is gone or frozen, {silence}; the last that is known of it: {sign['phase']}")
        if (SIGNALS.caught or "stop" in notes) and self._stop_at is None and len(running) == len(signs):
            self._agree(board, notes.get("stop") or f"{self._name} was sent {SIGNALS.caught}")

    def _never_came(self) -> str:
        """Killed after the processes had found each other, before it had begun to watch over the others."""
        names = " and ".join(f"process {index}" for index in self._missing)
        return f"{names} connected and has given no sign of life since: gone, most likely"

    def _agree(self, board: Board, why: str) -> None:
        """Finds the first point that no process has passed yet; nobody passes another one meanwhile.

        This is between the threads, because the main ones may be waiting for each other inside a step.
        """
        if not self._begun:
            self._judge(f"{why}, and training had not begun everywhere")
        with self._lock:
            board.write("notes/stop", why)
            board.write(f"points/{self._index}", self._points)
            try:
                self._stop_at = 1 + max(board.wait(f"points/{index}", 3 * _SILENCE_S) for index in range(self._count))
            except TimeoutError as late:
                self._judge(f"{why}, and process {str(late).rpartition('/')[2]} did not answer")

    def _accuse(self) -> None:
        """This process has not moved for too long. Whoever has come least far is what the others wait for."""
        everyone = {index: peer.sign for index, peer in self._peers.items()} | {str(self._index): self._sign()}
        least = min(sign["moves"] for sign in everyone.values())
        slowest = {index: sign for index, sign in everyone.items() if sign["moves"] == least}
        told = " and ".join(f"{sign['name']}, in the phase: {sign['phase']}" for sign in slowest.values())
        self._judge(f"no progress for {self._idle:.0f} s (--stall-timeout): held up by {told}", list(slowest))

    def _judge(self, verdict: str, culprits: Sequence[str] = ()) -> None:
        self._post(verdict, culprits)
        self._end(verdict, culprits)

    def _post(self, verdict: str, culprits: Sequence[str] = (), code: int = TRY_AGAIN) -> None:
        if self._board is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a board the others know by themselves
                self._board.write("notes/verdict", [verdict, list(culprits), code])

    def _end(self, verdict: str, culprits: Sequence[str], code: int = TRY_AGAIN) -> None:
        """Leaves, with the stacks of those who held up the others."""
        if str(self._index) in culprits:
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
        print(f"error: {verdict}; start again to go on from the last checkpoint", file=sys.stderr)
        if SIGNALS.listening or self._board is not None:
            leave(code)
        self._ended.set()  # in a notebook, which is to stay alive
        SIGNALS.interrupt()

    def _catch_aborts(self) -> None:
        """JAX aborts a process that cannot reach process 0 any more. That shall be a word and a clean end.

        A handler in Python would not run: abort() waits for nobody. This one is called inside of it.
        """
        _kept.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._aborted()))
        ctypes.CDLL(None).signal(signal.SIGABRT, _kept[-1])

    def _aborted(self) -> None:
        """What else the abort means; returns where it is one."""
        if SIGNALS.ending is not None:
            # Process 0 may be gone a moment before JAX has taken leave of it here: everything is done, and that is what counts.
            leave(SIGNALS.ending)
        if not coordinator_answers():
            print("error: process 0 is gone; start again to go on from the last checkpoint", file=sys.stderr)
            leave()
        # Gloo, too, may end a process that has lost another one.
        self._let_the_thread_find_out()

    def _let_the_thread_find_out(self) -> None:
        """Waits for as many looks as it takes to miss a process. The thread then says whose fault it is, and leaves.

        Not by the clock, which runs on where a busy machine lets nobody look; only without end it does not wait.
        """
        enough, end = self._looked + _SILENCE_S + 5 * self._tick, time.monotonic() + _PATIENCE_S
        while self._looked < enough and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(self._tick / 2)


def _stack() -> str:
    """Of all threads, as text; the interpreter writes it to a real file only."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
