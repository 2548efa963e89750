"""Files that grow row by row, in spite of faults of the storage: what cannot be written waits in memory."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import exists
from nash_mhc.storage.paths import Folder, is_remote


class Appended:
    """On this machine: added to at once, and nothing is left half written."""

    def __init__(self, path: Folder, first: bytes = b"") -> None:
        """`first` is what the file begins with, again if it has to be begun anew."""
        self._path, self._first = path, first
        self.waiting: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self.waiting.append(piece)

    def flush(self, *, last: bool = False) -> None:
        """Writes what waits; raises OSError where it must go on waiting."""
        if not self.waiting and not self._first:
            return
        with self._path.open("ab", buffering=0) as out:
            size = out.tell()
            rest = b"".join([self._first] * (size == 0) + self.waiting)
            try:
                while rest:
                    rest = rest[out.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    out.truncate(size)
                raise
        self.waiting = []


class Rewritten:
    """In an object store, which can add nothing to an object:
    written again as a whole, in the background and now and then."""

    def __init__(self, path: Folder, first: bytes = b"", *, pause: float = 30.0) -> None:
        self._path, self._pause, self._next = path, pause, 0.0
        with as_os_errors():
            self._content = path.read_bytes() if exists(path) else first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._writing: tuple[int, Future[float]] | None = None  # the pieces it will have written, their end
        self.waiting: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self.waiting.append(piece)
        self._content += piece

    def _write(self, content: bytes) -> float:
        began = time.monotonic()
        with as_os_errors():
            self._path.write_bytes(content)
        return time.monotonic() - began

    def _end(self) -> None:
        """Hears how the writing under way has ended."""
        if self._writing is not None:
            (count, future), self._writing = self._writing, None
            self._next = time.monotonic() + self._pause
            took = future.result()
            self.waiting = self.waiting[count:]
            self._next = time.monotonic() + max(self._pause, 20 * took)  # however long the file grows

    def flush(self, *, last: bool = False) -> None:
        """Raises OSError when what was begun earlier has failed; the `last` time, when this has."""
        if last or self._writing is None or self._writing[1].done():
            with contextlib.suppress(OSError) if last else contextlib.nullcontext():
                self._end()
        if last or (self._writing is None and self.waiting and time.monotonic() >= self._next):
            self._writing = (len(self.waiting), self._thread.submit(self._write, self._content))
        if last:
            self._thread.shutdown()
            self._end()


def growing(path: Folder, first: bytes = b"") -> Appended | Rewritten:
    return Rewritten(path, first) if is_remote(path) else Appended(path, first)
