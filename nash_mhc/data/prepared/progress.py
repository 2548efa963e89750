"""How far a preparation is: a bar on a terminal, elsewhere a line now and then;
on stderr, so that stdout is the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_QUIET, _EVERY = 2.0, 10.0  # seconds before the first word, and between lines where there is no terminal


@contextlib.contextmanager
def watching(what: str, unit: str = "tokens") -> Iterator[Callable[[int, int, int], None]]:
    """Gives `watch(bytes read, bytes in all, tokens so far)` for prepare(); others may count other things."""
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    columns = (TextColumn(what), BarColumn(bar_width=None), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(what, total=None, note="")
    last = began + _QUIET - _EVERY

    def watch(read: int, total: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        note = f"{tokens:,} {unit}, {tokens / max(now - began, 1e-3):,.0f} a second"
        if now - began > _QUIET:
            bar.start()
            bar.update(task, completed=min(read, total), total=total, note=note)
        if not console.is_terminal and now - last > _EVERY:
            console.print(f"{what}: {min(1.0, read / max(total, 1)):.0%}, {note}", markup=False, soft_wrap=True)
            last = now

    try:
        yield watch
    finally:
        bar.stop()
