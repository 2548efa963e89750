"""What a run has left, on one HTML page and in a few facts. No jax: a report is made anywhere, at once."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, Row, RunFolder
from nash_mhc.config.humanize import duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.report.charts import Points, chart
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import write_whole
from nash_mhc.storage.paths import Folder

_SMALL_CHARTS = (  # title, key of a training row, key of an evaluation row
    ("learning rate", "lr", ""), ("gradient norm", "grad_norm", ""), ("token accuracy", "accuracy", "eval/accuracy"),
    ("tokens a second", "tokens_per_s", ""), ("ms a step", "step_ms", ""), ("ms a step waiting for data", "data_wait_ms", ""),
)  # fmt: skip


class Run(NamedTuple):
    """The files of one run."""

    folder: Folder
    info: dict[str, Any]  # run.json
    rows: list[Row]
    evals: list[Row]


def open_run(name: str | Folder) -> Run:
    """ConfigError for what is no run, or holds lines that are no rows."""
    folder = RunFolder(name)
    return Run(folder.path, folder.info(), folder.rows(METRICS), folder.rows(EVALUATIONS))


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
        "goodput (share of time in steps)": show(_number(last, "goodput"), "{:.1%}"),
        "peak memory of a device": show(_number(last, "memory_gib"), "{:.1f} GiB"),
    }
    return {name: text for name, text in found.items() if text}


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
.time>div{display:flex;height:18px;border-radius:5px;overflow:hidden}.time{margin:0 0 12px}.time p{margin:8px 0 0;
font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:4px 18px}.time p i{display:inline-block;width:10px;
height:10px;border-radius:3px;margin-right:6px}.step{background:#2f9e6e}.start,.compile{background:#8b7fd6}
.compile{background:#b39ddb}.input{background:#4aa3df}.evaluation{background:#d9730d}.checkpoint{background:#c9a227}
.lost{background:#d64545}.down{background:#8a8a86}
summary{cursor:pointer;font-weight:600}table{border-collapse:collapse;margin-top:10px;width:100%;font-size:13px}
td{padding:3px 12px 3px 0;border-top:1px solid var(--line);overflow-wrap:anywhere}td:first-child{color:var(--soft)}
"""


def _where_time_went(run: Run) -> str:
    """A bar of all time since the first start, by what it was spent on; nothing where the run has not counted it."""
    last = run.rows[-1] if run.rows else {}
    seconds = {name.removeprefix("time/"): _number(last, name) or 0.0 for name in last if name.startswith("time/")}
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    shown = {name: s for name, s in seconds.items() if s / whole >= 0.0005}
    share = lambda s: f"{s / whole:.1%}"
    bar = "".join(
        f'<i class="{html.escape(name)}" style="width:{100 * s / whole:.2f}%" title="{html.escape(name)} {share(s)}"></i>'
        for name, s in shown.items()
    )
    key = "".join(
        f'<span><i class="{html.escape(name)}"></i>{html.escape(name)} {duration(s)}, {share(s)}</span>'
        for name, s in shown.items()
    )
    return f'<div class="card time"><h2>Where the time went: {duration(whole)}</h2><div>{bar}</div><p>{key}</p></div>'


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
        f'<div class="card big"><h2>{key}Loss</h2>{loss}</div>{_where_time_went(run)}<div class="small">{small}</div>'
        f"<details><summary>Configuration</summary><table>{table}</table></details></html>\n"
    )


def write_page(run: Run, out: Folder) -> None:
    """All of the page or nothing: someone may be looking at the last one."""
    try:
        with as_os_errors():
            write_whole(out, page(run))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({reason(error)}); choose another file") from error
