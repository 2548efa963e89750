"""Sinks for the metrics of a run: JSON lines, TensorBoard, Weights & Biases. `Telemetry` writes every row to all."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, ROW_FILES, Row, row_of
from nash_mhc.checkpoint.run_lock import Owner
from nash_mhc.config.schema import ConfigError, TelemetryConfig
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import Folder, exists, is_remote, open_log, write_atomic

log = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    name: str  # shown in messages

    def add(self, step: int, row: Row, file: str) -> None:
        """Take a row; `file` is one of ROW_FILES and says what kind of row it is."""

    def flush(self, *, last: bool = False) -> None:
        """Write the waiting rows.

        Raise OSError if they have to wait longer. `last`: nothing will be added after this.
        """

    @property
    def waiting(self) -> int:
        """Number of rows that are not written yet."""


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None: JSON has no spelling for them."""
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(row: Row, file: str) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for sinks that accept only numbers; a list becomes one tag per entry.

    Strings, lists of step numbers and the arrays of an evaluation (shown as pictures) are skipped.
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


# --- JSON lines ------------------------------------------------------------------------------------------------------


class JsonLines:
    """One of ROW_FILES, one JSON object per line. Rows after `last_step` are dropped: they will be written again."""

    def __init__(self, folder: Folder, name: str, last_step: int) -> None:
        self.name = name
        path = folder / name
        if exists(path):
            data = path.read_bytes()
            lines = data.split(b"\n")[:-1]  # a kill may have cut the last line short
            rows = [(line, row_of(line)) for line in lines]
            if damaged := [number for number, (_, row) in enumerate(rows, start=1) if row is None]:
                copy = path.with_name(f"{name}.damaged")
                write_atomic(copy, data)
                others = f" and {len(damaged) - 1} others" if len(damaged) > 1 else ""
                log.warning(f"{path}: skipping unreadable line {damaged[0]}{others}; the original file is saved as {copy.name}")
            remaining = [line + b"\n" for line, row in rows if row is not None and row["step"] <= last_step]
            write_atomic(path, b"".join(remaining))
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


# --- TensorBoard -----------------------------------------------------------------------------------------------------

_file_numbers = itertools.count()  # makes the names of this process's event files unique


class EventFile:
    """A TensorBoard event file.

    The writers of tensorboard and tensorboardX use a thread that dies at the first failure; clu's needs TensorFlow.
    """

    waiting = 0  # rows that are lost here are still in metrics.jsonl

    def __init__(self, folder: Folder, start_step: int, texts: Mapping[str, str] = {}) -> None:
        """`texts` (tag -> Markdown) are written at the start."""
        self.name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        header = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            # Makes TensorBoard drop the events of earlier processes after this step.
            restart = SessionLog(status=SessionLog.START)
            header += _record(Event(wall_time=time.time(), step=start_step + 1, session_log=restart))
        if texts:
            summary = Summary(value=[_text(tag, text) for tag, text in texts.items()])
            header += _record(Event(wall_time=time.time(), step=start_step, summary=summary))
        self._file = open_log(folder / self.name, header)

    def add(self, step: int, row: Row, file: str) -> None:
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars(row, file)]
        values += [_text(tag, _code_block(value)) for tag, value in row.items() if isinstance(value, str)]
        if file == EVALUATIONS:
            for tag, image in _pictures(row):
                values.append(Summary.Value(tag=tag, image=image))
        self._file.add(_record(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))

    def flush(self, *, last: bool = False) -> None:
        self._file.flush(last=last)


def _text(tag: str, markdown: str) -> Summary.Value:
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=plugin, tensor=TensorProto(dtype=DT_STRING, string_val=[markdown.encode()]))


