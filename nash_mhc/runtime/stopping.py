"""Where to stop when a signal has come: at the same point of the work in every process,
whichever of them was sent it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nash_mhc.parallel.board import Board
from nash_mhc.runtime.heartbeat import SILENCE_S
from nash_mhc.runtime.signals import SIGNALS


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
