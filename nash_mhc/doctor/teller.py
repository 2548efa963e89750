"""How a check in a process of its own tells what it finds: an object a line, to the process that listens.

Before each part it says what should be done in case nothing more is heard of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.doctor.findings import OK, PROBLEM, Finding, told


class Stop(Exception):
    """A part has failed, and has been told; what comes after it makes no sense."""


class Teller:
    """To the process that listens."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def _tell(self, **event: Any) -> None:
        os.write(self._handle, (json.dumps(event) + "\n").encode())

    def say(self, text: str) -> None:
        """What it is at; the time that it has begins anew."""
        self._tell(say=text)

    def found(self, finding: Finding) -> None:
        self._tell(finding=finding.as_dict())

    def ok(self, check: str, text: str, **figures: Any) -> None:
        self.found(Finding(check, OK, text, figures=figures))

    @contextlib.contextmanager
    def part(self, check: str, doing: str, remedy: str, *, patience: float = 1.0, status: str = PROBLEM) -> Iterator[None]:
        """Whatever goes wrong inside is told with this status and remedy, and is a Stop; `patience` is a factor of the
        time that it has."""
        self._tell(part=check, say=doing, remedy=remedy, patience=patience, status=status)
        try:
            yield
        except Exception as error:
            if not isinstance(error, Stop):
                reason = error.strerror if isinstance(error, OSError) else None
                text, own = reason or told(error), isinstance(error, ConfigError) and "; " in str(error)
                self.found(Finding(check, status, *(text.split("; ", 1) if own else (text, remedy))))
            raise Stop from None
