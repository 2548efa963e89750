"""JAX: atomic writes to its compilation cache, its coordination service, and the passes of splash attention."""

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

SEEN = ("0.10.2", "0.11.2", "0.12.0")
_SHARE = 10  # a program may use at most 1/10 of the free space


def write_programs_whole() -> None:
    """Make JAX write compiled programs atomically, and only if they fit into a tenth of the free space.

    JAX writes in place, so a kill leaves half a program, on which every later start fails. Checkpoints need the
    remaining space. Without `LRUCache.put`, JAX keeps writing in place.
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
    """Return JAX's distributed state: client, num_processes, process_id, coordinator_address.

    There is no public access before devices are initialized; Orbax uses the same attribute. Without it, this is a
    single process, and `processes.start` refuses to join others.
    """
    try:
        from jax._src import distributed

        return distributed.global_state
    except (ImportError, AttributeError):
        return SimpleNamespace(client=None, num_processes=None, process_id=0, coordinator_address=None)


def has_distributed_state() -> bool:
    """Return whether this JAX exposes its distributed state, which joining other processes needs."""
    return not isinstance(distributed_state(), SimpleNamespace)


@contextlib.contextmanager
def when_heartbeats_stop(callback: Callable[[], None]) -> Iterator[None]:
    """Make clients created inside call `callback` when the coordinator is lost, instead of aborting with a stack.

    JAX does not expose this option of the client, so its factory is replaced meanwhile. Without it, JAX still aborts.
    """
    try:
        from jax._src.lib import _jax

        make = _jax.get_distributed_runtime_client
    except (ImportError, AttributeError):
        make = None
    if "missed_heartbeat_callback" not in (getattr(make, "__doc__", None) or ""):
        yield
        return
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: callback())
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


def splash_passes() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the forward and backward pass of splash attention (TPU) with the log-sum-exp.

    Without them this is None, and attention with log-sum-exp uses plain XLA.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    try:
        return splash._splash_attention_forward, splash._splash_attention_bwd
    except AttributeError:
        return None
