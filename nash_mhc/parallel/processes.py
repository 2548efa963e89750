"""Joining the processes of a run: a roll call, JAX's initialization, equal settings, and the loss of process 0."""

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

_CONNECT_S = 300  # when JAX finds the processes itself: a container may still be pulling its image
_NEVER_S = 10**6  # JAX aborts without naming the lost process, so runtime/watchdog.py must be faster
_TRY_AGAIN = 75  # as in runtime/signals.py, which is not imported here


def start(cfg: MeshConfig) -> int:
    """Join the other processes of the run, if any, before devices are used; return the number of processes."""
    if jax.distributed.is_initialized() or (own := find_place(cfg, os.environ)) is None:
        return distributed_state().num_processes or 1
    if not can_join():
        raise ConfigError(f"jax {jax.__version__} does not expose its coordination client; start one process, or use jax 0.12")
    jax.config.update("jax_enable_preemption_service", False)  # runtime/signals.py handles signals
    options: dict[str, Any] = {"initialization_timeout": _CONNECT_S, "heartbeat_timeout_seconds": _NEVER_S}
    options["shutdown_timeout_seconds"] = _NEVER_S  # the last checkpoint of process 0 may take long
    if own.address is not None:
        assert own.count is not None and own.index is not None
        roll_call(own.address, own.count, own.index, cfg.connect_timeout)
        local = None if own.local_device is None else [own.local_device]
        options |= {"coordinator_address": own.address, "num_processes": own.count, "process_id": own.index}
        options |= {"local_device_ids": local, "cluster_detection_method": "deactivate"}
    try:
        with _catch_lost_coordinator():
            jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        where = f"process {own.index} of {own.count} at {own.address}" if own.address else "the processes of this pod"
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processes did not find each other within {_CONNECT_S} s ({why})") from None
    return int(distributed_state().num_processes)


# --- roll call: JAX itself does not say which process is missing, and aborts with a C++ stack trace ------------------

_POLL_S = 0.2
_MARGIN_S = 10.0  # process 0 may have started to wait later than the others
_ALL = "all"
_MARK = b"nash_mhc: "  # start of an answer; if JAX of an earlier run still listens, it answers something else


def roll_call(address: str, count: int, index: int, timeout: float) -> None:
    """Wait until all processes have called process 0 at `address`; ConfigError in each names those that have not."""
    host, _, port = address.rpartition(":")
    target = (host.strip("[]"), int(port))
    answer = _collect(target[1], count, timeout) if index == 0 else _report_to_leader(target, index, timeout)
    if answer != _ALL:
        raise ConfigError(
            f"{answer.format(address=address)} within {timeout:g} s; check its output, then start all processes again, or "
            "raise --connect-timeout"
        )


def _collect(port: int, count: int, timeout: float) -> str:
    """In process 0: wait for the calls of the others and answer who is missing, or `_ALL`."""
    end, callers = time.monotonic() + timeout, dict[int, socket.socket]()
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(_listen(port, count, end))
        selector = closing.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        while len(callers) < count - 1 and time.monotonic() < end:
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is server:
                    caller = closing.enter_context(server.accept()[0])
                    selector.register(caller, selectors.EVENT_READ)
                    continue
                caller = key.fileobj  # type: ignore[assignment]
                selector.unregister(caller)
                with contextlib.suppress(OSError, ValueError):
                    number = int(caller.recv(64))
                    if 0 < number < count:
                        callers[number] = caller
        missing = [number for number in range(1, count) if number not in callers]
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {count}"
        answer = f"{names} did not connect to process 0 at {{address}}" if missing else _ALL
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall(_MARK + answer.encode())
    return answer


def _listen(port: int, count: int, end: float) -> socket.socket:
    """Listen at the port as soon as it is free: process 0 of the previous run may still be exiting."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=dual)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"process 0 (the coordinator) cannot listen at port {port} ({error.strerror})") from None
            time.sleep(_POLL_S)


def _report_to_leader(target: tuple[str, int], index: int, timeout: float) -> str:
    """In the other processes: call process 0 and return its answer."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            with socket.create_connection(target, timeout=timeout) as connection:
                connection.sendall(str(index).encode())
                connection.settimeout(timeout + _MARGIN_S)
                if (answer := connection.recv(4096)).startswith(_MARK):
                    return answer.removeprefix(_MARK).decode()
        except OSError:
            pass
        time.sleep(_POLL_S)
    return "process 0 (the coordinator) did not answer at {address}"


