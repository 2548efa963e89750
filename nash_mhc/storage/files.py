"""What a run does with whole folders and files, on this machine and in an object store,
which has neither folders nor renames.

Only the standard library, for folders of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from nash_mhc.config.fields import ConfigError, check_scheme
from nash_mhc.storage.errors import as_os_errors

# The paths of an object store can do what a Path can, as far as a run needs it, but they are none.
if TYPE_CHECKING:
    Folder = Path
else:
    Folder = PurePath


def is_same_file(path: Path, handle: int) -> bool:
    """Whether the name still means the file or folder that was opened; another process may have moved or removed it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_ino == os.fstat(handle).st_ino
    return False


def is_remote(path: str | Folder) -> bool:
    return str(path).startswith("gs://")


def to_path(name: str | Folder) -> Folder:
    """The path of that name; ConfigError for a gs:// name without the package that reaches it."""
    check_scheme("", str(name), remote=True)
    if not is_remote(name):
        return Path(os.fspath(name)).expanduser()
    if any(importlib.util.find_spec(package) is None for package in ("etils", "gcsfs")):
        raise ConfigError(f"{name}: gs:// folders need the package gcsfs; install it with pip install 'nash_mhc[gcs]'")
    import fsspec
    from etils import epath

    # TensorStore writes there as well: what was seen in a folder a while ago says nothing.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return epath.Path(os.fspath(name))


# Of file systems that know no such thing (and access to a folder that may be written, but not read).
_FOLDERS_CANNOT_BE_SYNCED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def _reached(folder: Folder) -> tuple[Any, str]:
    """(the object store, the folder's name in it)"""
    import fsspec

    return fsspec.core.url_to_fs(str(folder))


def exists(path: Folder, *, kind: str | None = None) -> bool:
    """Whether there is such a "file", "directory" or either. What cannot be found out is an error, never a no."""
    if not is_remote(path):
        return path.exists() if kind is None else path.is_file() if kind == "file" else path.is_dir()
    store, root = _reached(path)
    try:
        return kind in (None, store.info(root)["type"])
    except FileNotFoundError:
        return False


def sizes(folder: Folder) -> dict[str, int]:
    """Name below the folder -> bytes, of every file."""
    if not is_remote(folder):
        found = ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
        return {name: path.stat().st_size for name, path in sorted(found)}
    store, root = _reached(folder)
    return {name[len(root) + 1 :]: int(info["size"]) for name, info in sorted(store.find(root, detail=True).items())}


def subfolders(folder: Folder) -> list[str]:
    """Names of the folders in a folder; none where there is no such folder."""
    if not is_remote(folder):
        return [path.name for path in folder.glob("*") if path.is_dir()]
    store, root = _reached(folder)
    try:
        return [entry["name"].rpartition("/")[2] for entry in store.ls(root, detail=True) if entry["type"] == "directory"]
    except FileNotFoundError:
        return []


def changed(folder: Folder) -> float:
    """When something in it was last written, in seconds since the epoch."""
    if not is_remote(folder):
        return folder.stat().st_mtime
    store, root = _reached(folder)
    return max((info["mtime"].timestamp() for info in store.find(root, detail=True).values()), default=0.0)


def make(folder: Folder) -> None:
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(folder: Folder) -> None:
    if not is_remote(folder):
        shutil.rmtree(folder)
        return
    store, root = _reached(folder)
    store.rm(root, recursive=True)


def move(folder: Folder, target: Folder) -> None:
    """Takes the place of a folder of that name. In an object store, one that was cut off is finished by the next."""
    if not is_remote(folder):
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        return
    store, root = _reached(folder)
    for name in sizes(folder):
        store.cp_file(f"{root}/{name}", f"{_reached(target)[1]}/{name}")
    store.rm(root, recursive=True)


def create_exclusive(path: Folder, text: str) -> None:
    """FileExistsError where there is one already; of several who try at once, one succeeds."""
    if is_remote(path):
        store, name = _reached(path)
        store.pipe_file(name, text.encode(), mode="create")
        return
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def sync(folder: Folder) -> None:
    """Until every file in the folder, and the folder itself, would outlive a loss of power.
    An object store sees to that."""
    if is_remote(folder):
        return
    for path in [*folder.rglob("*"), folder, folder.parent]:
        _sync(path)


def _sync(path: Folder) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in _FOLDERS_CANNOT_BE_SYNCED):
            raise


def write_atomic(path: Folder, content: str | bytes, *, part: Folder | None = None, durable: bool = True) -> None:
    """All of it or nothing, even if power is lost where it is `durable`; `part` is where it grows, if not beside it."""
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(data)  # an object appears when it is whole
        return
    part = part or path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        if durable:
            _sync(part)
        part.replace(path)
        if durable:
            _sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


class LocalLog:
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


class RemoteLog:
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


def open_log(path: Folder, first: bytes = b"") -> LocalLog | RemoteLog:
    return RemoteLog(path, first) if is_remote(path) else LocalLog(path, first)


def digest_of(values: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Folder) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(paths: Iterable[Folder]) -> list[str]:
    """In threads: hashing lets others run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest_of_file, paths))


@functools.lru_cache(maxsize=1 << 16)
def _digest_of_state(path: Path, size: int, modified_ns: int) -> str:
    return digest_of_file(path)


def digests_of_sources(paths: Iterable[Path]) -> list[str]:
    """Of a user's files, which a run opens for each split: each is read once in a process, unless it changes."""
    states = [(path, path.stat()) for path in paths]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: _digest_of_state(s[0].absolute(), s[1].st_size, s[1].st_mtime_ns), states))
