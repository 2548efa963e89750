"""The compilation cache: where compiled programs are stored from one start to the next."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax

from nash_mhc.runtime.compat.jax import write_programs_whole
from nash_mhc.storage.paths import Folder, is_remote

_FOUND = "/jax/compilation_cache/cache_hits"  # what JAX calls it when a program was in the cache
_here = threading.local()  # JAX tells it in the thread that asked for the program
_LEFT_BEHIND_S = 3600.0  # who has written nothing to a part of a file for so long is dead


def found_in_cache() -> int:
    """Programs that this thread has asked for so far and that were in the cache."""
    return getattr(_here, "found", 0)


def _count(event: str, **_: Any) -> None:
    if event == _FOUND:
        _here.found = found_in_cache() + 1


jax.monitoring.register_event_listener(_count)


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
