"""The end of a run that cannot go on: one line that says why, in every process,
with the stacks of those who held it up."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

from nash_mhc.parallel.board import Board
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, leave


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
