"""What a run does with whole folders and files, on this machine and in an object store,
which has neither folders nor renames.

Only the standard library, for folders of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import Any

from nash_mhc.storage.paths import Folder, is_remote

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


def create_whole(path: Folder, text: str) -> None:
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


def write_whole(path: Folder, content: str | bytes, *, part: Folder | None = None, durable: bool = True) -> None:
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
