"""Read the files of a run and collect what its page shows: facts, columns of numbers, samples. Needs no jax."""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, Row, RunFolder
from nash_mhc.config import kits
from nash_mhc.config.commands import module_command
from nash_mhc.config.fields import ConfigError
from nash_mhc.config.humanize import duration
from nash_mhc.config.kits import FIGURES
from nash_mhc.storage.files import Folder, number, table

_BUCKETS = 500  # of a long run; each contributes its lowest and highest values
_SPIKY = ("loss", "grad_norm", "step_ms")  # columns whose extremes are shown
_HEALTH_ROWS = 120  # columns of a heat map
_COLUMNS = (
    "loss", "accuracy", "lr", "grad_norm", "tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_gib", "goodput",
)  # fmt: skip
_EVAL_COLUMNS = ("eval/loss", "eval/loss_ema", "eval/accuracy", "eval/bits_per_byte")
# Name -> nesting of its value: one number per layer, or one per layer and part.
_HEALTH = {
    "scale_weight": 2, "scale_entropy": 1, "scales_unused": 1, "gain_forward": 1, "gain_backward": 1, "stream_rms": 2,
}  # fmt: skip


class Run(NamedTuple):
    """The files of one run."""

    folder: Folder
    info: dict[str, Any]  # run.json
    rows: list[Row]
    evals: list[Row]
    result: dict[str, Any] = {}  # result.json, if there is one

    @property
    def name(self) -> str:
        return self.folder.name or self.folder.absolute().name


def open_run(name: str | Folder) -> Run:
    """Read a run. Raise ConfigError if the directory is not a run or a file has a broken line."""
    folder = RunFolder(name)
    info = folder.info()
    with contextlib.suppress(ConfigError):  # the figures of a kit that has moved are omitted
        kits.use(str(table(info, "config").get("kit") or ""), recorded=True)
    return Run(folder.path, info, folder.rows(METRICS), folder.rows(EVALUATIONS), folder.result())


def _rounded(value: Any) -> Any:
    """Round to six digits, more than a screen shows, to halve the size. NaN and non-numbers become None."""
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _total_steps(info: dict[str, Any]) -> float | None:
    return number(table(table(info, "config"), "train"), "total_steps")


