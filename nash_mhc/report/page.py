"""One HTML page about one run or several. It opens offline; only while it is live it asks for something: newer rows."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.report.contents import Run, contents
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import Folder, write_atomic


def data_of(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page is made from; runs of the same name are told apart by a number."""
    names: dict[str, int] = {}
    found = []
    for run in runs:
        names[run.name] = names.get(run.name, 0) + 1
        shown = contents(run)
        if (count := names[run.name]) > 1:
            shown["name"] = f"{run.name} ({count})"
        found.append(shown)
    return {"runs": found}


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _file(name: str) -> str:
    return (resources.files("nash_mhc.report") / name).read_text(encoding="utf-8")


def page(runs: Sequence[Run], *, live: bool = False) -> str:
    """The whole report as one HTML text. Whatever comes from a run stands in it as JSON, and is shown as text only."""
    data = as_json(data_of(runs))
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # nothing in it can end the script
        data = data.replace(character, code)
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    asks = "'self'" if live else "'none'"
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src {asks}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        f"<title>{html.escape(title)}</title><style>{_file('page.css')}</style></head>"
        f"<body{' data-live' if live else ''}><noscript>The charts of this page are drawn by its own JavaScript.</noscript>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{_file('charts.js')}</script><script>{_file('page.js')}</script></body></html>\n"
    )


def write_page(runs: Sequence[Run], out: Folder) -> None:
    """All of the page or nothing: someone may be looking at the last one."""
    try:
        with as_os_errors():
            write_atomic(out, page(runs))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({reason(error)}); choose another file") from error
