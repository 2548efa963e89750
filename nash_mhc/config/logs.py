"""Show the package's log records. Modules only write records to `logging.getLogger(__name__)`.

A command calls `configure` once. A run attaches its own handler with `showing`. Otherwise the caller's handlers decide.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
HELP = "minimum severity of the messages to show"
_PACKAGE = logging.getLogger("nash_mhc")
_shown: logging.Handler | None = None  # the handler that `configure` or `showing` has attached


class StderrHandler(logging.StreamHandler[TextIO]):
    """Print messages to the current sys.stderr, which progress bars and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", choices=LEVELS, default="info", help=f"{HELP} [info]")


def configure(level: str) -> None:
    """Print the package's messages to stderr, from `level` on. For commands: a library leaves this to its user."""
    _PACKAGE.setLevel(level.upper())
    _PACKAGE.propagate = False  # absl, which Orbax imports, gives the root logger a handler
    _attach(StderrHandler(), level)


def silence() -> None:
    """Undo `configure`, for all processes of a command but the first."""
    _PACKAGE.setLevel(logging.NOTSET)
    _attach(None)
    _PACKAGE.propagate = True


@contextlib.contextmanager
def showing(handler: logging.Handler | None, level: str) -> Iterator[None]:
    """Show messages through `handler` instead of the one of `configure`; None shows nothing.

    The caller's own handlers get the same records, but for those that print to the console: unless the caller has
    enabled the package's messages, `handler` is the only one that does.
    """
    before, own_level = _shown, _PACKAGE.level
    duplicates = [] if caller_prints() else _on_console()
    for other in duplicates:
        other.addFilter(_is_of_others)
    if handler is not None and own_level == logging.NOTSET:
        _PACKAGE.setLevel(level.upper())
    _attach(handler, level)
    try:
        yield
    finally:
        _PACKAGE.setLevel(own_level)
        _attach(before)
        for other in duplicates:
            other.removeFilter(_is_of_others)


def _attach(handler: logging.Handler | None, level: str | None = None) -> None:
    global _shown  # noqa: PLW0603
    if _shown is not None:
        _PACKAGE.removeHandler(_shown)
    if handler is not None:
        if level is not None:
            handler.setLevel(level.upper())
        _PACKAGE.addHandler(handler)
    _shown = handler


def caller_prints() -> bool:
    """Return whether the caller has enabled the package's messages and prints them to the console."""
    return _PACKAGE.isEnabledFor(logging.INFO) and bool(_on_console())


def _on_console() -> list[logging.Handler]:
    """Return the caller's handlers for the package's messages that print to the console."""
    inherited = logging.getLogger().handlers if _PACKAGE.propagate else []
    others = [handler for handler in (*_PACKAGE.handlers, *inherited) if handler is not _shown]
    return [handler for handler in others if getattr(handler, "stream", None) in (sys.stdout, sys.stderr)]


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != _PACKAGE.name
