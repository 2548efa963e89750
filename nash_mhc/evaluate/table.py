"""What was found: rows of (task, metric, value, error), as a table for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import reason

_HEAD = ("task", "metric", "value", "stderr")


class Row(NamedTuple):
    task: str
    metric: str
    value: int | float  # int: something was counted
    stderr: float | None = None


def rows_of(task: str, figures: Mapping[str, Any]) -> list[Row]:
    """From plain names, or lm-eval's `metric,filter` with `metric_stderr,filter` beside it."""
    found = []
    for name, value in figures.items():
        metric, _, chosen = name.partition(",")
        if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{chosen}")
        shown = metric if chosen in ("", "none") else f"{metric} ({chosen})"
        found.append(Row(task, shown, value, float(error) if isinstance(error, int | float) else None))
    return [row for row in found if row.metric not in ("sample_len", "sample_count")]


def table(rows: Sequence[Row]) -> str:
    """Columns of plain text; a task is named in its first row."""
    cells = [_HEAD]
    for before, row in zip([None, *rows], rows, strict=False):
        task = "" if before is not None and before.task == row.task else row.task
        cells.append((task, row.metric, _number(row.value), "-" if row.stderr is None else _number(row.stderr)))
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else f"{value:.4g}"


def write_json(path: Path, about: Mapping[str, Any], rows: Sequence[Row], details: Mapping[str, Any]) -> None:
    tasks: dict[str, dict[str, Any]] = {}
    for row in rows:
        tasks.setdefault(row.task, {})[row.metric] = {"value": _plain(row.value), "stderr": _plain(row.stderr)}
    text = json.dumps({**about, "tasks": tasks, "lm_eval": details}, indent=2, default=str) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({reason(error)})") from None


def _plain(value: int | float | None) -> int | float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
