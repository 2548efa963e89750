"""Several processes as one run: joining them, comparing their settings, and losing the first one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.parallel.board import Board, LostProcess, coordinator_answers, process_names, waiting_for_peer
from nash_mhc.parallel.place import find_place
from nash_mhc.runtime.compat.jax import can_join, distributed_state, when_heartbeats_stop

_LOOK_S = 0.2
_MARGIN_S = 10.0  # process 0 began to wait later than those that it answers
_ALL = "all"
_MARK = b"nash_mhc: "  # begins an answer: a run that has begun, whose JAX listens there, answers something else


def roll_call(address: str, count: int, index: int, patience: float) -> None:
    """Return once all processes have called; ConfigError in each of them that names those that did not."""
    host, _, port = address.rpartition(":")
    where = (host.strip("[]"), int(port))
    missing = _collect(where[1], count, patience) if index == 0 else _call(where, index, patience)
    if missing != _ALL:
        raise ConfigError(
            f"{missing.format(address=address)} within {patience:g} s; look at what it printed, then start all processes "
            "again, or let them wait longer with --connect-timeout"
        )


def _collect(port: int, count: int, patience: float) -> str:
    """Process 0: wait for the others' calls and tell each of them who is missing, or that all are there."""
    end, came = time.monotonic() + patience, dict[int, socket.socket]()
    with contextlib.ExitStack() as closing:
        listening = closing.enter_context(_listening(port, count, end))
        looking = closing.enter_context(selectors.DefaultSelector())
        looking.register(listening, selectors.EVENT_READ)
        while len(came) < count - 1 and time.monotonic() < end:
            for key, _ in looking.select(_LOOK_S):
                if key.fileobj is listening:
                    caller = closing.enter_context(listening.accept()[0])
                    looking.register(caller, selectors.EVENT_READ)
                    continue
                caller = key.fileobj  # type: ignore[assignment]
                looking.unregister(caller)
                with contextlib.suppress(OSError, ValueError):
                    number = int(caller.recv(64))
                    if 0 < number < count:
                        came[number] = caller
        absent = [number for number in range(1, count) if number not in came]
        named = f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of {count}"
        answer = f"{named} did not connect to process 0 at {{address}}" if absent else _ALL
        for caller in came.values():
            with contextlib.suppress(OSError):
                caller.sendall(_MARK + answer.encode())
    return answer


def _listening(port: int, count: int, end: float) -> socket.socket:
    """Listen at the port as soon as it is free: a process 0 that was here before may still be leaving."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=dual)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"process 0 (the coordinator) cannot listen at port {port} ({error.strerror})") from None
            time.sleep(_LOOK_S)


def _call(where: tuple[str, int], index: int, patience: float) -> str:
    """Any other process: call process 0 and return its answer."""
    silent, end = "process 0 (the coordinator) did not answer at {address}", time.monotonic() + patience
    while time.monotonic() < end:
        try:
            with socket.create_connection(where, timeout=patience) as calling:
                calling.sendall(str(index).encode())
                calling.settimeout(patience + _MARGIN_S)
                if (answer := calling.recv(4096)).startswith(_MARK):
                    return answer.removeprefix(_MARK).decode()
        except OSError:
            pass
        time.sleep(_LOOK_S)
    return silent


_CONNECT_S = 300  # for processes that JAX finds by itself: a peer whose container is still being pulled comes late
_NEVER_S = 10**6  # JAX ends a run whose peer is silent with an abort that names nobody: runtime/watchdog.py is to be first
_TRY_AGAIN = 75  # as in runtime/signals.py
_kept: list[Any] = []  # C calls these until the process ends


def start(cfg: MeshConfig) -> int:
    """Joins the run's other processes, if there are any, before the first use of a device;
    returns how many there are."""
    if jax.distributed.is_initialized() or (own := find_place(cfg, os.environ)) is None:
        return distributed_state().num_processes or 1
    if not can_join():
        raise ConfigError(f"jax {jax.__version__} does not say how processes meet; start one process, or use jax 0.12")
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours: runtime/signals.py
    options: dict[str, Any] = {"initialization_timeout": _CONNECT_S, "heartbeat_timeout_seconds": _NEVER_S}
    options["shutdown_timeout_seconds"] = _NEVER_S  # the last checkpoint of process 0 may take its time
    if own.address is not None:
        assert own.count is not None and own.index is not None
        roll_call(own.address, own.count, own.index, cfg.connect_timeout)
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
    return int(distributed_state().num_processes)


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
    return f"process 0 (the coordinator, {distributed_state().coordinator_address})"


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
    Where it takes none, its own message comes first, and ours when it aborts.
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
    with when_heartbeats_stop(_ended):
        yield


_terminate: Callable[[], None] = os.abort  # what C++ would do by itself: it names the exception


def _ended() -> None:
    _when_lost()
    ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
    _terminate()


_PATIENCE_S = 60.0  # they have all connected: what they compare is there at once
_SHOWN = 60  # characters of a value
_asked = 0


def check_same(settings: Mapping[str, Any], patience: float = _PATIENCE_S) -> None:
    """ConfigError in every process, with the first name whose value is not the same in all, and two of its values.

    No device is used. All processes call it, in the same order. LostProcess names who is missing.
    """
    global _asked  # noqa: PLW0603
    state = distributed_state()
    if (count := state.num_processes or 1) == 1:
        return
    _asked += 1
    board, me = Board(f"nash_mhc/same{_asked}"), state.process_id
    board.write(f"settings/{me}", {"--num-processes": count} | dict(settings))
    with waiting_for_peer():
        _until_all(board, "settings", 1, patience)
        count = board.read("settings")["0"]["--num-processes"]  # what process 0 was started with
        _until_all(board, "settings", count, patience)
    everyone = board.read("settings")
    first = everyone["0"]
    for other in range(1, count):
        its = everyone[str(other)]
        names = [name for name in {**first, **its} if first.get(name) != its.get(name)]
        if not names:
            continue
        board.write(f"read/{me}", True)
        if me == 0:  # the notes end with process 0: the others read them first
            _until_all(board, "read", count, patience)
            time.sleep(1.0)
        differences = [
            f"{name} {_shown(first.get(name))} in process 0, {_shown(its.get(name))} in process {other}" for name in names
        ]
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(
            f"the processes of this run differ: {'; '.join(differences[:3])}{more}; start all of them with the same "
            "flags, files and packages"
        )


def _shown(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _until_all(board: Board, folder: str, count: int, seconds: float) -> None:
    """Wait for the notes of the first `count` processes."""
    end, look = time.monotonic() + seconds, 0.05
    while missing := sorted(set(range(count)) - set(map(int, board.read(folder)))):
        if time.monotonic() > end:
            text = f"{process_names(missing)} connected and has not sent its settings within {seconds:.0f} s: gone or frozen"
            raise LostProcess(text, *missing)
        time.sleep(look)
        look = min(1.0, look * 1.2)
