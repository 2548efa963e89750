"""The storage that a run would write to, tried: in a process of its own, for a file system may never answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from nash_mhc.doctor.findings import OK, WARNING, Finding, size
from nash_mhc.doctor.teller import Stop, Teller
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import Folder, is_remote, to_path

_BYTES, _BYTES_REMOTE = 64 << 20, 8 << 20  # written and read; over a network, few enough for a slow one
_LITTLE = 5e9  # bytes that are free: a few checkpoints of the smaller presets


@contextlib.contextmanager
def _made(folder: Folder) -> Iterator[Folder]:
    """The folder and those above it, as far as they are not there yet; what was made goes again."""
    if is_remote(folder):
        yield folder
        return
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        for one in new:
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                one.rmdir()


def _read(path: Folder) -> bytes:
    """From the disk, where the system can be asked to forget what it has kept in memory."""
    if not is_remote(path) and hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.read_bytes()


def _rates(folder: Folder) -> tuple[int, float, float]:
    """(bytes, seconds to write them for good, seconds to read them)"""
    trial = folder / f".doctor-{uuid.uuid4().hex[:12]}"
    written = os.urandom(1 << 20) * ((_BYTES_REMOTE if is_remote(folder) else _BYTES) >> 20)
    files.make(trial)
    try:
        began = time.perf_counter()
        files.write_atomic(trial / "written", written)
        half = time.perf_counter()
        found = _read(trial / "written")
        end = time.perf_counter()
    finally:
        files.remove(trial)
    if found != written:
        raise OSError("what is read is not what was written")
    return len(written), half - began, end - half


def _storage(tell: Teller, folder: Folder) -> None:
    with _made(folder):
        count, writing, reading = _rates(folder)
        free = None if is_remote(folder) else shutil.disk_usage(folder).free
    write, read = count / max(writing, 1e-9), count / max(reading, 1e-9)
    text = f"{folder}: writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    text += "" if free is None else f", {size(free)} free"
    low = free is not None and free < _LITTLE
    figures = {"folder": str(folder), "write": write, "read": read, "free": free}
    remedy = "make room, or name a folder on another disk: a checkpoint is about 12 bytes a parameter" * low
    tell.found(Finding("storage", WARNING if low else OK, text, remedy, figures))


def _cache(tell: Teller, folder: Folder) -> None:
    """Where `runtime/compiled.py` would keep compiled programs."""
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    beside = Path("runs") if is_remote(folder) else folder.parent
    cache = to_path(named) if named else (beside / ".jax_cache").absolute()
    if named == "":
        remedy = "unset JAX_COMPILATION_CACHE_DIR: an empty one means that every start compiles anew"
        tell.found(Finding("compilation cache", WARNING, "switched off", remedy))
        return
    new = not files.exists(cache)
    try:
        with _made(cache), as_os_errors():
            trial = cache / f".doctor-{uuid.uuid4().hex[:12]}"
            trial.write_bytes(b"x")
            trial.unlink()
    except OSError as error:
        remedy = "JAX_COMPILATION_CACHE_DIR=FOLDER names another: without one every start compiles anew"
        text = f"{cache}: cannot be written ({error.strerror or error})"
        tell.found(Finding("compilation cache", WARNING, text, remedy))
        return
    text = f"{cache}, writable{' (a run makes it)' * new}"
    tell.ok("compilation cache", text, folder=str(cache), new=new)


def check(tell: Teller, *, folder: str, run_folder: str) -> None:
    remedy = f"let this user write to {folder}, or name another folder, and give it to train as --checkpoint-dir"
    with contextlib.suppress(Stop), tell.part("storage", f"writing to {folder}", remedy), as_os_errors():
        _storage(tell, to_path(folder))
    remedy = "set JAX_COMPILATION_CACHE_DIR to a folder of your own"
    with tell.part("compilation cache", "looking for the cache", remedy, status=WARNING):
        _cache(tell, to_path(run_folder))
