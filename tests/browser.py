"""A real browser without a window, spoken to over a pipe (the DevTools protocol); nothing is installed for it but the
browser itself."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120.0  # seconds for an answer, on a busy machine


def find() -> str:
    """Skips the test, and says so, where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip("no browser is here; apt-get install chromium brings one")


class Tab:
    """What happens in the page is kept in `events`: errors, requests, words on the console."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._numbers, self._rest = to, back, itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{part}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        question = json.dumps({"id": number, "method": method, "params": values} | session).encode() + b"\0"
        while question:
            question = question[os.write(self._to, question) :]
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    def open(self, address: str) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until the expression is true; the page itself looks again whenever it is drawn."""
        self.run(
            f"new Promise((done, fail) => {{ const late = performance.now() + {1000 * PATIENCE}; const look = () => "
            f"({condition}) ? done(true) : performance.now() > late ? fail('{condition.replace(chr(39), '')}') : "
            "setTimeout(look, 20); look(); })"
        )

    def see(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """The size of the window, and what colours its user likes."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        """Of the whole page, as PNG."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def drag(self, selector: str, start: float, end: float) -> None:
        """Over an element, from one share of its width to another."""
        script = f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
        box = self.run(script + "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()")
        y = box[1] + box[3] / 2
        spots = [box[0] + box[2] * share for share in (start, (start + end) / 2, end)]
        self._mouse("mouseMoved", spots[0], y)
        self._mouse("mousePressed", spots[0], y)
        for x in spots[1:]:
            self._mouse("mouseMoved", x, y, pressed=True)
        self._mouse("mouseReleased", spots[2], y)

    def _mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        button = "none" if kind == "mouseMoved" and not pressed else "left"
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(pressed), clickCount=1)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page's scripts, and whatever the browser itself had to say."""
        told = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in told]

    @property
    def requests(self) -> list[str]:
        asked = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in asked]


@contextlib.contextmanager
def browser(home: Path) -> Iterator[Tab]:
    """One tab of a fresh browser, whose files lie in `home`."""
    name = find()
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
    # The browser reads from its third file and writes to its fourth.
    line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", line, "browser", name, *flags, *quiet, f"--user-data-dir={home}", "--remote-debugging-pipe"],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(home)},
    )
    os.close(theirs_in), os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out), os.close(ours_in)
