"""Where a run's numbers go: metrics.jsonl, TensorBoard event files, the terminal."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from nash_mhc.checkpoint.faults import as_os_errors, reason
from nash_mhc.checkpoint.folders import exists, write_whole
from nash_mhc.checkpoint.ownership import Nobody, Owner
from nash_mhc.config.places import Folder
from nash_mhc.config.words import duration, short
from nash_mhc.train.growing import growing

_ROWS = ("metrics.jsonl", "eval.jsonl")
_NUMBERS = itertools.count()  # of the event files of this process


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


def _keep_until(path: Folder, step: int) -> None:
    """Drops the rows after `step`; they are all there, or none is gone."""
    if exists(path):
        # A crash may have cut the last line short: only a line with its end is a row.
        rows = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        write_whole(path, "".join(line for line in rows if json.loads(line)["step"] <= step))


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


class Telemetry:
    """Rows by step, to files under `folder`. A resumed run first drops the rows of steps it is about to take again, and of
    the evaluation that is about to be `made_up` for: an earlier process may have done so, and have left no checkpoint of it.

    What cannot be written waits in memory and is told once: numbers are no reason to stop a run.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        start_step: int = 0,
        made_up: bool = False,
        say: Callable[[str], None] = lambda text: None,
        owner: Owner = Nobody(),
    ) -> None:
        self._folder, self._say, self._faulty, self._owner = folder, say, False, owner
        with as_os_errors():
            for name in _ROWS:
                _keep_until(folder / name, start_step - (made_up and name == "eval.jsonl"))
        # TensorBoard's own writer has a thread that dies of the first fault; its records are simple enough to append.
        self._name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        first = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            # TensorBoard, too, forgets what an earlier process wrote past this point.
            restart = SessionLog(status=SessionLog.START)
            first += _record(Event(wall_time=time.time(), step=start_step + 1, session_log=restart))
        self._files = {name: growing(folder / name) for name in _ROWS} | {self._name: growing(folder / self._name, first)}
        self._flush()

    def write(self, step: int, row: dict[str, Any], *, file: str = "metrics.jsonl") -> None:
        """Numbers, or lists of them (one entry a layer), by name."""
        clean = {k: without_nan(v) for k, v in row.items()}
        self._files[file].add((json.dumps({"step": step} | clean) + "\n").encode())
        values = [Summary.Value(tag=tag, simple_value=v) for k, x in row.items() for tag, v in _scalars(k, x)]
        self._files[self._name].add(_record(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))
        self._flush()

    def _flush(self, *, last: bool = False) -> None:
        fault: tuple[str, OSError] | None = None
        for name, file in self._files.items():
            try:
                self._owner.check()  # whose folder it is now, its rows are no business of this run
                file.flush(last=last)
            except OSError as error:
                fault = fault or (name, error)
        if fault and not self._faulty:
            self._say(f"{fault[0]} could not be written ({reason(fault[1])}, {self._folder}); its rows wait, training goes on")
        elif self._faulty and not fault:
            self._say(f"metrics are written to {self._folder} again, with the rows that had waited")
        self._faulty = fault is not None

    def close(self) -> None:
        self._flush(last=True)
        if lost := sum(len(self._files[name].waiting) for name in _ROWS):
            self._say(f"{lost} row{'s' * (lost > 1)} of metrics could not be written to {self._folder}")


class Nowhere(Telemetry):
    """Of a process whose numbers another one writes down."""

    def __init__(self) -> None: ...

    def write(self, step: int, row: dict[str, Any], *, file: str = "metrics.jsonl") -> None: ...

    def close(self) -> None: ...


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
        self._total, self.floor, self._quiet, self._each_step = total_steps, floor, quiet, each_step
        self._most_unused = 0.0  # of all rows so far: the same is not said again in every one
        self._began, self._first = time.monotonic(), 0  # when and at which step this process began to train
        self._console = Console(file=sys.stdout, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=total_steps, note="")

    def say(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._console.print(text, markup=False, soft_wrap=True)
        except BrokenPipeError:
            raise
        except OSError:
            self._console = Console(file=sys.stdout, highlight=False)  # a log file on a full disk: the run goes on without it

    def begin(self, step: int) -> None:
        self._began, self._first = time.monotonic(), step
        if self._bar:
            self._bar.start()
            self._bar.update(self._task, completed=step)

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)
        if self._each_step:
            self._each_step(step)

    def row(self, step: int, row: dict[str, Any]) -> None:
        self._line(step, row)
        unused = row.get("health/scales_unused", [])
        if sum(unused) > self._most_unused:
            self._most_unused = sum(unused)
            layers = ", ".join(str(layer) for layer, count in enumerate(unused) if count)
            self.say(
                f"step {step}: {self._most_unused:.0f} scales of heads had no weight since the last row, in layers {layers} "
                "(health/scales_unused)"
            )

    def _line(self, step: int, row: dict[str, Any]) -> None:
        against = f" ({row['loss'] / self.floor:.2f}x the floor)" if self.floor else ""
        read = [f"{share:.0%}" for name, share in row.items() if name.startswith("epochs/")]  # of the data, 250%: 2.5 passes
        data = f"  data {', '.join(read[:3])}{', ...' * (len(read) > 3)}" if read else ""
        if self._bar:
            note = (
                f"loss {row['loss']:.3f}{against}, {row['tokens_per_s']:,.0f} tok/s, {short(row['tokens_seen'])} tokens{data}"
            )
            self._bar.update(self._task, completed=step, note=note)
            return
        mfu = f"  mfu {row['mfu']:.0%}" if row["mfu"] >= 0.01 else ""
        elapsed = time.monotonic() - self._began
        left = elapsed / max(step - self._first, 1) * (self._total - step)
        clock = duration(elapsed) + (f", {duration(left)} left" if left else "")
        self.say(
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {row['loss']:.4f}{against}  lr {row['lr']:.2e}  "
            f"grad {row['grad_norm']:.2f}  {row['step_ms']:.0f} ms  {row['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"{short(row['tokens_seen'])} tokens{data}  {clock}"
        )

    def end(self) -> None:
        if self._bar:
            self._bar.stop()
