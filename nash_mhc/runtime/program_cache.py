"""Where compiled programs are kept from one start to the next.

The one file that reaches into JAX's own cache (`jax._src.lru_cache`). Should that vanish, JAX writes its programs as it
likes, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax

from nash_mhc.storage.paths import Folder, is_remote

_FOUND = "/jax/compilation_cache/cache_hits"  # what JAX calls it when a program was in the cache
_here = threading.local()  # JAX tells it in the thread that asked for the program
_SHARE = 10  # of the free space, one program may take one part in so many
_LEFT_BEHIND_S = 3600.0  # who has written nothing to a part of a file for so long is dead


def found_in_cache() -> int:
    """Programs that this thread has asked for so far and that were in the cache."""
    return getattr(_here, "found", 0)


def _count(event: str, **_: Any) -> None:
    if event == _FOUND:
        _here.found = found_in_cache() + 1


jax.monitoring.register_event_listener(_count)


def write_programs_whole() -> None:
    """Has JAX write programs whole, and only where there is room for them.

    JAX writes a compiled program in place. A kill in that moment leaves one that every later start stumbles over,
    and another process may read half of it. Here it is written to a temporary file, then renamed.
    A program that would take more than a tenth of the free space is not kept: checkpoints need it.
    """
    try:
        from jax._src import lru_cache
    except ImportError:
        return

    in_place = getattr(getattr(lru_cache, "LRUCache", None), "put", None)
    if in_place is None or getattr(in_place, "is_whole", False):
        return  # another JAX than those we know: as it likes

    def put(self: Any, key: str, value: bytes) -> None:
        target = f"{self.path}/{key}-cache"
        if getattr(self, "eviction_enabled", True) or "://" in target:
            in_place(self, key, value)
        elif not os.path.exists(target) and len(value) * _SHARE <= shutil.disk_usage(self.path).free:
            part = f"{self.path}/.{key}.{os.getpid()}.{threading.get_ident()}.part"
            try:
                Path(part).write_bytes(value)
                os.replace(part, target)
            except OSError:
                Path(part).unlink(missing_ok=True)
                raise

    put.is_whole = True  # type: ignore[attr-defined]
    lru_cache.LRUCache.put = put  # type: ignore[method-assign]


def use_compilation_cache(folder: Folder) -> None:
    """A restarted run starts in seconds:
    compiled programs are kept beside the runs, unless the user keeps them elsewhere.

    Those of a run in an object store lie where the runs of this machine have theirs:
    they are of no use to another machine.
    """
    write_programs_whole()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        beside = Path("runs") if is_remote(folder) else folder.parent
        cache = (beside / ".jax_cache").absolute()
        for part in cache.glob(".*.part"):  # of processes that were killed while they wrote it
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _LEFT_BEHIND_S:
                    part.unlink()
        jax.config.update("jax_compilation_cache_dir", str(cache))


def remove_programs(folder: Folder) -> int:
    """Removes the compiled programs that lie on the same disk as `folder`, which is full; returns their bytes.

    Those that users keep elsewhere, in a folder of their own choice, stay.
    """
    named = jax.config.values["jax_compilation_cache_dir"]
    if named is None or is_remote(folder) or "JAX_COMPILATION_CACHE_DIR" in os.environ or "://" in str(named):
        return 0
    removed = 0
    with contextlib.suppress(OSError):
        if Path(named).stat().st_dev == Path(folder).stat().st_dev:
            for program in Path(named).glob("*-cache"):
                size = program.stat().st_size
                program.unlink()
                removed += size
    return removed