def _code_block(text: str) -> str:
    """Indent `text`, because TensorBoard renders Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


_WHITE, _ZERO, _ONE = np.array((255, 255, 255)), np.array((241, 240, 236)), np.array((29, 78, 168))  # colors
_CELL = 14  # width and height of a table entry, in pixels


def _pictures(row: Row) -> Iterator[tuple[str, Summary.Image]]:
    """Yield (tag, picture) for the arrays in the row that are drawn as pictures."""
    mixing, weights = (np.array(row.get(name, ()), float) for name in ("health/res", "health/scale_weight"))
    if mixing.ndim == 4:  # layers x sub-layers x streams x streams: one column per layer, with a gap between matrices
        gapped = np.pad(mixing, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan).transpose(1, 2, 0, 3)
        height, width = gapped.shape[0] * gapped.shape[1], gapped.shape[2] * gapped.shape[3]
        yield "inside/H_res_by_layer", _picture(gapped.reshape(height, width)[:-1, :-1])
    if weights.ndim == 2:  # layers x scales
        yield "inside/scale_weight_by_layer", _picture(weights)


def _picture(values: np.ndarray) -> Summary.Image:
    """Draw a table of numbers from 0 (light) to 1 (dark); NaN is white."""
    share = np.clip(values, 0.0, 1.0)[..., None]
    pixels = np.where(np.isnan(share), _WHITE, np.round(_ZERO + share * (_ONE - _ZERO)))
    image = Image.fromarray(pixels.astype(np.uint8))
    image = image.resize((_CELL * image.width, _CELL * image.height), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=buffer.getvalue())


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def check_wandb(cfg: TelemetryConfig) -> None:
    """Raise ConfigError if --wandb is set but the library or a login is missing."""
    if cfg.wandb is None:
        return
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs its library: pip install 'nash_mhc[wandb]', or pip install wandb") from None
    if cfg.wandb_mode == "online":
        try:
            logged_in = wandb.login(prompt=False)
        except Exception as error:  # wandb raises many types
            raise ConfigError(f"--wandb {cfg.wandb}: {_first_line(error)}; --wandb-mode offline needs no account") from None
        if not logged_in:
            raise ConfigError(f"--wandb {cfg.wandb}: not logged in; run wandb login, or use --wandb-mode offline")


def new_wandb_id() -> str:
    return secrets.token_hex(4)


class WeightsAndBiases:
    """A wandb run. Its id is saved in the run directory, so that a resumed run continues it."""

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
        except Exception as error:  # wandb raises many types
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
        except Exception as error:  # no failure of wandb may stop a run
            raise OSError(_first_line(error)) from error

    @property
    def waiting(self) -> int:
        return len(self._rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- all sinks -------------------------------------------------------------------------------------------------------


class Telemetry:
    """Write rows by step to the files in `folder` and to `others`.

    A resumed run first drops rows that it will write again: metrics after `start_step`, evaluations after `evaluated`.
    Rows that cannot be written wait in memory, and the failure is reported once: a sink never stops a run.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        start_step: int = 0,
        evaluated: int | None = None,
        owner: Owner = Owner(),
        others: Sequence[Sink] = (),
        texts: Mapping[str, str] = {},
    ) -> None:
        self._folder, self._failing, self._owner = folder, False, owner
        with as_os_errors():
            last_steps = {METRICS: start_step, EVALUATIONS: start_step if evaluated is None else evaluated}
            rows = [JsonLines(folder, name, last_steps[name]) for name in ROW_FILES]
        self._sinks: list[Sink] = [*rows, EventFile(folder, start_step, texts), *others]
        self._flush()

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None:
        for sink in self._sinks:
            sink.add(step, row, file)
        self._flush()

    def _flush(self, *, last: bool = False) -> None:
        failure: tuple[str, OSError] | None = None
        for sink in self._sinks:
            try:
                self._owner.check()  # the directory may belong to another run by now
                sink.flush(last=last)
            except OSError as error:
                failure = failure or (sink.name, error)
        if failure and not self._failing:
            name, fault = failure
            log.warning(
                f"{name} could not be written ({reason(fault)}, {self._folder}); buffering its rows, training continues"
            )
        elif self._failing and not failure:
            log.info(f"metrics are written to {self._folder} again, including the buffered rows")
        self._failing = failure is not None

    def close(self) -> None:
        self._flush(last=True)
        lost: Counter[str] = Counter()
        for sink in self._sinks:
            lost["metrics" if sink.name in ROW_FILES else sink.name] += sink.waiting
        for name, count in lost.items():
            if count:
                log.warning(f"{count} row{'s' * (count > 1)} of {name} could not be written to {self._folder}")


class NullTelemetry(Telemetry):
    """For processes that write no metrics."""

    def __init__(self) -> None: ...

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None: ...

    def close(self) -> None: ...
