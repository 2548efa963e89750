"""What is seen of an evaluation while it goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from nash_mhc.config.humanize import duration

_PATIENCE = 10.0  # seconds between two lines


class Progress:
    """Everything goes to stderr: what is found goes to stdout. `quiet`: another process of this run speaks."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr, highlight=False, quiet=quiet)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def part(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """The function that is given hears how much more of `total` is done."""
        with self._bar(name, total) if self._console.is_terminal else self._lines(name, total) as tick:
            yield tick

    @contextlib.contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)

    @contextlib.contextmanager
    def _lines(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        began = said = time.monotonic()
        done, first, at_first = 0, 0, began  # the first answer waited for the compiler, which says nothing about the rest

        def tick(count: int) -> None:
            nonlocal done, said, first, at_first
            done += count
            now = time.monotonic()
            if not first:
                first, at_first = done, now
            elif now - said > _PATIENCE and done < total:
                said = now
                left = (now - at_first) / max(done - first, 1) * (total - done)
                self.say(f"{name}: {done:,} of {total:,}, about {duration(left)} left")

        yield tick
        self.say(f"{name}: {total:,} in {duration(time.monotonic() - began)}")
