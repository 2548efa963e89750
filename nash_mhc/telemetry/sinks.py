"""Sinks for the metrics of a run: JSON lines, and TensorBoard with pictures. `fan_out.py` gives every row to all."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, ROW_FILES, Row, row_of
from nash_mhc.checkpoint.run_lock import NoOwner, Owner
from nash_mhc.config.schema import ConfigError, TelemetryConfig
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import Folder, exists, is_remote, open_log, write_atomic

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


def scalars(row: Row, file: str) -> Iterator[tuple[str, float]]:
    """For those that know only numbers: a list becomes one tag an entry.

    Texts, names of steps and what an evaluation shows as pictures are none.
    """
    for tag, value in row.items():
        if isinstance(value, list):
            if file != EVALUATIONS and not tag.endswith("_steps"):
                yield from _entries(tag, value)
        elif not isinstance(value, str):
            yield tag, value


def _entries(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _entries(f"{tag}/{index:02d}", entry)
    else:
        yield tag, value


class JsonLines:
    """One of ROW_FILES: a line of JSON a row. The rows after step `keep_until`, which are taken again, are dropped."""

    def __init__(self, folder: Folder, name: str, keep_until: int, say: Callable[[str], None] = lambda text: None) -> None:
        self.name = name
        path = folder / name
        if exists(path):
            data = path.read_bytes()
            lines = data.split(b"\n")[:-1]  # a crash may have cut the last one short: only a line with its end is a row
            rows = [(line, row_of(line)) for line in lines]
            if damaged := [number for number, (_, row) in enumerate(rows, start=1) if row is None]:
                copy = path.with_name(f"{name}.damaged")
                write_atomic(copy, data)
                others = f" and {len(damaged) - 1} others" if len(damaged) > 1 else ""
                say(f"{path}: line {damaged[0]}{others} cannot be read and is left out; {copy.name} keeps the file as it was")
            kept = [line + b"\n" for line, row in rows if row is not None and row["step"] <= keep_until]
            write_atomic(path, b"".join(kept))
        self._file = open_log(path)

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
    """TensorBoard's records, appended like any open_log file.

    The writers of tensorboard and tensorboardX have a thread that dies of the first fault; clu's needs TensorFlow.
    """

    def __init__(self, folder: Folder, start_step: int, texts: Mapping[str, str] = {}) -> None:
        """`texts` (tag -> Markdown) stand at the start."""
        self.name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        first = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            # TensorBoard, too, forgets what an earlier process wrote past this point.
            restart = SessionLog(status=SessionLog.START)
            first += _record(Event(wall_time=time.time(), step=start_step + 1, session_log=restart))
        about = [_text(tag, text) for tag, text in texts.items()]
        if about:
            first += _record(Event(wall_time=time.time(), step=start_step, summary=Summary(value=about)))
        self._file = open_log(folder / self.name, first)
        self.waiting = 0  # whatever is not here is in metrics.jsonl

    def add(self, step: int, row: Row, file: str) -> None:
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars(row, file)]
        values += [_text(tag, _quoted(value)) for tag, value in row.items() if isinstance(value, str)]
        if file == EVALUATIONS:
            for tag, (width, height, png) in pictures(row):
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
                values.append(Summary.Value(tag=tag, image=image))
        self._file.add(_record(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))

    def flush(self, *, last: bool = False) -> None:
        self._file.flush(last=last)


def _text(tag: str, markdown: str) -> Summary.Value:
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=plugin, tensor=TensorProto(dtype=DT_STRING, string_val=[markdown.encode()]))


def _quoted(text: str) -> str:
    """As it stands: TensorBoard would take it for Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


_NOTHING, _MUCH, _PAPER = (241, 240, 236), (29, 78, 168), (255, 255, 255)
_CELL = 14  # pixels of a number, in height and width


class Picture(NamedTuple):
    width: int
    height: int
    png: bytes


def pictures(row: Row) -> Iterator[tuple[str, Picture]]:
    """(tag, picture) of everything in the row that is one."""
    res: Any = row.get("health/res")
    weights: Any = row.get("health/scale_weight")
    if _depth(res) == 4:  # layers x sub-layers x streams x streams
        yield "inside/H_res_by_layer", _drawn([_beside([layer[part] for layer in res]) for part in range(len(res[0]))])
    if _depth(weights) == 2:  # layers x scales: every layer a line
        yield "inside/scale_weight_by_layer", _drawn([weights])


def _depth(value: Any) -> int:
    return 1 + _depth(value[0]) if isinstance(value, list) and value else 0


def _beside(matrices: list[list[list[float]]]) -> list[list[float | None]]:
    """Matrices of the same size in one table, from left to right, with a gap between them."""
    lines: list[list[float | None]] = []
    for i in range(len(matrices[0])):
        lines.append([])
        for number, matrix in enumerate(matrices):
            gap: list[float | None] = [None] * bool(number)
            lines[-1] += [*gap, *matrix[i]]
    return lines


