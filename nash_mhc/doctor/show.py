"""Findings as lines: in colour on a terminal, plain elsewhere, and plain where even rich is missing."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, WARNING, Finding

_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", SKIPPED: "dim"}
_WIDTH = max(map(len, _STYLES))


def _console() -> Any:
    """None where nobody watches, or without rich."""
    try:
        from rich.console import Console

        console = Console(highlight=False)
        return console if console.is_terminal else None
    except Exception:  # missing or broken: this command is what should tell so
        return None


class Lines:
    """A line appears when its check ends; what a check is at is shown meanwhile."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._console = _console()
        self._status: Any = None

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)
        text = f"{finding.check}: {finding.text}" + f"; {finding.remedy}" * bool(finding.remedy)
        if self._console is None:
            _plain(f"{finding.status:<{_WIDTH}}  {text}")
            return
        from rich.text import Text

        style = _STYLES[finding.status]
        line = Text.assemble((f"{finding.status:<{_WIDTH}}  ", style), (f"{finding.check}: ", "bold"), finding.text)
        if finding.remedy:
            line.append(f"; {finding.remedy}", style="cyan")
        self._console.print(line, soft_wrap=True)

    def busy(self, text: str) -> None:
        """On a terminal a line that passes; elsewhere only what takes long is worth one that stays."""
        if self._console is None:
            if "compiling the step" in text:
                _plain(f"{'...':<{_WIDTH}}  {text}")
            return
        from rich.text import Text

        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(Text(text, style="dim"))

    def say(self, text: str) -> None:
        self.end()
        _plain(text)

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _plain(text: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        print(text, flush=True)
        return
    print(text.encode("ascii", "replace").decode(), flush=True)  # a terminal without Unicode shows what it can
    sys.stdout.flush()
