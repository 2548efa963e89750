"""A roll call of a run's processes at the coordinator's address, before JAX listens there.

JAX waits without saying for whom, and aborts with a stack trace of C++.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from nash_mhc.config.fields import ConfigError

_LOOK_S = 0.2
_MARGIN_S = 10.0  # process 0 began to wait later than those that it answers
_ALL = "all"
_MARK = b"nash_mhc: "  # begins an answer: a run that has begun, whose JAX listens there, answers something else


def wait_for_all(address: str, count: int, index: int, patience: float) -> None:
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
