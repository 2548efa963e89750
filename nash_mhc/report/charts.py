"""Charts as SVG: lines, dots, a level; with round numbers on the axes, and every spike of a long run."""

from __future__ import annotations

import html
import math

Points = list[tuple[float, float | None]]  # (step, value); None is a gap


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within the range, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((f * power for f in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between 10^low and 10^high: 1 to 9 of a narrow range, whole powers of a wide one."""
    span = high - low
    digits = (1,) if span > 4 else (1, 2, 5) if span > 1.2 else range(1, 10)
    powers = range(math.floor(low), math.ceil(high) + 1, math.ceil(span / 8))
    every = [d * 10.0**e for e in powers for d in digits]
    return [y for y in every if low <= math.log10(y) <= high]


def short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e13:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}"
    mantissa, e, exponent = f"{value:.4g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if e else "")


def _thin(points: Points, most: int = 600) -> Points:
    """Long runs keep the lowest and the highest value of each stretch: a spike never disappears. Gaps stay gaps."""
    if len(points) <= 2 * most:
        return points
    size = math.ceil(len(points) / most)
    kept: Points = []
    for at in range(0, len(points), size):
        known = [(x, y) for x, y in points[at : at + size] if y is not None]
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else set()
        kept += sorted(ends) if known else [(points[at][0], None)]
    return kept


def chart(title: str, line: Points, dots: Points | None = None, floor: float | None = None, *, big: bool = False) -> str:
    """An SVG: a line (training), dots joined by a thin line (held out), a dashed level.
    Or a note that there is nothing yet."""
    W, H, left, right, top, bottom = (960, 360, 62, 14, 12, 40) if big else (320, 170, 46, 14, 8, 24)
    dots = dots or []
    known = [(x, y) for x, y in [*line, *dots] if y is not None]
    if not known:
        return f'<p class="none">{html.escape(title)}: no values yet</p>'
    xs, ys = [x for x, _ in known], [y for _, y in known] + ([] if floor is None else [floor])
    x0, x1 = (0.0 if min(xs) <= 0.1 * max(xs) else min(xs)), max(xs)
    # A loss falls fast and then creeps towards its floor: only a logarithmic axis shows both.
    log = big and min(ys) > 0 and max(ys) > 3 * min(ys)
    scale = math.log10 if log else float
    y0, y1 = scale(min(ys) if big else min(0.0, *ys)), scale(max(ys))
    x1 = x1 if x1 > x0 else x0 + 1
    y1 = y1 if y1 > y0 else y0 + (abs(y0) or 1)  # one value, or all the same: some room to lie in
    pad = (0.09 if big else 0.05) * (y1 - y0)
    y0, y1 = (y0 - pad if big or y0 < 0 else y0), y1 + pad

    def at(x: float, y: float) -> tuple[str, str]:
        right_of, below = (x - x0) / (x1 - x0), (y1 - scale(y)) / (y1 - y0)
        return f"{left + right_of * (W - left - right):.1f}", f"{top + below * (H - top - bottom):.1f}"

    def path(points: Points, css: str) -> str:
        moves, pen = [], "M"
        for x, y in _thin(points):
            if y is not None:
                # From a value that stands alone between gaps, h0 and the round cap make a dot.
                moves.append(pen + ",".join(at(x, y)) + ("h0" if pen == "M" else ""))
            pen = "M" if y is None else "L"
        return f'<path class="{css}" d="{" ".join(moves)}"/>'

    def level(y: float, css: str) -> str:
        return f'<path class="{css}" d="M{left},{at(x0, y)[1]}H{W - right}"/>'

    def text(x: float | int | str, y: float | int, anchor: str, words: str) -> str:
        return f'<text x="{x}" y="{y:.1f}" class="{anchor}">{words}</text>'

    parts = [f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="{html.escape(title)}">']
    for y in _log_ticks(y0, y1) if log else ticks(y0, y1, 6 if big else 4):
        parts += [level(y, "grid"), text(left - 6, float(at(x0, y)[1]) + 4, "y", short(y))]
    for x in ticks(x0, x1, 8 if big else 4):
        if x == int(x):
            parts.append(text(at(x, known[0][1])[0], H - bottom + 16, "x", short(x)))
    if big:
        middle, name = (top + H - bottom) / 2, f"loss, nats a token{' (log scale)' if log else ''}"
        parts.append(text((left + W - right) / 2, H - 6, "x", "step"))
        parts.append(f'<text class="x" transform="translate(14 {middle}) rotate(-90)">{name}</text>')
    if floor is not None:
        parts += [level(floor, "floor"), text(W - right, float(at(x0, floor)[1]) + 15, "y", f"floor {floor:.4f}")]
    parts.append(path(line, "train"))
    if dots:
        parts.append(path(dots, "held thin"))
    for (cx, cy), x, y in ((at(x, y), x, y) for x, y in dots if y is not None):
        tip = f"<title>held out at step {x:g}: {y:.4f}</title>"
        parts.append(f'<circle class="dot" cx="{cx}" cy="{cy}" r="{4 if big else 3}">{tip}</circle>')
    return "".join(parts) + "</svg>"