def facts(run: Run) -> dict[str, str]:
    """Return the key figures as text, without those that are unknown."""
    info, last, evaluation = run.info, run.rows[-1] if run.rows else {}, run.evals[-1] if run.evals else {}
    devices, mesh, floor = (table(info, name) for name in ("devices", "mesh", "floor"))
    loss, nats = number(evaluation, "eval/loss"), number(floor, "nats_per_token")
    test, expected = table(run.result, "test"), table(info, "expected")

    def median(name: str) -> float | None:
        known = [v for row in run.rows if (v := number(row, name)) is not None]
        return statistics.median(known) if known else None

    def show(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    total = _total_steps(info)
    texts = {
        "parameters": show(number(info, "parameters"), "{:,.0f}"),
        "device": f"{devices.get('count')} x {devices.get('kind')}" if devices else "",
        "mesh": f"{'x'.join(map(str, mesh.values()))} ({' x '.join(mesh)})" if mesh else "",
        "steps": f"{last.get('step', evaluation.get('step', 0)):,} of {total:,.0f}" if total is not None else "",
        "tokens seen": show(number(last, "tokens_seen"), "{:,.0f}"),
        "final loss, nats/token": show(number(last, "loss"), "{:.4f}"),
        "held-out loss, nats/token": show(loss, "{:.4f}"),
        "held-out loss, averaged weights": show(number(evaluation, "eval/loss_ema"), "{:.4f}"),
        **{figure.fact: show(number(evaluation, f"eval/{name}"), figure.form) for name, figure in FIGURES.items()},
        "held-out bits/byte": show(number(evaluation, "eval/bits_per_byte"), "{:.4f}"),
        "test loss, nats/token": show(number(test, "test/loss"), "{:.4f}"),
        "test accuracy": show(number(test, "test/accuracy"), "{:.1%}"),
        "floor, nats/token": show(nats, "{:.4f}"),
        "floor, bits/byte": show(number(floor, "bits_per_byte"), "{:.4f}"),
        "held-out loss / floor": f"{loss / nats:.3f}x" if loss is not None and nats else "",
        "tokens/s (median)": show(median("tokens_per_s"), "{:,.0f}"),
        "tokens/s, expected": show(number(expected, "tokens_per_s"), "{:,.0f}"),
        "MFU (median)": show(median("mfu"), "{:.1%}"),
        "goodput (share of time in steps)": show(number(last, "goodput"), "{:.1%}"),
        "peak memory per device": show(number(last, "memory_gib"), "{:.1f} GiB"),
        "peak memory, expected": show(number(expected, "gib"), "{:.2g} GiB"),
    }
    return {name: text for name, text in texts.items() if text}


def summarize(run: Run) -> str:
    """Return the outcome of the run in two or three sentences."""
    if not run.rows:
        return "The run has no rows of metrics yet."
    last, total = run.rows[-1], _total_steps(run.info)
    step = int(last["step"])
    of_total = "" if total is None else f" of {total:,.0f}"
    sentences = [f"All {step:,} steps are done." if step == total else f"Step {step:,}{of_total}."]
    losses = [(int(row["step"]), loss) for row in run.evals if (loss := number(row, "eval/loss")) is not None]
    if losses:
        eval_step, loss = losses[-1]
        text = f"The held-out loss is {loss:.4f} nats/token at step {eval_step:,}"
        if floor := number(table(run.info, "floor"), "nats_per_token"):
            text += f", {loss / floor:.2f} times the floor of this text"
        best_step, best = min(losses, key=lambda pair: pair[1])
        sentences.append(text + (f"; it was lowest at step {best_step:,} ({best:.4f})." if best_step != eval_step else "."))
        if (end := number(run.result, "step")) is not None and end != eval_step:
            sentences.append(f"The run ends with the checkpoint of step {end:,.0f}.")
    elif (loss := number(last, "loss")) is not None:
        sentences.append(f"The training loss is {loss:.4f}; there was no evaluation.")
    seconds = _seconds(last)
    if whole := sum(seconds.values()):
        lost = (seconds.get("lost", 0.0) + seconds.get("down", 0.0)) / whole
        and_lost = f" and {lost:.0%} lost to stops" if lost >= 0.005 else ""
        sentences.append(f"It took {duration(whole)}, {seconds.get('step', 0.0) / whole:.0%} of it in steps{and_lost}.")
    if (skipped := number(last, "skipped")) and skipped > 0:
        sentences.append(f"{skipped:,.0f} update{'s were' if skipped > 1 else ' was'} skipped.")
    return " ".join(sentences)


def _seconds(row: Row) -> dict[str, float]:
    """Return the time since the first start by activity; empty for old runs, which did not record it."""
    return {name.removeprefix("time/"): number(row, name) or 0.0 for name in row if name.startswith("time/")}


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a long run that keep its extremes: lowest and highest per bucket, spikes and skipped steps."""
    if len(rows) <= 4 * _BUCKETS:
        return list(rows)
    size, chosen = math.ceil(len(rows) / _BUCKETS), {0, len(rows) - 1}
    for start in range(0, len(rows), size):
        for name in _SPIKY:
            values = [(v, i) for i in range(start, min(start + size, len(rows))) if (v := number(rows[i], name)) is not None]
            chosen |= {min(values)[1], max(values)[1]} if values else {start}
    chosen |= {i for i, row in enumerate(rows) if row.get("spike_steps") or row.get("skipped_steps")}
    return [rows[i] for i in sorted(chosen)]


def _interpolated(steps: list[float], values: list[float | None], step: float) -> float | None:
    """Interpolate the values linearly at `step`; return None after the last row."""
    i = bisect.bisect_left(steps, step)
    if i == len(steps):
        return values[-1] if values and steps and step == steps[-1] else None
    after = values[i]
    if after is None or steps[i] == step:
        return after
    before, first = (values[i - 1], steps[i - 1]) if i else (0.0, 0.0)
    return None if before is None else before + (after - before) * (step - first) / (steps[i] - first)


def _marks(run: Run) -> list[dict[str, Any]]:
    """Return the spikes and skipped steps, each with the command that shows its batch."""
    marks: dict[int, list[str]] = {}
    for row in run.rows:
        for key, what in (("spike_steps", "spike"), ("skipped_steps", "skipped")):
            steps = row.get(key)
            for step in steps if isinstance(steps, list) else []:
                if isinstance(step, int):
                    marks.setdefault(step, []).append(what)
    command = lambda step: module_command("nash_mhc.data", "inspect", str(run.folder), "--step", str(step))
    return [{"step": step, "what": ", ".join(what), "command": command(step)} for step, what in sorted(marks.items())]


def _nesting(value: Any) -> int:
    return 1 + _nesting(value[0]) if isinstance(value, list) and value else 0


def _health(rows: Sequence[Row]) -> dict[str, Any]:
    """Return values[row][layer], or values[row][layer][part], of evenly spaced rows including the last."""
    every = max(1, math.ceil(len(rows) / _HEALTH_ROWS))
    chosen = [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % every == 0]
    values: dict[str, Any] = {}
    for name, nesting in _HEALTH.items():
        per_row = [row.get(f"health/{name}") for row in chosen]
        if per_row and all(_nesting(value) == nesting for value in per_row):
            values[name] = _rounded(per_row)
    return {"step": [row["step"] for row in chosen], "values": values} if values else {}


def _flat_config(config: Any) -> dict[str, str]:
    flat: dict[str, Any] = {}
    for section, values in config.items() if isinstance(config, dict) else ():
        flat |= {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {section: values}
    shown = lambda value: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return {key: shown(value) for key, value in flat.items()}


def contents(run: Run) -> dict[str, Any]:
    """Return everything that the page shows of the run as JSON data without NaN."""
    rows, info = _thinned(run.rows), run.info
    steps = [float(row["step"]) for row in rows]
    times = [_seconds(row) for row in rows]
    seconds: list[float | None] = [sum(parts.values()) if parts else None for parts in times]
    tokens = [number(row, "tokens_seen") for row in rows]
    epochs = [name for name in (rows[-1] if rows else ()) if name.startswith("epochs/")]
    columns = {name: [number(row, name) for row in rows] for name in (*_COLUMNS, *FIGURES, *epochs)}
    eval_steps = [float(row["step"]) for row in run.evals]
    eval_names = (*_EVAL_COLUMNS, *(f"eval/{name}" for name in FIGURES))
    eval_columns = {name: [number(row, name) for row in run.evals] for name in eval_names}
    mixing = run.evals[-1].get("health/res") if run.evals else None
    total_time = sum(times[-1].values()) if times else 0.0
    without_empty = lambda table: {name: _rounded(v) for name, v in table.items() if any(x is not None for x in v)}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "words": summarize(run),
        "facts": facts(run),
        "count": [len(run.rows), len(run.evals)],
        "floor": number(table(info, "floor"), "nats_per_token"),
        "flopsPerToken": number(info, "flops_per_token"),
        "rows": {"step": steps, "tokens": _rounded(tokens), "seconds": _rounded(seconds)} | without_empty(columns),
        "evals": {
            "step": eval_steps,
            "tokens": _rounded([_interpolated(steps, tokens, step) for step in eval_steps]),
            "seconds": _rounded([_interpolated(steps, seconds, step) for step in eval_steps]),
        }
        | without_empty(eval_columns),
        "charts": [[figure.chart, name, figure.log] for name, figure in FIGURES.items() if figure.chart],
        # Parts too small to see are omitted.
        "spent": {name: _rounded(s) for name, s in times[-1].items() if s >= 0.0005 * total_time > 0} if times else {},
        "marks": _marks(run),
        "health": _health(run.rows),
        "mixing": _rounded(mixing) if _nesting(mixing) == 4 else None,  # H_res by layer and sub-layer
        "samples": [{"step": row["step"], "text": row["sample"]} for row in run.evals if isinstance(row.get("sample"), str)],
        "config": _flat_config(info.get("config")),
        "environment": {f"device {k}": str(v) for k, v in table(info, "devices").items()}
        | {str(k): str(v) for k, v in table(info, "versions").items()},
    }
