"""Where the numbers of a run go. A sink takes rows and writes them when it can;
`stream.py` gives every row to all of them."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from nash_mhc.checkpoint.run_folder import Row
from nash_mhc.storage.append_log import growing
from nash_mhc.storage.files import exists, write_whole
from nash_mhc.storage.paths import Folder

_NUMBERS = itertools.count()  # of the event files of this process


@runtime_checkable
class Sink(Protocol):
    name: str  # as it is called where it cannot be written

    def add(self, step: int, row: Row, file: str) -> None:
        """Takes a row; `file` is one of ROW_FILES, which says what it tells of."""

    def flush(self, *, last: bool = False) -> None:
        """Writes what waits; raises OSError where it must go on waiting. The `last` time, nothing comes after it."""

    @property
    def waiting(self) -> int:
        """Rows that are not written yet."""


def without_nan(value: Any) -> Any:
    """JSON has no NaN: a diverged run must still leave a file that every reader can parse."""
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """For those that know only numbers: a list becomes one tag an entry."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from scalars(f"{tag}/{index:02d}", entry)
    else:
        yield tag, value


class JsonLines:
    """One of ROW_FILES: a line of JSON a row. The rows after step `keep_until`, which are taken again, are dropped."""

    def __init__(self, folder: Folder, name: str, keep_until: int) -> None:
        self.name = name
        path = folder / name
        if exists(path):
            # A crash may have cut the last line short: only a line with its end is a row.
            rows = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            write_whole(path, "".join(line for line in rows if json.loads(line)["step"] <= keep_until))
        self._file = growing(path)

    def add(self, step: int, row: Row, file: str) -> None:
        if file == self.name:
            clean = {k: without_nan(v) for k, v in row.items()}
            self._file.add((json.dumps({"step": step} | clean) + "\n").encode())

    def flush(self, *, last: bool = False) -> None:
        self._file.flush(last=last)

    @property
    def waiting(self) -> int:
        return len(self._file.waiting)


class EventFile:
    """For TensorBoard, whose own writer has a thread that dies of the first fault;
    its records are simple enough to append."""

    def __init__(self, folder: Folder, start_step: int) -> None:
        self.name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        first = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            # TensorBoard, too, forgets what an earlier process wrote past this point.
            restart = SessionLog(status=SessionLog.START)
            first += _record(Event(wall_time=time.time(), step=start_step + 1, session_log=restart))
        self._file = growing(folder / self.name, first)
        self.waiting = 0  # whatever is not here is in metrics.jsonl

    def add(self, step: int, row: Row, file: str) -> None:
        values = [Summary.Value(tag=tag, simple_value=v) for k, x in row.items() for tag, v in scalars(k, x)]
        self._file.add(_record(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))

    def flush(self, *, last: bool = False) -> None:
        self._file.flush(last=last)


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
