"""The files of a run -> what the page shows of it: facts, columns of numbers, samples. No jax: it is read anywhere."""

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
from nash_mhc.storage.files import Folder
from nash_mhc.storage.json_files import number, table

_STRETCHES = 500  # of a long run: each keeps its lowest and highest value of what is looked at for spikes
_LOOKED_AT = ("loss", "grad_norm", "step_ms")
_HEALTH_ROWS = 120  # columns of a heat map
_COLUMNS = (  # of metrics.jsonl, as far as they are numbers
    "loss", "accuracy", "lr", "grad_norm", "tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_gib",
    "goodput",
)  # fmt: skip
_HELD_OUT = ("eval/loss", "eval/loss_ema", "eval/accuracy", "eval/bits_per_byte")
_HEALTH = ("scale_weight", "scale_entropy", "scales_unused", "gain_forward", "gain_backward", "stream_rms")


class Run(NamedTuple):
    """The files of one run."""

    folder: Folder
    info: dict[str, Any]  # run.json
    rows: list[Row]
    evals: list[Row]
    result: dict[str, Any] = {}  # result.json, of a run that has one

    @property
    def name(self) -> str:
        return self.folder.name or self.folder.absolute().name


def open_run(name: str | Folder) -> Run:
    """ConfigError for what is no run, or holds lines that are no rows."""
    folder = RunFolder(name)
    info = folder.info()
    with contextlib.suppress(ConfigError):  # a kit that moved: its numbers are left out
        kits.use(str(table(info, "config").get("kit") or ""), recorded=True)
    return Run(folder.path, info, folder.rows(METRICS), folder.rows(EVALUATIONS), folder.result())


def _short(value: Any) -> Any:
    """Six digits are more than a screen shows, and half the size."""
    if isinstance(value, list):
        return [_short(v) for v in value]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _total(info: dict[str, Any]) -> float | None:
    """The steps that the run was to take."""
    return number(table(table(info, "config"), "train"), "total_steps")


