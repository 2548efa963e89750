"""What a run left behind, and one page that shows it. No jax: a report is made anywhere, at once."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from nash_mhc.checkpoint.faults import as_os_errors, one_line, reason
from nash_mhc.checkpoint.folders import exists, write_whole
from nash_mhc.config.places import Folder
from nash_mhc.config.schema import ConfigError

Row = dict[str, Any]
Points = list[tuple[float, float | None]]  # (step, value); None is a gap

_SMALL_CHARTS = (  # title, key of a training row, key of an evaluation row
    ("learning rate", "lr", ""), ("gradient norm", "grad_norm", ""), ("token accuracy", "accuracy", "eval/accuracy"),
    ("tokens a second", "tokens_per_s", ""), ("ms a step", "step_ms", ""), ("ms a step waiting for data", "data_wait_ms", ""),
)  # fmt: skip


class Run(NamedTuple):
    """The files of one run."""

    folder: Folder
    info: dict[str, Any]  # run.json
    rows: list[Row]  # metrics.jsonl
    evals: list[Row]  # eval.jsonl


def read_run(folder: Folder) -> dict[str, Any]:
    """run.json, or a ConfigError that says what is missing."""
    with one_line(folder):
        found = exists(folder, kind="directory")
    if not found:
        raise ConfigError(f"{folder}: no such folder; give the folder of a run, the --checkpoint-dir that it trained with")
    path = folder / "run.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no run.json, so it is not the folder of a run (has the run started yet?)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    if not isinstance(info, dict):
        raise ConfigError(f"{path} holds no description of a run")
    return info


def _read_rows(path: Folder) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines() if exists(path) else []
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            float(row["step"])
            rows.append(row)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):  # a run that is still going may be in the middle of its last line
                raise ConfigError(f"{path}:{number}: not a row of JSON with a step; mend or remove the line") from None
    return rows


def open_run(folder: Folder) -> Run:
    return Run(folder, read_run(folder), _read_rows(folder / "metrics.jsonl"), _read_rows(folder / "eval.jsonl"))


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _points(rows: Sequence[Row], name: str) -> Points:
    return [(float(row["step"]), _number(row, name)) for row in rows]


def facts(run: Run) -> dict[str, str]:
    """The run in a few numbers, ready to show; what is not known is left out."""
    info, last, held_out = run.info, run.rows[-1] if run.rows else {}, run.evals[-1] if run.evals else {}
    config, devices, mesh, floor = (info.get(k) or {} for k in ("config", "devices", "mesh", "floor"))
    loss, nats = _number(held_out, "eval/loss"), _number(floor, "nats_per_token")

    def median(name: str) -> float | None:
        known = [v for _, v in _points(run.rows, name) if v is not None]
        return statistics.median(known) if known else None

    def show(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    total = config.get("train", {}).get("total_steps", "?")
    found = {
        "parameters": show(_number(info, "parameters"), "{:,.0f}"),
        "device": f"{devices['count']} x {devices['kind']}" if devices else "",
        "mesh": f"{'x'.join(map(str, mesh.values()))} ({' x '.join(mesh)})" if mesh else "",
        "steps": f"{last.get('step', held_out.get('step', 0)):,} of {total:,}" if isinstance(total, int) else "",
        "tokens seen": show(_number(last, "tokens_seen"), "{:,.0f}"),
        "final loss, nats a token": show(_number(last, "loss"), "{:.4f}"),
        "held-out loss, nats a token": show(loss, "{:.4f}"),
        "the same with averaged weights": show(_number(held_out, "eval/loss_ema"), "{:.4f}"),
        "held-out bits a byte": show(_number(held_out, "eval/bits_per_byte"), "{:.4f}"),
        "floor, nats a token": show(nats, "{:.4f}"),
        "floor, bits a byte": show(_number(floor, "bits_per_byte"), "{:.4f}"),
        "held-out loss / floor": f"{loss / nats:.3f}x" if loss is not None and nats else "",
        "tokens a second (median)": show(median("tokens_per_s"), "{:,.0f}"),
        "MFU (median)": show(median("mfu"), "{:.1%}"),
    }
    return {name: text for name, text in found.items() if text}


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
    """An SVG: a line (training), dots joined by a thin line (held out), a dashed level. Or a note that there is nothing yet."""
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


_STYLE = """
:root{color-scheme:light dark;--page:#f6f6f4;--card:#fff;--ink:#1a1a19;--soft:#6b6a66;--line:#e4e3de;
--train:#2a6fdb;--held:#d9730d}
@media(prefers-color-scheme:dark){:root{--page:#161615;--card:#20201e;--ink:#ededea;--soft:#a09f99;--line:#353431;
--train:#6ea8ff;--held:#f5a04b}}
*{box-sizing:border-box}body{margin:0 auto;padding:28px 20px 48px;max-width:1060px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}h1{font-size:24px;margin:0}h2{font-size:14px;font-weight:600;margin:0 0 8px}
.sub,.none,dt{color:var(--soft)}.sub{margin:2px 0 20px;overflow-wrap:anywhere}.none{margin:24px 0;text-align:center}
dl,.small{display:grid;gap:12px;margin:0 0 12px}dl{grid-template-columns:repeat(auto-fit,minmax(210px,1fr))}
.small{grid-template-columns:repeat(auto-fit,minmax(280px,1fr))}
.card,dl>div,details{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.big{margin:0 0 12px}dt{font-size:12.5px}dd{margin:1px 0 0;font-weight:600;font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto}text{font:11px system-ui,sans-serif;fill:var(--soft)}.big text{font-size:13px}
.y{text-anchor:end}.x{text-anchor:middle}path{fill:none}.grid{stroke:var(--line)}
.train,.held{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.train{stroke:var(--train)}.held{stroke:var(--held)}
.thin{stroke-width:1;opacity:.55}.dot{fill:var(--held);stroke:var(--card);stroke-width:1.5}
.floor{stroke:var(--soft);stroke-dasharray:6 5}.key{float:right;font-weight:400;color:var(--soft);font-size:13px}
.key i{display:inline-block;width:14px;height:3px;border-radius:2px;margin:0 6px 3px 16px;background:var(--train)}
.key i+span+i{background:var(--held);width:8px;height:8px;border-radius:4px;margin-bottom:1px}
summary{cursor:pointer;font-weight:600}table{border-collapse:collapse;margin-top:10px;width:100%;font-size:13px}
td{padding:3px 12px 3px 0;border-top:1px solid var(--line);overflow-wrap:anywhere}td:first-child{color:var(--soft)}
"""


def page(run: Run) -> str:
    """The whole report as one HTML text: nothing is loaded from elsewhere, nothing is executed."""
    esc = html.escape
    name = f"Run {run.folder.name or run.folder.absolute().name}"
    tiles = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in facts(run).items())
    floor = _number(run.info.get("floor") or {}, "nats_per_token")
    loss = chart("loss", _points(run.rows, "loss"), _points(run.evals, "eval/loss"), floor, big=True)
    small = "".join(
        f'<div class="card"><h2>{t}</h2>{chart(t, _points(run.rows, k), _points(run.evals, e) if e else [])}</div>'
        for t, k, e in _SMALL_CHARTS
    )
    flat = [
        (f"{section}.{k}" if isinstance(values, dict) else section, v)
        for section, values in (run.info.get("config") or {}).items()
        for k, v in (values.items() if isinstance(values, dict) else [("", values)])
    ] + list((run.info.get("versions") or {}).items())
    table = "".join(f"<tr><td>{esc(str(k))}</td><td>{esc('none' if v is None else str(v))}</td></tr>" for k, v in flat)
    count = (
        f"{len(run.rows)} row{'s' * (len(run.rows) != 1)} of metrics, {len(run.evals)} evaluation{'s' * (len(run.evals) != 1)}"
    )
    key = '<span class="key"><i></i><span>training</span><i></i><span>held out</span></span>'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{esc(name)}</title><style>{_STYLE}</style><h1>{esc(name)}</h1>"
        f'<p class="sub">{esc(str(run.folder))} &middot; {count}</p><dl>{tiles}</dl>'
        f'<div class="card big"><h2>{key}Loss</h2>{loss}</div><div class="small">{small}</div>'
        f"<details><summary>Configuration</summary><table>{table}</table></details></html>\n"
    )


def write_page(run: Run, out: Folder) -> None:
    """All of the page or nothing: someone may be looking at the last one."""
    try:
        with as_os_errors():
            write_whole(out, page(run))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({reason(error)}); choose another file") from error
