"""JAX: the files of its compilation cache, and the coordination service that joins processes."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEEN = ("0.10.2", "0.11.2")
_SHARE = 10  # a program may take up one part in so many of the free space


def write_programs_whole() -> None:
    """Have JAX write compiled programs to a temporary file and rename it, and only where there is room.

    JAX writes in place: a kill leaves half a program that every later start fails on. A program of more than a tenth of
    the free space is not written: checkpoints need the space. Without `LRUCache.put`, JAX writes as it does.
    """
    try:
        from jax._src import lru_cache
    except ImportError:
        return
    in_place = getattr(getattr(lru_cache, "LRUCache", None), "put", None)
    if in_place is None or getattr(in_place, "is_whole", False):
        return

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


def distributed_state() -> Any:
    """Return what JAX knows of the run's processes: client, num_processes, process_id, coordinator_address.

    No public name leads to it before there are devices; Orbax takes it from the same place. Without it, this is a
    process by itself, and `processes.start` refuses to join others.
    """
    try:
        from jax._src import distributed

        return distributed.global_state
    except (ImportError, AttributeError):
        return SimpleNamespace(client=None, num_processes=None, process_id=0, coordinator_address=None)


def can_join() -> bool:
    """Return whether `distributed_state` has a client once the processes have found each other."""
    return not isinstance(distributed_state(), SimpleNamespace)


@contextlib.contextmanager
def when_heartbeats_stop(do: Callable[[], None]) -> Iterator[None]:
    """Have the clients made inside call `do` when the coordinator is lost; JAX prints a stack and aborts otherwise.

    JAX passes no such function on, so its own is replaced meanwhile. Without it, JAX prints and aborts as it does.
    """
    try:
        from jax._src.lib import _jax

        make = _jax.get_distributed_runtime_client
    except (ImportError, AttributeError):
        make = None
    if "missed_heartbeat_callback" not in (getattr(make, "__doc__", None) or ""):
        yield
        return
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: do())
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make
