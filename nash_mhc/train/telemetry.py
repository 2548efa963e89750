"""Where a run's numbers go: metrics.jsonl, TensorBoard event files, the terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def without_nan(value: Any) -> Any:
    """JSON has no NaN: a diverged run must still leave a file that every reader can parse."""
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return value if math.isfinite(value) else None


def _scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """TensorBoard knows only numbers: a list becomes one tag an entry."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _scalars(f"{tag}/{index:02d}", entry)
    else:
        yield tag, value


class Telemetry:
    """Rows by step, to files under `folder`. A resumed run first drops the rows of steps it is about to take again."""

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        self._folder = folder
        for name in ("metrics.jsonl", "eval.jsonl"):
            self._keep_until(folder / name, start_step)
        self._events = EventFileWriter(str(folder), flush_secs=10)
        if start_step:
            # TensorBoard, too, forgets what an earlier process wrote past this point.
            restart = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=time.time(), step=start_step + 1, session_log=restart))

    @staticmethod
    def _keep_until(path: Path, step: int) -> None:
        if path.exists():
            # A crash may have cut the last line short: only a line with its end is a row.
            rows = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            path.write_text("".join(line for line in rows if json.loads(line)["step"] <= step))

    def write(self, step: int, row: dict[str, Any], *, file: str = "metrics.jsonl") -> None:
        """Numbers, or lists of them (one entry a layer), by name."""
        clean = {k: without_nan(v) for k, v in row.items()}
        with (self._folder / file).open("a") as out:
            out.write(json.dumps({"step": step} | clean) + "\n")
        values = [Summary.Value(tag=tag, simple_value=v) for k, x in row.items() for tag, v in _scalars(k, x)]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._events.close()


class Reporter:
    """What a person watches: a progress bar on a terminal, otherwise one plain line a log interval."""

    def __init__(
        self,
        total_steps: int,
        floor: float | None,
        *,
        quiet: bool = False,
        each_step: Callable[[int], None] | None = None,
    ) -> None:
        self._total, self._floor, self._quiet, self._each_step = total_steps, floor, quiet, each_step
        self._console = Console(file=sys.stdout, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=total_steps, note="")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, step: int) -> None:
        if self._bar:
            self._bar.start()
            self._bar.update(self._task, completed=step)

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)
        if self._each_step:
            self._each_step(step)

    def row(self, step: int, row: dict[str, Any]) -> None:
        against = f" ({row['loss'] / self._floor:.2f}x the floor)" if self._floor else ""
        if self._bar:
            note = f"loss {row['loss']:.3f}{against}, {row['tokens_per_s']:,.0f} tok/s"
            self._bar.update(self._task, completed=step, note=note)
            return
        mfu = f"  mfu {row['mfu']:.0%}" if row["mfu"] >= 0.01 else ""
        self.say(
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {row['loss']:.4f}{against}  lr {row['lr']:.2e}  "
            f"grad {row['grad_norm']:.2f}  {row['step_ms']:.0f} ms  {row['tokens_per_s']:,.0f} tok/s{mfu}"
        )

    def end(self) -> None:
        if self._bar:
            self._bar.stop()
