"""Show a plan as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nash_mhc.config.humanize import duration, short
from nash_mhc.estimate.candidates import Candidate
from nash_mhc.estimate.roofline import ERROR
from nash_mhc.runtime.chips import Machine

_GIB = 2**30
_CATEGORIES = {
    "parameters": "params", "gradients": "grads", "optimizer": "moments", "streams": "streams", "activations": "acts",
    "logits": "logits", "collectives": "gathered", "temporaries": "temps", "teachers": "teacher",
}  # fmt: skip


def row(c: Candidate, machine: Machine, tokens: float | None) -> dict[str, Any]:
    """Return a candidate in JSON values: times in seconds, memory in GiB per chip."""
    hours = c.speed.hours(tokens) if tokens else None
    rate = machine.dollars_per_hour
    return {
        **c.mesh,
        "remat": c.cfg.train.kept,
        "batch": f"{c.cfg.train.grad_accum} x {c.cfg.data.batch_size} x {c.cfg.data.seq_len}",
        "weights": c.cfg.precision.weights_dtype,
        "moments": c.cfg.precision.moments_dtype,
        "fits": c.fits,
        "gib": c.memory.total / _GIB,
        "gib_by_category": {name: getattr(c.memory, name) / _GIB for name in _CATEGORIES},
        "step_s": c.speed.times.step,
        "compute_s": c.speed.times.compute,
        "memory_s": c.speed.times.memory,
        "exchange_s": c.speed.times.exchange,
        "gather_s": c.speed.times.gather,
        "bound_by": c.speed.times.bound_by,
        "tokens_per_s": c.speed.tokens_per_s,
        "mfu": c.speed.mfu,
        "error": ERROR,
        "hours": hours,
        "dollars": None if hours is None or rate is None else hours * rate,
        "figures": "computed",
    }


def _number(value: float) -> str:
    """Format with the significant digits: 1,204, 18.0, 0.031."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def _precision(row: Mapping[str, Any]) -> str:
    """Return the dtypes of weights and moments: f32, f32+bf16, bf16."""
    names = [{"float32": "f32", "bfloat16": "bf16"}[row[what]] for what in ("weights", "moments")]
    return "+".join(dict.fromkeys(names))


def _cells(row: Mapping[str, Any], categories: Sequence[str], tokens: float | None) -> dict[str, str]:
    """Return the text of each column."""
    times = {"ms": "step_s", "compute": "compute_s", "memory": "memory_s", "tp": "exchange_s", "net": "gather_s"}
    cost = {} if not tokens else {
        "hours": f"{row['hours']:,.0f}",
        "$": "-" if row["dollars"] is None else f"{row['dollars']:,.0f}",
    }  # fmt: skip
    return {
        "mesh": "x".join(str(row[axis]) for axis in ("data", "fsdp", "tp")),
        "remat": row["remat"],
        "batch": row["batch"],
        "dtype": _precision(row),
        "fits": row["fits"],
        "GiB": _number(row["gib"]),
        **{_CATEGORIES[name]: _number(row["gib_by_category"][name]) for name in categories},
        **{head: _number(row[key] * 1e3) for head, key in times.items()},
        "bound by": row["bound_by"],
        "tok/s": short(row["tokens_per_s"]),
        "MFU": f"{row['mfu']:.0%}",
        **cost,
    }


def table(rows: Sequence[dict[str, Any]], *, tokens: float | None) -> Table:
    categories = [name for name in _CATEGORIES if name != "teachers" or any(row["gib_by_category"][name] for row in rows)]
    cells = [_cells(row, categories, tokens) for row in rows]
    out = Table(box=None, pad_edge=False, header_style="bold")
    for head in cells[0]:
        is_text = head in ("mesh", "remat", "batch", "dtype", "fits", "bound by")
        out.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for each in cells:
        out.add_row(*each.values())
    return out


def show(machine: Machine, rows: Sequence[dict[str, Any]], *, parameters: int, tokens: float | None, count: int) -> None:
    console = Console(width=max(Console().width, 190), highlight=False)  # wrapped lines are better than cut ones
    chip, price = machine.chip, machine.dollars_per_hour
    kind = "float32, measured" if chip.platform == "cpu" else "bf16"
    memory = f"{chip.memory / _GIB:.1f} GiB at {chip.memory_gbps:,.0f} GB/s"
    console.print(
        f"{machine}; per chip: {chip.tflops:.3g} TFLOP/s {kind}, {memory}, links "
        f"{chip.links_gbps:.3g} GB/s" + (f"; ${price:,.2f} per hour" if price is not None else "; no list price")
    )
    console.print(
        f"{short(parameters)} parameters; best of {count} layouts; all values are estimates, times within {ERROR:.0%}\n"
    )
    console.print(table(rows, tokens=tokens))
    if rows and tokens and rows[0]["fits"] != "no":
        hours, dollars = rows[0]["hours"], rows[0]["dollars"]
        low, high = duration(3600 * hours * (1 - ERROR)), duration(3600 * hours * (1 + ERROR))
        cost = "" if dollars is None else f", ${dollars * (1 - ERROR):,.0f} to ${dollars * (1 + ERROR):,.0f}"
        console.print(f"\n{short(tokens)} tokens with the first layout: {low} to {high}{cost}")