# --- loss of process 0 -----------------------------------------------------------------------------------------------


def report_lost_coordinator() -> None:
    address = distributed_state().coordinator_address
    text = f"process 0 (the coordinator, {address}) is gone; start all processes again to resume from the last checkpoint"
    print(f"error: {text}", file=sys.stderr, flush=True)


def _exit_if_lost() -> None:
    if not coordinator_answers():  # else the abort has another reason
        report_lost_coordinator()
        os._exit(_TRY_AGAIN)


# Called where JAX would abort because it cannot reach process 0. A run replaces it: runtime/watchdog.py.
_on_lost: Callable[[], None] = _exit_if_lost
_callbacks: list[Any] = []  # called from C until the process ends, so they must not be collected
_terminate: Callable[[], None] = os.abort  # the C++ terminate handler, which names the exception


def on_lost_coordinator(callback: Callable[[], None]) -> None:
    """Have `callback` called when process 0 is lost. If it returns, the process is aborted."""
    global _on_lost  # noqa: PLW0603
    _on_lost = callback


@contextlib.contextmanager
def _catch_lost_coordinator() -> Iterator[None]:
    """Have the JAX client created inside call `_on_lost` instead of printing a gRPC status and aborting.

    JAX 0.10 fails to convert the status for the callback and calls std::terminate, which is caught here as well. A JAX
    without the callback prints its own message first and aborts, which leads to SIGABRT.
    """
    global _terminate  # noqa: PLW0603
    on_terminate = ctypes.CFUNCTYPE(None)(_lost)
    on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _on_lost())
    _callbacks.extend((on_terminate, on_abort))
    # A C handler, because abort() does not wait for Python's signal handlers.
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)
    with contextlib.suppress(OSError, AttributeError):  # a C++ library other than GNU's
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.restype = ctypes.CFUNCTYPE(None)
        _terminate = set_terminate(on_terminate)
    with when_heartbeats_stop(_lost):
        yield


def _lost() -> None:
    _on_lost()
    ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
    _terminate()


# --- equal settings --------------------------------------------------------------------------------------------------

_SETTINGS_S = 60.0  # timeout; all processes have connected already
_VALUE_CHARS = 60
_comparisons = 0


def check_same(settings: Mapping[str, Any], timeout: float = _SETTINGS_S) -> None:
    """ConfigError in every process if `settings` differ between them, with names and values. LostProcess names who is
    missing. All processes call this in the same order; it uses no device.
    """
    global _comparisons  # noqa: PLW0603
    state = distributed_state()
    if (count := state.num_processes or 1) == 1:
        return
    _comparisons += 1
    board, me = Board(f"nash_mhc/same{_comparisons}"), state.process_id
    board.write(f"settings/{me}", {"--num-processes": count} | dict(settings))
    with waiting_for_peer():
        first = _gather(board, "settings", 1, timeout)[0]
        count = first["--num-processes"]  # may differ from this process's own
        everyone = _gather(board, "settings", count, timeout)
    for index in range(1, count):
        other = everyone[index]
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if not names:
            continue
        board.write(f"read/{me}", True)
        if me == 0:  # the board ends with process 0, so the others must have read it
            _gather(board, "read", count, timeout)
            time.sleep(1.0)
        differences = [
            f"{name} {_short(first.get(name))} in process 0, {_short(other.get(name))} in process {index}" for name in names
        ]
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(
            f"the processes of this run differ: {'; '.join(differences[:3])}{more}; start all of them with the same "
            "flags, files and packages"
        )


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}..."


def _gather(board: Board, folder: str, count: int, seconds: float) -> dict[int, Any]:
    """Return the entries of the first `count` processes; LostProcess names those that have sent none in time."""
    entries, missing = board.gather(folder, count, seconds)
    if missing:
        text = f"{process_names(missing)} connected but did not send its settings within {seconds:.0f} s: dead or frozen"
        raise LostProcess(text, *missing)
    return entries
