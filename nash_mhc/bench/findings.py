"""What the figures of `bench quality` say: differences, a verdict, a table."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]

_NOTE = "Same rows, steps and seeds for all; the FFN is as wide as equal parameters ask; plain attention has no window."


def compare(variants: dict[str, Figures]) -> None:
    """Adds mean, spread (max - min) and, seed by seed, the difference to dense; None where a run diverged."""
    dense = variants.get("dense", {}).get("held_out")
    for figures in variants.values():
        losses = figures["held_out"]
        whole = None not in losses
        figures["mean"] = statistics.fmean(losses) if whole else None
        figures["spread"] = max(losses) - min(losses) if whole else None
        if dense:
            figures["minus_dense"] = [None if None in pair else pair[0] - pair[1] for pair in zip(losses, dense, strict=True)]


def verdict(variants: dict[str, Figures], floor: float | None) -> tuple[bool | None, str]:
    """(is every seed of nash-mhc below every seed of dense, the sentence that says so with its numbers)."""
    if not {"nash-mhc", "dense"} <= variants.keys():
        return None, "No verdict: it needs both nash-mhc and dense."
    nash, dense = variants["nash-mhc"]["held_out"], variants["dense"]["held_out"]
    if None in nash + dense:
        return None, "No verdict: a run diverged."
    if edges := [name for name in ("nash-mhc", "dense") if variants[name].get("at_edge")]:
        return None, f"No verdict: the best rate of {' and of '.join(edges)} may lie beyond those that were tried."
    span = lambda losses: f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else f"{losses[0]:.4f}"
    margin, difference = min(dense) - max(nash), statistics.fmean(nash) - statistics.fmean(dense)
    text = (
        f"{'Every' if margin > 0 else 'Not every'} seed of nash-mhc is below every seed of dense: {span(nash)} against "
        f"{span(dense)} nats a token, margin {margin:+.4f} (best of dense - worst of nash-mhc); seed by seed it is below in "
        f"{sum(a < b for a, b in zip(nash, dense, strict=True))} of {len(nash)}, the means differ by {difference:+.4f}"
    )
    if floor is not None:
        means = " and ".join(f"{statistics.fmean(losses) / floor:.3f}x" for losses in (nash, dense))
        text += f"; the floor of the stories is {floor:.4f}, the means are {means} of it"
    return margin > 0, text + ("." if len(nash) > 1 else "; one seed says nothing about the spread.")


def _cell(value: Any, form: str) -> str:
    return "diverged" if value is None else format(value, form)


def _rows(figures: Figures) -> list[tuple[str, list[str]]]:
    """(what, of each variant)"""
    variants = list(figures["variants"].values())
    rows: list[tuple[str, list[str]]] = []

    def one(key: str, form: str) -> None:
        if all(key in v for v in variants):
            rows.append((key, [_cell(v[key], form) for v in variants]))

    def each(key: str, form: str, label: str) -> None:
        """A list, by seed, or a dictionary, by its keys."""
        if all(key in v for v in variants):
            names = figures["seeds"] if isinstance(variants[0][key], list) else variants[0][key]
            for i, name in enumerate(names):
                values = [v[key][i] if isinstance(v[key], list) else v[key].get(name) for v in variants]
                rows.append((label.format(name), [_cell(value, form) for value in values]))

    one("parameters", ",")
    one("ffn", ",")
    if len(variants[0].get("rates", ())) > 1:
        each("rates", ".4f", "held_out, rate {}")
        edge = lambda v: f"{v['learning_rate']:g}" + (" (edge)" if v["at_edge"] else "")
        rows.append(("best rate", [edge(v) for v in variants]))
    each("held_out", ".4f", "held_out, seed {}")
    one("mean", ".4f")
    one("spread", ".4f")
    each("minus_dense", "+.4f", "minus_dense, seed {}")
    if all("equal_seconds" in v for v in variants):
        timed = [v["equal_seconds"] for v in variants]
        rows.append(("at equal seconds", [_cell(t["held_out"], ".4f") for t in timed]))
        rows.append((f"steps in {timed[0]['seconds']:,.0f} s", [f"{t['steps']:,}" for t in timed]))
    each("loss_by_position", ".4f", "loss at {}")
    each("accuracy_by_distance", ".1%", "right, {} away")
    if any("scale_entropy" in v for v in variants):
        entropy = lambda v: " ".join(f"{e:.2f}" for e in v["scale_entropy"]) if "scale_entropy" in v else ""
        rows.append(("entropy of scales", [entropy(v) for v in variants]))
    one("tokens_per_s", ",.0f")
    one("compile_s", ".1f")
    return rows


def show(figures: Figures) -> None:
    """A column a variant, so that any number of seeds fits a narrow terminal; the verdict below."""
    variants = figures["variants"]
    table = Table(title=f"{figures['steps']} steps of {figures['batch']}, {figures['eval_rows']} held-out rows")
    table.add_column(no_wrap=True)
    for name in variants:
        table.add_column(name)
    for label, cells in _rows(figures):
        table.add_row(label, *cells)
    console = Console(highlight=False)
    console.print(table)
    lines = [_NOTE, figures["verdict"]]
    if any(v["at_edge"] for v in variants.values()):
        lines.insert(1, "(edge): the best rate is the lowest or the highest of those tried; try more of them on that side.")
    elif len(next(iter(variants.values()))["rates"]) == 1 and len(variants) > 1:
        lines.insert(1, "All at one rate, which is nobody's best: --learning-rates 1e-3,2e-3,4e-3 finds each its own.")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
