"""How a run's wall time splits into parts, from its first start until now, over all restarts (goodput).

start        until the first step: imports, devices, data, restoring
compile      waiting for the compiler
input        waiting for data
step         training
evaluation, checkpoint
lost         steps after the last checkpoint of a killed process, which are repeated
down         between the end of one process and the start of the next
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from nash_mhc.storage.files import number

PARTS = ("start", "compile", "input", "step", "evaluation", "checkpoint", "lost", "down")


class WallClock:
    """Counts from `started`, the start of this process in seconds since the epoch.

    Wall-clock time connects processes; within one process, a monotonic clock is used.
    """

    def __init__(self, started: float | None = None) -> None:
        self._offset = time.time() - time.monotonic()
        self._started = self._since = self.now() if started is None else started
        self._part = "start"
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def now(self) -> float:
        return self._offset + time.monotonic()

    def enter(self, part: str) -> None:
        now = self.now()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def resume(self, saved: dict[str, Any], *, written: float | None, row: dict[str, Any]) -> None:
        """Add the time of earlier processes.

        `saved` is the `to_json` in the checkpoint that the run resumes from, `written` when that checkpoint was
        complete. `row` is the last row of metrics, by the checkpoint's process or a later one.
        """
        at = float(saved["at"])
        for part, seconds in saved["seconds"].items():
            self._seconds[part] += seconds
        start = max(at, self._started)  # another machine's clock may be behind
        written = min(max(at, written or at), start)
        # The row's parts sum to the time since the first start; `down` is the time without a process.
        since = {part: (number(row, f"time/{part}") or 0.0) - saved["seconds"].get(part, 0.0) for part in PARTS}
        alive = min(at + sum(since.values()), start) if f"time/{PARTS[0]}" in row else at
        if alive > written:  # killed after the checkpoint
            down = max(0.0, since["down"])
            self._seconds["lost"] += alive - at - down
            self._seconds["down"] += down + start - alive
        else:  # stopped with the checkpoint
            self._seconds["checkpoint"] += written - at
            self._seconds["down"] += start - written

    def seconds(self) -> dict[str, float]:
        """Return the seconds per part until now."""
        self.enter(self._part)
        return dict(self._seconds)

    def to_json(self) -> dict[str, Any]:
        return {"at": self.now(), "seconds": self.seconds()}

    def row(self) -> dict[str, float]:
        """Return the entries for a row of metrics: seconds per part, and goodput (the share spent in steps)."""
        seconds = self.seconds()
        return {f"time/{part}": round(s, 3) for part, s in seconds.items()} | {
            "goodput": seconds["step"] / max(sum(seconds.values()), 1e-9)
        }