def _drawn(tables: list[list[list[Any]]]) -> Picture:
    """Tables below each other, with a gap between them."""
    lines: list[list[float | None]] = []
    for number, table in enumerate(tables):
        lines += [[None] * len(table[0])] * bool(number) + table
    image = Image.fromarray(np.array([[_color(value) for value in line] for line in lines], np.uint8))
    image = image.resize((_CELL * image.width, _CELL * image.height), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Picture(*image.size, buffer.getvalue())


def _color(value: float | None) -> tuple[int, ...]:
    if value is None:
        return _PAPER
    share = min(max(value, 0.0), 1.0)
    return tuple(round(a + share * (b - a)) for a, b in zip(_NOTHING, _MUCH, strict=True))


def check_wandb(cfg: TelemetryConfig) -> None:
    """Whether rows could be sent; looked at before anything is made. ConfigError."""
    if cfg.wandb is None:
        return
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs its library: pip install 'nash_mhc[wandb]', or pip install wandb") from None
    if cfg.wandb_mode == "online":
        try:
            known = wandb.login(prompt=False)
        except Exception as error:  # of many kinds; the user needs the reason
            raise ConfigError(f"--wandb {cfg.wandb}: {_first_line(error)}; --wandb-mode offline needs no account") from None
        if not known:
            raise ConfigError(f"--wandb {cfg.wandb}: nobody is logged in; run wandb login, or use --wandb-mode offline")


def new_wandb_id() -> str:
    return secrets.token_hex(4)


class WeightsAndBiases:
    """A run there, with an id that the run's folder keeps: what is resumed goes on in the same one."""

    def __init__(self, cfg: TelemetryConfig, folder: Folder, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        self.name = f"wandb {cfg.wandb}"
        self._rows: list[tuple[int, Row, str]] = []
        mode: Literal["online", "offline"] = "online" if cfg.wandb_mode == "online" else "offline"
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        try:
            self._run = wandb.init(
                project=cfg.wandb, id=run_id, name=folder.name, config=config, mode=mode, resume="allow",
                dir=None if is_remote(folder) else str(folder), settings=settings,
            )  # fmt: skip
        except Exception as error:  # of many kinds, its own and others'
            raise ConfigError(f"--wandb {cfg.wandb}: {_first_line(error)}; --wandb-mode offline needs no network") from None

    def add(self, step: int, row: Row, file: str) -> None:
        self._rows.append((step, row, file))

    def flush(self, *, last: bool = False) -> None:
        try:
            while self._rows:
                step, row, file = self._rows[0]
                texts = {tag: value for tag, value in row.items() if isinstance(value, str)}
                self._run.log(dict(scalars(row, file)) | texts, step=step)
                self._rows.pop(0)
            if last:
                self._run.finish()
        except Exception as error:  # whatever it is, it is no reason to stop a run
            raise OSError(_first_line(error)) from error

    @property
    def waiting(self) -> int:
        return len(self._rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Telemetry:
    """Rows by step, to the files under `folder` and to the sinks `others`.

    A resumed run first drops the rows of the steps that it is about to take again, and of evaluations after step
    `evaluated`, which it is about to make again:
    an earlier process may have done both, and have left no checkpoint of it.

    What cannot be written waits in memory and is reported once: numbers are no reason to stop a run.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        start_step: int = 0,
        evaluated: int | None = None,
        say: Callable[[str], None] = lambda text: None,
        owner: Owner = NoOwner(),
        others: Sequence[Sink] = (),
        texts: Mapping[str, str] = {},
    ) -> None:
        self._folder, self._say, self._faulty, self._owner = folder, say, False, owner
        with as_os_errors():
            until = {METRICS: start_step, EVALUATIONS: start_step if evaluated is None else evaluated}
            rows = [JsonLines(folder, name, until[name], say) for name in ROW_FILES]
        self._sinks: list[Sink] = [*rows, EventFile(folder, start_step, texts), *others]
        self._flush()

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None:
        for sink in self._sinks:
            sink.add(step, row, file)
        self._flush()

    def _flush(self, *, last: bool = False) -> None:
        fault: tuple[str, OSError] | None = None
        for sink in self._sinks:
            try:
                self._owner.check()  # whose folder it is now, its rows are no business of this run
                sink.flush(last=last)
            except OSError as error:
                fault = fault or (sink.name, error)
        if fault and not self._faulty:
            self._say(f"{fault[0]} could not be written ({reason(fault[1])}, {self._folder}); its rows wait, training goes on")
        elif self._faulty and not fault:
            self._say(f"metrics are written to {self._folder} again, with the rows that had waited")
        self._faulty = fault is not None

    def close(self) -> None:
        self._flush(last=True)
        lost: dict[str, int] = {}
        for sink in self._sinks:
            name = "metrics" if sink.name in ROW_FILES else sink.name
            lost[name] = lost.get(name, 0) + sink.waiting
        for name, count in lost.items():
            if count:
                self._say(f"{count} row{'s' * (count > 1)} of {name} could not be written to {self._folder}")


class NullTelemetry(Telemetry):
    """Of a process whose numbers another one writes down."""

    def __init__(self) -> None: ...

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None: ...

    def close(self) -> None: ...
