"""Results of `bench quality`: differences, a verdict and a table."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]

_NOTE = "All variants have the same data, steps, seeds and parameters (by FFN width). Dense attention has no window."


def compare(variants: dict[str, Figures]) -> None:
    """Add mean, spread (max - min) and the difference from dense for each seed; None where a run diverged."""
    dense = variants.get("dense", {}).get("held_out")
    for figures in variants.values():
        losses = figures["held_out"]
        complete = None not in losses
        figures["mean"] = statistics.fmean(losses) if complete else None
        figures["spread"] = max(losses) - min(losses) if complete else None
        if dense:
            figures["minus_dense"] = [None if None in pair else pair[0] - pair[1] for pair in zip(losses, dense, strict=True)]


def verdict(variants: dict[str, Figures], floor: float | None) -> tuple[bool | None, str]:
    """Return (whether every seed of nash-mhc is below every seed of dense, a sentence with the numbers)."""
    if not {"nash-mhc", "dense"} <= variants.keys():
        return None, "No verdict: it needs the variants nash-mhc and dense."
    nash, dense = variants["nash-mhc"]["held_out"], variants["dense"]["held_out"]
    if None in nash + dense:
        return None, "No verdict: a run diverged."
    if edges := [name for name in ("nash-mhc", "dense") if variants[name].get("at_edge")]:
        return None, f"No verdict: the best learning rate of {' and '.join(edges)} is at the edge of those tried."
    span = lambda losses: f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else f"{losses[0]:.4f}"
    margin, difference = min(dense) - max(nash), statistics.fmean(nash) - statistics.fmean(dense)
    text = (
        f"{'Every' if margin > 0 else 'Not every'} seed of nash-mhc is below every seed of dense: {span(nash)} against "
        f"{span(dense)} nats/token, margin {margin:+.4f} (best of dense - worst of nash-mhc); seed by seed it is below in "
        f"{sum(a < b for a, b in zip(nash, dense, strict=True))} of {len(nash)}, the means differ by {difference:+.4f}"
    )
    if floor is not None:
        means = " and ".join(f"{statistics.fmean(losses) / floor:.3f}x" for losses in (nash, dense))
        text += f"; the entropy floor of the stories is {floor:.4f}, the means are {means} of it"
    return margin > 0, text + ("." if len(nash) > 1 else "; one seed shows no spread.")


def _number(value: float | None, form: str = ".4f") -> str:
    return "diverged" if value is None else format(value, form)


def _column(v: Figures, seeds: list[int]) -> dict[str, str]:
    """Return the cells of a variant by label."""
    cells = {"parameters": f"{v['parameters']:,}", "ffn": f"{v['ffn']:,}"}
    if len(v["rates"]) > 1:
        cells |= {f"held_out, rate {rate}": _number(loss) for rate, loss in v["rates"].items()}
        cells["best rate"] = f"{v['learning_rate']:g}" + " (edge)" * v["at_edge"]
    cells |= {f"held_out, seed {seed}": _number(loss) for seed, loss in zip(seeds, v["held_out"], strict=True)}
    cells |= {"mean": _number(v["mean"]), "spread": _number(v["spread"])}
    cells |= {f"minus_dense, seed {s}": _number(d, "+.4f") for s, d in zip(seeds, v.get("minus_dense", ()), strict=False)}
    if timed := v.get("equal_seconds"):
        cells |= {"at equal seconds": _number(timed["held_out"]), f"steps in {timed['seconds']:,.0f} s": f"{timed['steps']:,}"}
    cells |= {f"loss at {place}": _number(loss) for place, loss in v.get("loss_by_position", {}).items()}
    cells["entropy of scales"] = " ".join(f"{e:.2f}" for e in v.get("scale_entropy", ()))
    return cells | {"tokens_per_s": f"{v['tokens_per_s']:,.0f}", "compile_s": f"{v['compile_s']:.1f}"}


def show(figures: Figures) -> None:
    """Print a table with a column per variant, so that any number of seeds fits, and the verdict."""
    variants = figures["variants"]
    table = Table(title=f"{figures['steps']} steps of {figures['batch']}, {figures['eval_rows']} held-out sequences")
    table.add_column(no_wrap=True)
    for name in variants:
        table.add_column(name)
    columns = [_column(v, figures["seeds"]) for v in variants.values()]
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = [column.get(label, "diverged") for column in columns]
        if any(cells):
            table.add_row(label, *cells)
    console = Console(highlight=False)
    console.print(table)
    lines = [_NOTE, figures["verdict"]]
    if any(v["at_edge"] for v in variants.values()):
        lines.insert(1, "(edge): the best rate is the lowest or highest of those tried; extend --learning-rates.")
    elif len(next(iter(variants.values()))["rates"]) == 1 and len(variants) > 1:
        lines.insert(1, "All use one learning rate; --learning-rates 1e-3,2e-3,4e-3 finds the best for each.")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
