"""How a run ends: where all processes stop together after a signal, and the verdict of one that cannot go on."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import jax

from nash_mhc.parallel.board import Board
from nash_mhc.runtime.heartbeat import SILENCE_S
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, leave


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
            leave(code)
        SIGNALS.interrupt()


def _stack() -> str:
    """Of all threads, as text; the interpreter writes it to a real file only."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
