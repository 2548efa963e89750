"""`report --live`: the page of runs that are under way, from this machine to this machine, with their newest rows."""

from __future__ import annotations

import contextlib
import http.server
from collections.abc import Sequence
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.report.contents import open_run
from nash_mhc.report.page import as_json, data_of, page
from nash_mhc.storage.files import Folder

_HOSTS = ("localhost", "127.0.0.1", "[::1]")  # by which this machine calls itself


class _Pages(http.server.BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        # A page from elsewhere must not read this one under a name that it has pointed here.
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
            return self._answer(403, "text/plain", "this page is shown to its own machine only, as localhost\n")
        try:
            if self.path == "/":
                return self._answer(200, "text/html", page([open_run(f) for f in self.server.folders], live=True))
            if self.path == "/data.json":
                return self._answer(200, "application/json", as_json(data_of([open_run(f) for f in self.server.folders])))
        except (ConfigError, OSError) as error:  # the folder was moved, or a row is being mended: the page asks again
            return self._answer(503, "text/plain", f"{error}\n")
        self._answer(404, "text/plain", "there is only / and /data.json\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        with contextlib.suppress(ConnectionError):  # the reader has gone
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants a line every two seconds."""


class LiveServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folders: Sequence[str | Folder], port: int) -> None:
        self.folders = folders
        try:
            super().__init__(("127.0.0.1", port), _Pages)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "no such port"
            raise ConfigError(f"--port {port}: cannot be used ({why}); choose another, or 0 for any that is free") from None

    @property
    def address(self) -> str:
        return f"http://localhost:{self.server_address[1]}/"
