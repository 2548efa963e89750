"""Files and folders on local disks and in object stores (gs://), which have neither real folders nor renames.

Needs only the standard library for local paths: importing fsspec takes 0.15 s.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from nash_mhc.config.fields import ConfigError, check_scheme
from nash_mhc.storage.errors import as_os_errors, reason

# epath's paths have the methods of Path that a run needs, but they are not a subclass of it.
if TYPE_CHECKING:
    Folder = Path
else:
    Folder = PurePath

# Raised by fsync on file systems that cannot sync a folder, or for a folder without read permission.
_CANNOT_SYNC_FOLDER = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


# --- paths -----------------------------------------------------------------------------------------------------------


def is_remote(path: str | Folder) -> bool:
    return str(path).startswith("gs://")


def to_path(name: str | Folder) -> Folder:
    """Return the path for `name`, with `~` expanded; raise ConfigError for gs:// without the package gcsfs."""
    check_scheme("", str(name), remote=True)
    if not is_remote(name):
        return Path(os.fspath(name)).expanduser()
    if any(importlib.util.find_spec(package) is None for package in ("etils", "gcsfs")):
        raise ConfigError(f"{name}: gs:// folders need the package gcsfs; install it with pip install 'nash_mhc[gcs]'")
    import fsspec
    from etils import epath

    # TensorStore writes to the same folders, so cached listings would be stale.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return epath.Path(os.fspath(name))


def is_same_file(path: Path, handle: int) -> bool:
    """Return whether `path` still names the open file; another process may have moved or removed it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_ino == os.fstat(handle).st_ino
    return False


def _remote(path: Folder) -> tuple[Any, str]:
    """Return the object store of a gs:// path and the path's name in it."""
    import fsspec

    return fsspec.core.url_to_fs(str(path))


# --- looking ---------------------------------------------------------------------------------------------------------


def exists(path: Folder, *, kind: str | None = None) -> bool:
    """Return whether there is such a "file" or "directory" (None: either). Raise if it cannot be determined."""
    if not is_remote(path):
        return path.exists() if kind is None else path.is_file() if kind == "file" else path.is_dir()
    store, root = _remote(path)
    try:
        return kind in (None, store.info(root)["type"])
    except FileNotFoundError:
        return False


def sizes(folder: Folder) -> dict[str, int]:
    """Return the bytes of every file below `folder`, by relative name."""
    if not is_remote(folder):
        files = ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
        return {name: path.stat().st_size for name, path in sorted(files)}
    store, root = _remote(folder)
    return {name[len(root) + 1 :]: int(info["size"]) for name, info in sorted(store.find(root, detail=True).items())}


def subfolders(folder: Folder) -> list[str]:
    """Return the names of the folders in `folder`; empty if it does not exist."""
    if not is_remote(folder):
        return [path.name for path in folder.glob("*") if path.is_dir()]
    store, root = _remote(folder)
    try:
        return [entry["name"].rpartition("/")[2] for entry in store.ls(root, detail=True) if entry["type"] == "directory"]
    except FileNotFoundError:
        return []


def modified_at(path: Folder) -> float:
    """Return the time of the last write, in seconds since the epoch."""
    if not is_remote(path):
        return path.stat().st_mtime
    store, root = _remote(path)
    return max((info["mtime"].timestamp() for info in store.find(root, detail=True).values()), default=0.0)


# --- changing --------------------------------------------------------------------------------------------------------


def make(folder: Folder) -> None:
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(folder: Folder) -> None:
    if not is_remote(folder):
        shutil.rmtree(folder)
        return
    store, root = _remote(folder)
    store.rm(root, recursive=True)


def move(folder: Folder, target: Folder) -> None:
    """Rename `folder` to `target` and replace any existing one. A move cut off in an object store can be repeated."""
    if not is_remote(folder):
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        return
    store, root = _remote(folder)
    for name in sizes(folder):
        store.cp_file(f"{root}/{name}", f"{_remote(target)[1]}/{name}")
    store.rm(root, recursive=True)


def create_exclusive(path: Folder, text: str) -> None:
    """Create a file; raise FileExistsError if it exists. Only one of several concurrent calls succeeds."""
    if is_remote(path):
        store, name = _remote(path)
        store.pipe_file(name, text.encode(), mode="create")
        return
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def sync(folder: Folder) -> None:
    """Flush `folder` and all files in it to disk, so that they survive a power loss."""
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
        if not (path.is_dir() and error.errno in _CANNOT_SYNC_FOLDER):
            raise


def write_atomic(path: Folder, content: str | bytes, *, part: Folder | None = None, durable: bool = True) -> None:
    """Write all of `content` or nothing; if `durable`, even across a power loss. `part` is the temporary file."""
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(data)  # an object becomes visible when its upload is complete
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


# --- append-only logs ------------------------------------------------------------------------------------------------


