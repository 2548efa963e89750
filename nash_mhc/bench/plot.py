"""One picture of a comparison: the training loss of every variant, against tokens and against seconds."""

from __future__ import annotations

import html
import math
from typing import Any

_COLORS = ("#d9480f", "#1c6fd6", "#2b8a3e", "#862e9c", "#5c5f66", "#b08800")
_WIDTH, _HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 58, 46


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within the range, about `count` of them."""
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
    """Axes and a line a variant; the first tenth of the runs is higher than all the rest and is cut off."""
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
    """An SVG of its own, on white: it is read in papers and on pages alike."""
    # Where a run has diverged, its line ends.
    curves = {name: [point for point in v["curve"] if point[2] is not None] for name, v in figures["variants"].items()}
    tokens = {name: [(float(t), loss) for t, _, loss in curve] for name, curve in curves.items()}
    seconds = {name: [(max(s, 0.0), loss) for _, s, loss in curve] for name, curve in curves.items()}
    title = f"{figures['dataset']}: training loss, nats a token, each at its own rate"
    if figures["task"] == "recall":
        title = "Recall: training loss, nats a question, each at its own rate"
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
