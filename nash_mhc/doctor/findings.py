"""Findings of checks, and their display: in color on a terminal, plain elsewhere and where rich is missing."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "not tried"
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", SKIPPED: "dim"}
_STATUS_WIDTH = max(map(len, _STYLES))
_LONGEST_ERROR = 300  # characters: some libraries put a stack trace into the message


@dataclass(frozen=True)
class Finding:
    check: str
    status: str  # OK, WARNING, PROBLEM (would stop a training run) or SKIPPED
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # the values in the text, for --json

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_line(error: BaseException | str) -> str:
    """Return an error as one line. A long one is cut in the middle, because reasons are often at the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError | IndexError):  # their messages need the type
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR // 2]} ... {text[-_LONGEST_ERROR // 2 :]}"


def size(count: float) -> str:
    """Format bytes as `812 MB` or `23.4 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _terminal() -> Any:
    """Return a rich console, or None if the output is not a terminal or rich does not work."""
    try:
        from rich.console import Console

        console = Console(highlight=False)
        return console if console.is_terminal else None
    except Exception:  # a broken rich is reported by the package check
        return None


class Lines:
    """Prints each finding as it arrives and, on a terminal, the current activity below."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._console = _terminal()
        self._spinner: Any = None

    def found(self, finding: Finding) -> None:
        self.findings.append(finding)
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        if self._console is None:
            _print(f"{finding.status:<{_STATUS_WIDTH}}  {finding.check}: {finding.text}{remedy}")
            return
        from rich.text import Text

        status = (f"{finding.status:<{_STATUS_WIDTH}}  ", _STYLES[finding.status])
        line = Text.assemble(status, (f"{finding.check}: ", "bold"), finding.text, (remedy, "cyan"))
        self._console.print(line, soft_wrap=True)

    def busy(self, text: str) -> None:
        """Show the current activity. Without a terminal, print only the slow compilation."""
        if self._console is None:
            if "compiling the step" in text:
                _print(f"{'...':<{_STATUS_WIDTH}}  {text}")
            return
        from rich.text import Text

        if self._spinner is None:
            self._spinner = self._console.status("")
            self._spinner.start()
        self._spinner.update(Text(text, style="dim"))

    def say(self, text: str) -> None:
        self.end()
        _print(text)

    def end(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


def _print(text: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        print(text, flush=True)
        return
    print(text.encode("ascii", "replace").decode(), flush=True)
    sys.stdout.flush()
