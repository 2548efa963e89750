"""Worker processes that outlive every signal but the one that they get from the process that started them.

A scheduler signals every process that it finds. The run saves and ends by itself then, and needs its workers until it
has: they ignore the signals that it gets, from their first instruction on, and end with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

_MEANT_FOR_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Processes that are started in here begin with these signals blocked; `begin_worker` is what they do first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _MEANT_FOR_THE_RUN)
    try:
        resource_tracker.ensure_running()  # starts a process, too, and unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, _MEANT_FOR_THE_RUN)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """For a process that was started so."""
    for number in _MEANT_FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _MEANT_FOR_THE_RUN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)
