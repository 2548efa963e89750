"""Where a run lies: a folder of this machine, or of an object store (gs://bucket/run). No content is read here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nash_mhc.config.fields import ConfigError, check_scheme

# The paths of an object store can do what a Path can, as far as a run needs it, but they are none.
if TYPE_CHECKING:
    Folder = Path
else:
    Folder = PurePath


def still_names(path: Path, handle: int) -> bool:
    """Whether the name still means the file or folder that was opened; another process may have moved or removed it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_ino == os.fstat(handle).st_ino
    return False


def is_remote(place: str | Folder) -> bool:
    return str(place).startswith("gs://")


def place(name: str | Folder) -> Folder:
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
