"""A plan as a table, as JSON, and as the command that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nash_mhc.config.commands import module_command
from nash_mhc.config.humanize import duration, short
from nash_mhc.config.parsing import as_flags
from nash_mhc.estimate.candidates import Candidate
from nash_mhc.estimate.roofline import ERROR
from nash_mhc.runtime.chips import Machine

_GIB = 2**30
_CATEGORIES = {
    "parameters": "params", "gradients": "grads", "optimizer": "moments", "streams": "streams", "activations": "acts",
    "logits": "logits", "collectives": "gathered", "temporaries": "temps", "teachers": "teacher",
}  # fmt: skip


def train_command(best: Candidate, given: Mapping[str, Any]) -> str:
    """The exact one: what the user has given, with what was found."""
    return module_command("nash_mhc.train", *as_flags({**given, **best.settings}))


def row(c: Candidate, machine: Machine, tokens: float | None) -> dict[str, Any]:
    """One candidate in plain values; times in seconds, memory in GiB a chip. Every figure of it is computed."""
    hours = c.speed.hours(tokens) if tokens else None
    rate = machine.dollars_an_hour
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
        "binds": c.speed.times.binds,
        "tokens_per_s": c.speed.tokens_per_s,
        "mfu": c.speed.mfu,
        "error": ERROR,
        "hours": hours,
        "dollars": None if hours is None or rate is None else hours * rate,
        "figures": "computed",
    }


def as_json(machine: Machine, rows: Sequence[dict[str, Any]], command: str | None) -> dict[str, Any]:
    facts = {**dataclasses.asdict(machine.chip), "slices": dict(machine.chip.slices)}
    return {"machine": str(machine), "chip": facts, "candidates": list(rows), "command": command}


def _number(value: float) -> str:
    """As many digits as say something: 1,204, 18.0, 0.031."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def _kept(row: Mapping[str, Any]) -> str:
    """Weights and moments: f32, f32+bf16, bf16."""
    names = [{"float32": "f32", "bfloat16": "bf16"}[row[what]] for what in ("weights", "moments")]
    return "+".join(dict.fromkeys(names))


def table(rows: Sequence[dict[str, Any]], *, tokens: float | None) -> Table:
    shown = [name for name in _CATEGORIES if name != "teachers" or any(row["gib_by_category"][name] for row in rows)]
    out = Table(box=None, pad_edge=False, header_style="bold")
    heads = [
        "mesh",
        "remat",
        "batch",
        "kept",
        "fits",
        "GiB",
        *(_CATEGORIES[name] for name in shown),
        "ms",
        "compute",
        "memory",
        "tp",
        "net",
        "binds",
    ]
    heads += ["tok/s", "MFU"] + (["hours", "$"] if tokens else [])
    for head in heads:
        out.add_column(
            head, justify="left" if head in ("mesh", "remat", "batch", "kept", "fits", "binds") else "right", no_wrap=True
        )
    for each in rows:
        cells = [
            "x".join(str(each[a]) for a in ("data", "fsdp", "tp")),
            each["remat"],
            each["batch"],
            _kept(each),
            each["fits"],
        ]
        cells += [_number(each["gib"]), *(_number(each["gib_by_category"][name]) for name in shown)]
        cells += [_number(each[key] * 1e3) for key in ("step_s", "compute_s", "memory_s", "exchange_s", "gather_s")]
        cells += [each["binds"], short(each["tokens_per_s"]), f"{each['mfu']:.0%}"]
        if tokens:
            cells += [f"{each['hours']:,.0f}", "-" if each["dollars"] is None else f"{each['dollars']:,.0f}"]
        out.add_row(*cells)
    return out


def show(machine: Machine, rows: Sequence[dict[str, Any]], *, parameters: int, tokens: float | None, looked_at: int) -> None:
    wide = Console(width=max(Console().width, 190), highlight=False)  # a line that is cut says less than one that wraps
    chip, price = machine.chip, machine.dollars_an_hour
    kind = "float32, measured" if chip.platform == "cpu" else "bf16"
    held = f"{chip.memory / _GIB:.1f} GiB at {chip.memory_gbps:,.0f} GB/s"
    wide.print(
        f"{machine}; a chip: {chip.tflops:.3g} TFLOP/s {kind}, {held}, links "
        f"{chip.links_gbps:.3g} GB/s" + (f"; ${price:,.2f} an hour" if price is not None else "; no list price is known")
    )
    wide.print(
        f"{short(parameters)} parameters; {looked_at} ways were looked at; all figures are computed, times within {ERROR:.0%}\n"
    )
    wide.print(table(rows, tokens=tokens))
    if rows and tokens and rows[0]["fits"] != "no":
        hours, dollars = rows[0]["hours"], rows[0]["dollars"]
        low, high = duration(3600 * hours * (1 - ERROR)), duration(3600 * hours * (1 + ERROR))
        cost = "" if dollars is None else f", ${dollars * (1 - ERROR):,.0f} to ${dollars * (1 + ERROR):,.0f}"
        wide.print(f"\n{short(tokens)} tokens with the first: {low} to {high}{cost}")
