"""Results of `bench quality`: differences, a verdict, a table, and a picture."""

from __future__ import annotations

import html
import math
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]

_NOTE = "All variants have the same data, steps, seeds and parameters (by FFN width). Dense attention has no window."


def compare(variants: dict[str, Figures]) -> None:
    """Add mean, spread (max - min) and the difference to dense for each seed; None where a run diverged."""
    dense = variants.get("dense", {}).get("held_out")
    for figures in variants.values():
        losses = figures["held_out"]
        whole = None not in losses
        figures["mean"] = statistics.fmean(losses) if whole else None
        figures["spread"] = max(losses) - min(losses) if whole else None
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


def _cell(value: Any, form: str) -> str:
    return "diverged" if value is None else format(value, form)


def _rows(figures: Figures) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: (label, one cell per variant)."""
    variants = list(figures["variants"].values())
    rows: list[tuple[str, list[str]]] = []

    def scalar(key: str, form: str) -> None:
        if all(key in v for v in variants):
            rows.append((key, [_cell(v[key], form) for v in variants]))

    def several(key: str, form: str, label: str) -> None:
        """Add a row per seed for a list, or a row per key for a dictionary."""
        if all(key in v for v in variants):
            names = figures["seeds"] if isinstance(variants[0][key], list) else variants[0][key]
            for i, name in enumerate(names):
                values = [v[key][i] if isinstance(v[key], list) else v[key].get(name) for v in variants]
                rows.append((label.format(name), [_cell(value, form) for value in values]))

    scalar("parameters", ",")
    scalar("ffn", ",")
    if len(variants[0].get("rates", ())) > 1:
        several("rates", ".4f", "held_out, rate {}")
        edge = lambda v: f"{v['learning_rate']:g}" + (" (edge)" if v["at_edge"] else "")
        rows.append(("best rate", [edge(v) for v in variants]))
    several("held_out", ".4f", "held_out, seed {}")
    scalar("mean", ".4f")
    scalar("spread", ".4f")
    several("minus_dense", "+.4f", "minus_dense, seed {}")
    if all("equal_seconds" in v for v in variants):
        timed = [v["equal_seconds"] for v in variants]
        rows.append(("at equal seconds", [_cell(t["held_out"], ".4f") for t in timed]))
        rows.append((f"steps in {timed[0]['seconds']:,.0f} s", [f"{t['steps']:,}" for t in timed]))
    several("loss_by_position", ".4f", "loss at {}")
    several("accuracy_by_distance", ".1%", "right, {} away")
    if any("scale_entropy" in v for v in variants):
        entropy = lambda v: " ".join(f"{e:.2f}" for e in v["scale_entropy"]) if "scale_entropy" in v else ""
        rows.append(("entropy of scales", [entropy(v) for v in variants]))
    scalar("tokens_per_s", ",.0f")
    scalar("compile_s", ".1f")
    return rows


def show(figures: Figures) -> None:
    """Print a table with a column per variant, so that any number of seeds fits, and the verdict."""
    variants = figures["variants"]
    table = Table(title=f"{figures['steps']} steps of {figures['batch']}, {figures['eval_rows']} held-out sequences")
    table.add_column(no_wrap=True)
    for name in variants:
        table.add_column(name)
    for label, cells in _rows(figures):
        table.add_row(label, *cells)
    console = Console(highlight=False)
    console.print(table)
    lines = [_NOTE, figures["verdict"]]
    if any(v["at_edge"] for v in variants.values()):
        lines.insert(1, "(edge): the best rate is the lowest or highest of those tried; extend --learning-rates.")
    elif len(next(iter(variants.values()))["rates"]) == 1 and len(variants) > 1:
        lines.insert(1, "All use one learning rate; --learning-rates 1e-3,2e-3,4e-3 finds the best for each.")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


_COLORS = ("#d9480f", "#1c6fd6", "#2b8a3e", "#862e9c", "#5c5f66", "#b08800")
_WIDTH, _HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 58, 46


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten) within the range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((f * power for f in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e13:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}"
    mantissa, e, exponent = f"{value:.4g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if e else "")


def _panel(at: int, what: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """Return axes and a line per variant, scaled without the first tenth of the runs, where the loss is high."""
    xs = [x for line in lines.values() for x, _ in line]
    late = [y for line in lines.values() for x, y in line if x >= 0.1 * line[-1][0]] or [0.0]
    x1, y0, y1 = max(xs, default=0.0) or 1.0, min(late), max(late)
    pad = 0.06 * ((y1 - y0) or 1.0)
    y0, y1 = y0 - pad, y1 + pad
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    px = lambda x: at + _LEFT + x / x1 * width
    py = lambda y: _TOP + (y1 - y) / (y1 - y0) * height
    parts = []
    for y in ticks(y0, y1, 6):
        parts.append(f'<path d="M{at + _LEFT},{py(y):.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{at + _LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in ticks(0.0, x1, 5):
        parts.append(f'<text x="{px(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{short(x)}</text>')
    middle = at + _LEFT + width / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{what}</text>')
    for color, line in zip(_COLORS * len(lines), lines.values(), strict=False):
        inside = [(x, y) for x, y in line if y <= y1]
        path = " ".join(f"{'L' if i else 'M'}{px(x):.1f},{py(y):.1f}" for i, (x, y) in enumerate(inside))
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>')
    return "".join(parts)


def picture(figures: dict[str, Any]) -> str:
    """Return an SVG of training loss against tokens and against seconds, on a white background."""
    # The line of a run ends where it diverges.
    curves = {name: [point for point in v["curve"] if point[2] is not None] for name, v in figures["variants"].items()}
    tokens = {name: [(float(t), loss) for t, _, loss in curve] for name, curve in curves.items()}
    seconds = {name: [(max(s, 0.0), loss) for _, s, loss in curve] for name, curve in curves.items()}
    title = f"{figures['dataset']}: training loss (nats/token), each variant at its best learning rate"
    if figures["task"] == "recall":
        title = "Recall: training loss (nats/question), each variant at its best learning rate"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" width="{2 * _WIDTH}" height="{_HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="#444">',
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="#111">{html.escape(title)}</text>',
    ]
    x = _LEFT
    for color, (name, v) in zip(_COLORS * len(curves), figures["variants"].items(), strict=False):
        label = f"{name} ({v['learning_rate']:g})"
        parts.append(f'<path d="M{x},38h18" stroke="{color}" stroke-width="3"/><text x="{x + 24}" y="42">{label}</text>')
        x += 40 + 7 * len(label)
    parts += [_panel(0, "tokens", tokens), _panel(_WIDTH, "seconds of training", seconds)]
    return "".join(parts) + "</svg>\n"
