"""The HTML page about one or more runs. It works offline; `--live` serves it and updates it while the runs continue."""

from __future__ import annotations

import contextlib
import html
import http.server
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.report.contents import Run, contents, open_run
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import Folder, write_atomic

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the data of the page. Runs of the same name are numbered."""
    counts: dict[str, int] = {}
    data = []
    for run in runs:
        count = counts[run.name] = counts.get(run.name, 0) + 1
        data.append(contents(run) | ({"name": f"{run.name} ({count})"} if count > 1 else {}))
    return {"runs": data}


def _as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return (resources.files("nash_mhc.report") / name).read_text(encoding="utf-8")


def page(runs: Sequence[Run], *, live: bool = False) -> str:
    """Return the page as HTML. The data of a run is embedded as JSON and shown as text only."""
    data = _as_json(page_data(runs))
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # so that no text can end the script
        data = data.replace(character, code)
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    connect = "'self'" if live else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src {connect}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{html.escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body{' data-live' if live else ''}><noscript>This page draws its charts with JavaScript.</noscript>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{_asset('charts.js')}</script><script>{_asset('page.js')}</script></body></html>\n"
    )


def write_page(runs: Sequence[Run], out: Folder) -> None:
    try:
        with as_os_errors():
            write_atomic(out, page(runs))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({reason(error)}); choose another file") from error


class _Pages(http.server.BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        # Protects against DNS rebinding: another site must not read this page under its own name.
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _LOCAL_HOSTS:
            return self._answer(403, "text/plain", "this page is available only as localhost\n")
        try:
            if self.path == "/":
                return self._answer(200, "text/html", page([open_run(f) for f in self.server.folders], live=True))
            if self.path == "/data.json":
                return self._answer(200, "application/json", _as_json(page_data([open_run(f) for f in self.server.folders])))
        except (ConfigError, OSError) as error:  # the run moved, or a row is being repaired: the page retries
            return self._answer(503, "text/plain", f"{error}\n")
        self._answer(404, "text/plain", "only / and /data.json exist\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        with contextlib.suppress(ConnectionError):  # the browser has closed the connection
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, which come every two seconds."""


class LiveServer(http.server.ThreadingHTTPServer):
    """Serves the page of these runs to this machine only."""

    daemon_threads = True

    def __init__(self, folders: Sequence[str | Folder], port: int) -> None:
        self.folders = folders
        try:
            super().__init__(("127.0.0.1", port), _Pages)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "no such port"
            raise ConfigError(f"--port {port}: cannot be used ({why}); choose another, or 0 for a free one") from None

    @property
    def address(self) -> str:
        return f"http://localhost:{self.server_address[1]}/"