def facts(run: Run) -> dict[str, str]:
    """The run in a few numbers, ready to show; what is not known is left out."""
    info, last, held_out = run.info, run.rows[-1] if run.rows else {}, run.evals[-1] if run.evals else {}
    devices, mesh, floor = (table(info, name) for name in ("devices", "mesh", "floor"))
    loss, nats = number(held_out, "eval/loss"), number(floor, "nats_per_token")
    test, expected = table(run.result, "test"), table(info, "expected")

    def median(name: str) -> float | None:
        known = [v for row in run.rows if (v := number(row, name)) is not None]
        return statistics.median(known) if known else None

    def show(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    total = _total(info)
    found = {
        "parameters": show(number(info, "parameters"), "{:,.0f}"),
        "device": f"{devices.get('count')} x {devices.get('kind')}" if devices else "",
        "mesh": f"{'x'.join(map(str, mesh.values()))} ({' x '.join(mesh)})" if mesh else "",
        "steps": f"{last.get('step', held_out.get('step', 0)):,} of {total:,.0f}" if total is not None else "",
        "tokens seen": show(number(last, "tokens_seen"), "{:,.0f}"),
        "final loss, nats a token": show(number(last, "loss"), "{:.4f}"),
        "held-out loss, nats a token": show(loss, "{:.4f}"),
        "the same with averaged weights": show(number(held_out, "eval/loss_ema"), "{:.4f}"),
        **{figure.fact: show(number(held_out, f"eval/{name}"), figure.form) for name, figure in FIGURES.items()},
        "held-out bits a byte": show(number(held_out, "eval/bits_per_byte"), "{:.4f}"),
        "test loss, nats a token": show(number(test, "test/loss"), "{:.4f}"),
        "test accuracy": show(number(test, "test/accuracy"), "{:.1%}"),
        "floor, nats a token": show(nats, "{:.4f}"),
        "floor, bits a byte": show(number(floor, "bits_per_byte"), "{:.4f}"),
        "held-out loss / floor": f"{loss / nats:.3f}x" if loss is not None and nats else "",
        "tokens a second (median)": show(median("tokens_per_s"), "{:,.0f}"),
        "tokens a second, expected": show(number(expected, "tokens_per_s"), "{:,.0f}"),
        "MFU (median)": show(median("mfu"), "{:.1%}"),
        "goodput (share of time in steps)": show(number(last, "goodput"), "{:.1%}"),
        "peak memory of a device": show(number(last, "memory_gib"), "{:.1f} GiB"),
        "peak memory, expected": show(number(expected, "gib"), "{:.2g} GiB"),
    }
    return {name: text for name, text in found.items() if text}


def remembered(run: Run) -> dict[str, str]:
    """What a reservoir remembers, ready to show; empty for any other model."""
    known = run.info.get("remembers")
    if not isinstance(known, dict):
        return {}
    capacity, radius = number(known, "capacity"), number(known, "radius")
    forgets, watched = number(known, "forgets"), number(known, "watched")
    seen = "never" if watched is None else f"not in {watched:,.0f} tokens"
    units = f"{number(known, 'units') or 0:,.0f} real units"
    return {
        "memory capacity of a layer": f"none of {units}: states grow" if capacity is None else f"{capacity:.1f} of {units}",
        "effective spectral radius": "" if radius is None else f"{radius:.5f}",
        "a start is forgotten (to 1%)": seen if forgets is None else f"after {forgets:,.0f} tokens",
    }


def in_words(run: Run) -> str:
    """What became of the run, in two or three sentences."""
    if not run.rows:
        return "The run has no rows of metrics yet."
    last, total = run.rows[-1], _total(run.info)
    step = int(last["step"])
    done = step == total
    told = [f"All {step:,} steps are done." if done else f"Step {step:,}{'' if total is None else f' of {total:,.0f}'}."]
    losses = [(int(row["step"]), loss) for row in run.evals if (loss := number(row, "eval/loss")) is not None]
    if losses:
        at, loss = losses[-1]
        text = f"The held-out loss is {loss:.4f} nats a token at step {at:,}"
        if floor := number(table(run.info, "floor"), "nats_per_token"):
            text += f", {loss / floor:.2f} times the floor of this text"
        best_at, best = min(losses, key=lambda found: found[1])
        told.append(text + (f"; it was lowest at step {best_at:,} ({best:.4f})." if best_at != at else "."))
        if (ends := number(run.result, "step")) is not None and ends != at:
            told.append(f"The run ends with the checkpoint of step {ends:,.0f}.")
    elif (loss := number(last, "loss")) is not None:
        told.append(f"The training loss is {loss:.4f}; nothing was evaluated.")
    spent = _seconds(last)
    if spent and (whole := sum(spent.values())):
        text = f"It took {duration(whole)}, {spent.get('step', 0.0) / whole:.0%} of it in steps"
        lost = spent.get("lost", 0.0) + spent.get("down", 0.0)
        told.append(text + (f" and {lost / whole:.0%} lost to stops." if lost / whole >= 0.005 else "."))
    if (skipped := number(last, "skipped")) and skipped > 0:
        told.append(f"{skipped:,.0f} update{'s were' if skipped > 1 else ' was'} skipped.")
    return " ".join(told)


def _seconds(row: Row) -> dict[str, float]:
    """All time since the first start, by what it was spent on; empty where the run has not counted it."""
    return {name.removeprefix("time/"): number(row, name) or 0.0 for name in row if name.startswith("time/")}


def _kept(rows: Sequence[Row]) -> list[Row]:
    """Of a long run the lowest and the highest of each stretch, of everything that is looked at for spikes,
    and the rows that tell of one."""
    if len(rows) <= 4 * _STRETCHES:
        return list(rows)
    size, kept = math.ceil(len(rows) / _STRETCHES), {0, len(rows) - 1}
    for at in range(0, len(rows), size):
        for name in _LOOKED_AT:
            known = [(v, i) for i in range(at, min(at + size, len(rows))) if (v := number(rows[i], name)) is not None]
            kept |= {min(known)[1], max(known)[1]} if known else {at}
    kept |= {i for i, row in enumerate(rows) if row.get("spike_steps") or row.get("skipped_steps")}
    return [rows[i] for i in sorted(kept)]


def _between(steps: list[float], values: list[float | None], step: float) -> float | None:
    """The value at a step between those of the rows; None where no row reaches so far."""
    at = bisect.bisect_left(steps, step)
    if at == len(steps):
        return values[-1] if values and steps and step == steps[-1] else None
    after = values[at]
    if after is None or steps[at] == step:
        return after
    before, x0 = (values[at - 1], steps[at - 1]) if at else (0.0, 0.0)
    return None if before is None else before + (after - before) * (step - x0) / (steps[at] - x0)


def _marks(run: Run) -> list[dict[str, Any]]:
    """Steps that were spikes or whose update was skipped, each with the command that shows what it read."""
    found: dict[int, str] = {}
    for row in run.rows:
        for key, what in (("spike_steps", "spike"), ("skipped_steps", "skipped")):
            steps = row.get(key)
            for step in steps if isinstance(steps, list) else []:
                if isinstance(step, int):
                    found[step] = f"{found[step]}, {what}" if step in found else what
    show = lambda step: module_command("nash_mhc.data", "inspect", str(run.folder), "--step", str(step))
    return [{"step": step, "what": what, "command": show(step)} for step, what in sorted(found.items())]


def _depth(value: Any) -> int:
    return 1 + _depth(value[0]) if isinstance(value, list) and value else 0


def _health(rows: Sequence[Row]) -> dict[str, Any]:
    """What was measured layer by layer, at some of the rows: values[row][layer], or values[row][layer][part]."""
    every = max(1, math.ceil(len(rows) / _HEALTH_ROWS))
    chosen = [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % every == 0]  # the last is one of them
    values: dict[str, Any] = {}
    for name in _HEALTH:
        per_row = [row.get(f"health/{name}") for row in chosen]
        if per_row and all(_depth(value) == (2 if name in ("scale_weight", "stream_rms") else 1) for value in per_row):
            values[name] = _short(per_row)
    return {"step": [row["step"] for row in chosen], "values": values} if values else {}


def _flat(config: Any) -> dict[str, str]:
    shown = lambda value: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(config, dict):
        return {}
    return {
        f"{section}.{key}" if isinstance(values, dict) else section: shown(value)
        for section, values in config.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def contents(run: Run) -> dict[str, Any]:
    """Everything that the page shows of the run, ready for JSON: numbers, lists and texts, no NaN."""
    rows, info = _kept(run.rows), run.info
    steps = [float(row["step"]) for row in rows]
    spent = [_seconds(row) for row in rows]
    seconds: list[float | None] = [sum(parts.values()) if parts else None for parts in spent]
    tokens = [number(row, "tokens_seen") for row in rows]
    per_token = number(info, "flops_per_token")
    columns = {name: [number(row, name) for row in rows] for name in (*_COLUMNS, *FIGURES)}
    columns |= {name: [number(row, name) for row in rows] for row in rows[-1:] for name in row if name.startswith("epochs/")}
    at = [float(row["step"]) for row in run.evals]
    held_out = {name: [number(row, name) for row in run.evals] for name in (*_HELD_OUT, *(f"eval/{name}" for name in FIGURES))}
    mixing = run.evals[-1].get("health/res") if run.evals else None
    environment = {f"device {k}": str(v) for k, v in table(info, "devices").items()} | {
        str(k): str(v) for k, v in table(info, "versions").items()
    }
    samples = [{"step": row["step"], "text": row["sample"]} for row in run.evals if isinstance(row.get("sample"), str)]
    known = lambda table: {name: _short(values) for name, values in table.items() if any(v is not None for v in values)}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "words": in_words(run),
        "facts": facts(run),
        "count": [len(run.rows), len(run.evals)],
        "floor": number(table(info, "floor"), "nats_per_token"),
        "flopsPerToken": per_token,
        "rows": {"step": steps, "tokens": _short(tokens), "seconds": _short(seconds)} | known(columns),
        "evals": {
            "step": at,
            "tokens": _short([_between(steps, tokens, step) for step in at]),
            "seconds": _short([_between(steps, seconds, step) for step in at]),
        }
        | known(held_out),
        "charts": [[figure.chart, name, figure.log] for name, figure in FIGURES.items() if figure.chart],
        "spent": _short_parts(spent[-1]) if spent else {},
        "marks": _marks(run),
        "health": _health(run.rows),
        "mixing": _short(mixing) if _depth(mixing) == 4 else None,  # H_res of each layer and sub-layer
        "remembered": remembered(run),
        "curve": _short(info["remembers"].get("curve") or []) if remembered(run) else [],  # of delays, how much is left
        "samples": samples,
        "config": _flat(info.get("config")),
        "environment": environment,
    }


def _short_parts(parts: dict[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: _short(s) for name, s in parts.items() if whole and s / whole >= 0.0005}
