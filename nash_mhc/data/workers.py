"""Worker processes that ignore the signals meant for the run, and a progress display for long work."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

# A scheduler signals every process it finds. The run handles these signals and needs its workers until it has saved.
_SIGNALS_OF_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes with these signals blocked, until they call `begin_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_RUN)
    try:
        resource_tracker.ensure_running()  # also starts a process, and unblocks some signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_RUN)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(*_: int) -> None:
    """Ignore the run's signals and exit with the parent; call this first in a worker process. Grain passes numbers."""
    for number in _SIGNALS_OF_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_OF_THE_RUN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, a worker whose parent was killed would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


log = logging.getLogger(__name__)
_QUIET_SECONDS, _LINE_SECONDS = 2.0, 10.0  # before the first output; between lines if stderr is not a terminal


@contextlib.contextmanager
def progress(title: str, unit: str = "tokens") -> Iterator[Callable[[int, int, int], None]]:
    """Yield `report(done, total, count)`, which shows a bar on a terminal and log lines elsewhere, on stderr."""
    console = Console(stderr=True, highlight=False)
    start = time.monotonic()
    columns = (TextColumn(title), BarColumn(bar_width=None), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(title, total=None, note="")
    last = start + _QUIET_SECONDS - _LINE_SECONDS

    def report(done: int, total: int, count: int) -> None:
        nonlocal last
        now = time.monotonic()
        note = f"{count:,} {unit}, {count / max(now - start, 1e-3):,.0f} {unit}/s"
        if now - start > _QUIET_SECONDS:
            bar.start()
            bar.update(task, completed=min(done, total), total=total, note=note)
        if not console.is_terminal and now - last > _LINE_SECONDS:
            log.info(f"{title}: {min(1.0, done / max(total, 1)):.0%}, {note}")
            last = now

    try:
        yield report
    finally:
        bar.stop()
