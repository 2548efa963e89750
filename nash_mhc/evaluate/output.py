"""Output of an evaluation: progress on stderr, a table of results, JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from nash_mhc.config.humanize import duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import reason

log = logging.getLogger(__name__)
_REPORT_INTERVAL = 10.0  # seconds
_HEAD = ("task", "metric", "value", "stderr")


class Progress:
    """Progress on stderr: a bar on a terminal, else a line now and then. `quiet` on all processes but the first."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr, highlight=False, quiet=quiet)

    @contextlib.contextmanager
    def track(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the number of newly finished items."""
        with self._bar(name, total) if self._console.is_terminal else self._lines(name, total) as advance:
            yield advance

    @contextlib.contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)

    @contextlib.contextmanager
    def _lines(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        start = reported = time.monotonic()
        done, first, first_end = 0, 0, start  # the estimate excludes the first items, which include compilation

        def advance(count: int) -> None:
            nonlocal done, reported, first, first_end
            done += count
            now = time.monotonic()
            if not first:
                first, first_end = done, now
            elif now - reported > _REPORT_INTERVAL and done < total:
                reported = now
                left = (now - first_end) / max(done - first, 1) * (total - done)
                log.info(f"{name}: {done:,} of {total:,}, about {duration(left)} left")

        yield advance
        log.info(f"{name}: {total:,} in {duration(time.monotonic() - start)}")


class Row(NamedTuple):
    task: str
    metric: str
    value: int | float  # int: a count
    stderr: float | None = None


def to_rows(task: str, figures: Mapping[str, Any]) -> list[Row]:
    """Convert figures by plain name, or by lm-eval's `metric,filter` and `metric_stderr,filter`."""
    rows = []
    for name, value in figures.items():
        metric, _, filter_name = name.partition(",")
        if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        stderr = figures.get(f"{metric}_stderr,{filter_name}")
        label = metric if filter_name in ("", "none") else f"{metric} ({filter_name})"
        rows.append(Row(task, label, value, float(stderr) if isinstance(stderr, int | float) else None))
    return [row for row in rows if row.metric not in ("sample_len", "sample_count")]


def table(rows: Sequence[Row]) -> str:
    """Return plain text columns; a task is named in its first row only."""
    cells = [_HEAD]
    for previous, row in zip([None, *rows], rows, strict=False):
        task = "" if previous is not None and previous.task == row.task else row.task
        cells.append((task, row.metric, _number(row.value), "-" if row.stderr is None else _number(row.stderr)))
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else f"{value:.4g}"


def write_json(path: Path, settings: Mapping[str, Any], rows: Sequence[Row], details: Mapping[str, Any]) -> None:
    finite = lambda value: value if value is not None and math.isfinite(value) else None  # JSON has no NaN
    tasks: dict[str, dict[str, Any]] = {}
    for row in rows:
        tasks.setdefault(row.task, {})[row.metric] = {"value": finite(row.value), "stderr": finite(row.stderr)}
    text = json.dumps({**settings, "tasks": tasks, "lm_eval": details}, indent=2, default=str) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({reason(error)})") from None
