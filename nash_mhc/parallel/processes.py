"""Several processes as one run: joining them, and what happens when the first one is gone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.parallel.board import coordinator_answers, joined
from nash_mhc.parallel.place import find_place

_CONNECT_S = 300  # a peer whose container is still being pulled comes late
_NEVER_S = 10**6  # JAX ends a run whose peer is silent with an abort that names nobody: runtime/watchdog.py is to be first
_TRY_AGAIN = 75  # as in runtime/signals.py
_kept: list[Any] = []  # C calls these until the process ends


def start(cfg: MeshConfig) -> int:
    """Joins the run's other processes, if there are any, before the first use of a device;
    returns how many there are."""
    if jax.distributed.is_initialized() or (own := find_place(cfg, os.environ)) is None:
        return joined().num_processes or 1
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours: runtime/signals.py
    options: dict[str, Any] = {"initialization_timeout": _CONNECT_S, "heartbeat_timeout_seconds": _NEVER_S}
    options["shutdown_timeout_seconds"] = _NEVER_S  # the last checkpoint of process 0 may take its time
    if own.address is not None:
        local = None if own.local_device is None else [own.local_device]
        options |= {"coordinator_address": own.address, "num_processes": own.count, "process_id": own.index}
        options |= {"local_device_ids": local, "cluster_detection_method": "deactivate"}
    try:
        with _own_words_for_a_lost_coordinator():
            jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        where = f"process {own.index} of {own.count} at {own.address}" if own.address else "the processes of this pod"
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processes did not find each other within {_CONNECT_S} s ({why})") from None
    return int(joined().num_processes)


def _leave() -> None:
    if coordinator_answers():
        return  # an abort for another reason
    print(
        f"error: {coordinator()} is gone; start all processes again to resume from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_TRY_AGAIN)


def coordinator() -> str:
    return f"process 0 (the coordinator, {joined().coordinator_address})"


# Called where JAX would abort because process 0 cannot be reached; once a run is watched over, by runtime/watchdog.py.
_when_lost: Callable[[], None] = _leave


def when_coordinator_is_lost(do: Callable[[], None]) -> None:
    """Calls `do` then; when that returns, the process is aborted after all."""
    global _when_lost  # noqa: PLW0603
    _when_lost = do


@contextlib.contextmanager
def _own_words_for_a_lost_coordinator() -> Iterator[None]:
    """JAX prints a gRPC status and a stack, and aborts. It takes a function to call instead, but passes no argument on.

    JAX 0.10 cannot convert the status to the function's argument and ends in std::terminate, which leads here as well.
    Should the function in `jax._src.lib` vanish, its own message comes first, and ours when it aborts.
    """
    global _terminate  # noqa: PLW0603
    ended = ctypes.CFUNCTYPE(None)(_ended)
    aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _when_lost())
    _kept.extend((ended, aborted))
    # A handler in Python would not run: abort() waits for nobody. This one is called inside of it.
    ctypes.CDLL(None).signal(signal.SIGABRT, aborted)
    with contextlib.suppress(OSError, AttributeError):  # another C++ library than GNU's
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.restype = ctypes.CFUNCTYPE(None)
        _terminate = set_terminate(ended)
    try:
        from jax._src.lib import _jax

        make = _jax.get_distributed_runtime_client
    except (ImportError, AttributeError):
        make = None
    if "missed_heartbeat_callback" not in (getattr(make, "__doc__", None) or ""):
        yield
        return
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: _ended())
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


_terminate: Callable[[], None] = os.abort  # what C++ would do by itself: it names the exception


def _ended() -> None:
    _when_lost()
    ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
    _terminate()