class LocalLog:
    """A local file that entries are appended to, each one whole or not at all. Failed entries wait in memory."""

    def __init__(self, path: Folder, header: bytes = b"") -> None:
        """`header` is written first, again if the file has been deleted."""
        self._path, self._header = path, header
        self.waiting: list[bytes] = []

    def add(self, entry: bytes) -> None:
        self.waiting.append(entry)

    def flush(self, *, last: bool = False) -> None:
        """Write the waiting entries. On OSError they stay waiting."""
        if not self.waiting and not self._header:
            return
        with self._path.open("ab", buffering=0) as out:
            size = out.tell()
            rest = b"".join([self._header] * (size == 0) + self.waiting)
            try:
                while rest:
                    rest = rest[out.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    out.truncate(size)
                raise
        self.waiting = []


class RemoteLog:
    """An object that entries are added to by uploading all of it from time to time, in the background."""

    def __init__(self, path: Folder, header: bytes = b"", *, pause: float = 30.0) -> None:
        self._path, self._pause, self._next_upload = path, pause, 0.0
        with as_os_errors():
            self._content = path.read_bytes() if exists(path) else header
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._upload: tuple[int, Future[float]] | None = None  # number of waiting entries in it, its duration
        self.waiting: list[bytes] = []

    def add(self, entry: bytes) -> None:
        self.waiting.append(entry)
        self._content += entry

    def _write(self, content: bytes) -> float:
        start = time.monotonic()
        with as_os_errors():
            self._path.write_bytes(content)
        return time.monotonic() - start

    def _finish_upload(self) -> None:
        if self._upload is not None:
            (count, future), self._upload = self._upload, None
            self._next_upload = time.monotonic() + self._pause
            seconds = future.result()
            self.waiting = self.waiting[count:]
            self._next_upload = time.monotonic() + max(self._pause, 20 * seconds)  # uploads take at most 5% of the time

    def flush(self, *, last: bool = False) -> None:
        """Start an upload if one is due. Raise OSError if the previous one failed; with `last`, if this one does."""
        if last or self._upload is None or self._upload[1].done():
            with contextlib.suppress(OSError) if last else contextlib.nullcontext():
                self._finish_upload()
        if last or (self._upload is None and self.waiting and time.monotonic() >= self._next_upload):
            self._upload = (len(self.waiting), self._thread.submit(self._write, self._content))
        if last:
            self._thread.shutdown()
            self._finish_upload()


def open_log(path: Folder, header: bytes = b"") -> LocalLog | RemoteLog:
    return RemoteLog(path, header) if is_remote(path) else LocalLog(path, header)


# --- digests ---------------------------------------------------------------------------------------------------------


def digest_of(values: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Folder) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(paths: Iterable[Folder]) -> list[str]:
    """Return the SHA-256 of each file, computed in threads (hashing releases the GIL)."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest_of_file, paths))


@functools.lru_cache(maxsize=1 << 16)
def _digest_of_version(path: Path, size: int, modified_ns: int) -> str:
    return digest_of_file(path)


def digests_of_sources(paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each of a user's data files; a file is read once per process unless it changes."""
    stats = [(path, path.stat()) for path in paths]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: _digest_of_version(s[0].absolute(), s[1].st_size, s[1].st_mtime_ns), stats))


# --- JSON files -------------------------------------------------------------------------------------------------------

# Raised when a file does not hold the values that the code expects.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def parse_json(data: bytes | str) -> Any:
    """Parse UTF-8 JSON; raise ValueError for anything else."""
    try:
        return json.loads(data.decode("utf-8") if isinstance(data, bytes) else data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextlib.contextmanager
def reading(path: object, remedy: str = "", kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise any failure to read or interpret a file as a one-line ConfigError of that `kind`."""
    remedy = f"; {remedy}" if remedy else ""
    try:
        with as_os_errors():
            yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}){remedy}") from None
    except MALFORMED as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)[:200] or type(error).__name__
        raise kind(f"{path}: cannot be read ({what}){remedy}") from None


def read_json(path: Folder, remedy: str = "", kind: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """Return the object in a JSON file; raise ConfigError if it holds anything else."""
    with reading(path, remedy, kind):
        values = parse_json(path.read_bytes())
        if not isinstance(values, dict):
            raise TypeError(f"expected a JSON object, found {type(values).__name__}")
        return values


def check_types(values: Mapping[str, Any], **kinds: type) -> None:
    """Check the type of each named value; may raise KeyError or TypeError. Numbers must not be negative."""
    for name, kind in kinds.items():
        value = values[name]
        is_right = isinstance(value, kind | int if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not is_right or (kind in (int, float) and not 0 <= value < 2**63):
            raise TypeError(f"{name} is {str(value)[:40]!r}")


def table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object under `name`; empty if there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number under `name`; None if there is none."""
    value = values.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
