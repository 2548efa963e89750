"""Where the time of a run went, from its first start until now, over all of its processes. Every moment has one part.

start        until the first step: imports, devices, data, restoring
compile      waiting for the compiler
input        waiting for rows
step         training: what the run is there for
evaluation, checkpoint
lost         work after the last checkpoint of a process that was killed: it is done again
down         no process: between the end of one and the start of the next
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from nash_mhc.storage.json_files import number

PARTS = ("start", "compile", "input", "step", "evaluation", "checkpoint", "lost", "down")


class WallClock:
    """Counts from `started`, in seconds since the epoch: when this process began. The calendar joins processes; within
    one, a clock that is never set counts."""

    def __init__(self, started: float | None = None) -> None:
        self._offset = time.time() - time.monotonic()
        self._started = self._since = self.now() if started is None else started
        self._part = "start"
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def now(self) -> float:
        return self._offset + time.monotonic()

    def enter(self, part: str) -> None:
        """What comes now is of another part."""
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
        """This run has begun before: `saved` (`to_json`) lies in the checkpoint that it goes on from, which was whole
        at `written`; `row` is the last one that was written, by this checkpoint's process or a later one."""
        at = float(saved["at"])
        for part, seconds in saved["seconds"].items():
            self._seconds[part] += seconds
        begun = max(at, self._started)  # another machine's calendar may be behind
        written = min(max(at, written or at), begun)
        # A row knows how much time had passed since the first start, and for how much of it no process was there.
        since = {part: (number(row, f"time/{part}") or 0.0) - saved["seconds"].get(part, 0.0) for part in PARTS}
        alive = min(at + sum(since.values()), begun) if f"time/{PARTS[0]}" in row else at
        if alive > written:  # it was killed later than that
            down = max(0.0, since["down"])
            self._seconds["lost"] += alive - at - down
            self._seconds["down"] += down + begun - alive
        else:  # it was asked to stop, and ended with its checkpoint
            self._seconds["checkpoint"] += written - at
            self._seconds["down"] += begun - written

    def seconds(self) -> dict[str, float]:
        """By part, until now."""
        self.enter(self._part)
        return dict(self._seconds)

    def to_json(self) -> dict[str, Any]:
        return {"at": self.now(), "seconds": self.seconds()}

    def row(self) -> dict[str, float]:
        """For a row of metrics: seconds of each part so far, and the share of all time that went into steps."""
        seconds = self.seconds()
        return {f"time/{part}": round(s, 3) for part, s in seconds.items()} | {
            "goodput": seconds["step"] / max(sum(seconds.values()), 1e-9)
        }
