"""Communication between the processes of a run: a shared key-value board, and decisions and barriers built on it.

The barriers of jax.experimental.multihost_utils use the devices, and wait forever for a frozen process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.jax import distributed_state

T = TypeVar("T")
ANSWER_S = 20.0  # process 0 stores the board; without an answer for this long, it counts as dead or frozen
_POLL_S = 1.0


class LostProcess(jax.errors.JaxRuntimeError):
    """Another process of the run has died, is frozen, or has not arrived where this one waits for it."""

    def __init__(self, message: str, *missing: int, frozen: bool = False) -> None:
        super().__init__(message)
        self.missing, self.frozen = missing, frozen  # frozen: process 0 did not answer at all


class Board:
    """JSON values that every process can read and write, in the memory of JAX's coordinator. Too slow for every step.

    Every call returns at most ANSWER_S after its timeout. Raise LostProcess if process 0 does not answer or is gone.
    """

    def __init__(self, name: str) -> None:
        self._client = distributed_state().client
        self._name = name

    def write(self, key: str, value: Any) -> None:
        _call(lambda: self._client.key_value_set(f"{self._name}/{key}", json.dumps(value), allow_overwrite=True))

    def delete(self, key: str) -> None:
        _call(lambda: self._client.key_value_delete(f"{self._name}/{key}"))

    def read(self, folder: str) -> dict[str, Any]:
        """Return all values under `folder/`, by the last part of their keys."""
        entries = _call(lambda: self._client.key_value_dir_get(f"{self._name}/{folder}/"))
        return {key.rpartition("/")[2]: json.loads(value) for key, value in entries}

    def gather(
        self, folder: str, count: int, seconds: float = math.inf, cancelled: threading.Event | None = None
    ) -> tuple[dict[int, Any], list[int]]:
        """Wait for `folder/0` to `folder/count - 1`, one per process; return those that exist, and which are missing.

        None is missing unless `seconds` have passed or another thread has set `cancelled`.
        """
        end, pause, cancelled = time.monotonic() + seconds, 0.02, cancelled or threading.Event()
        while True:
            entries = {int(index): value for index, value in self.read(folder).items()}
            missing = [index for index in range(count) if index not in entries]
            if not missing or time.monotonic() > end or cancelled.wait(pause):
                return entries, missing
            pause = min(1.0, pause * 1.3)


def _call(request: Callable[[], T]) -> T:
    """Send a request to process 0, in a thread, because JAX would wait forever for a frozen process."""
    answer = _in_thread(request)
    # Counts polls instead of time: if this process was frozen itself, process 0 is not to blame.
    for _ in range(max(1, round(ANSWER_S / _POLL_S))):
        if futures.wait([answer], _POLL_S).done:
            try:
                return answer.result()
            except jax.errors.JaxRuntimeError as error:
                if "UNAVAILABLE" in str(error):
                    raise LostProcess("process 0, which coordinates all processes, has died", 0) from error
                raise
    text = f"process 0, which coordinates all processes, has not answered for {ANSWER_S:.0f} s"
    raise LostProcess(text, 0, frozen=True)


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread. (An executor's threads would delay the exit.)"""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="collective", daemon=True).start()
    return result


def coordinator_answers(seconds: float = 2.0) -> bool:
    """Return whether process 0 accepts connections during all of `seconds`: a dying process closes its sockets late."""
    host, _, port = str(distributed_state().coordinator_address).rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
                pass
        except OSError:
            return False
        if time.monotonic() >= end:
            return True
        time.sleep(0.1)


def process_names(indices: list[int]) -> str:
    return " and ".join(f"process {index}" for index in indices)


# --- collective calls: all processes make the same calls in the same order -------------------------------------------

_calls = 0  # number of collective calls so far
_waits = 0  # number of waits for other processes in progress
_cleanup: list[str] = []  # keys of this process's last outcomes
_GRACE_S = 1.0  # time for the work to end after it has failed in another process


def _next_call() -> str:
    global _calls  # noqa: PLW0603
    _calls += 1
    return str(_calls)


@contextlib.contextmanager
def waiting_for_peer() -> Iterator[None]:
    """Mark this process as waiting for another one, so that the watchdog does not blame it for a standstill."""
    global _waits  # noqa: PLW0603
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1


def is_waiting() -> bool:
    return _waits > 0


def from_leader(make: Callable[[], T]) -> T:
    """Call `make` in process 0 and return its (JSON) result in every process; a ConfigError is raised in all."""
    if jax.process_count() == 1:
        return make()
    board, key = Board("nash_mhc/leader"), _next_call()
    if jax.process_index():
        # Without a limit: preparing data may take hours, and runtime/watchdog.py notices if a process stands still.
        with waiting_for_peer():
            result = board.gather(key, 1)[0][0]
    else:
        try:
            result = {"value": make()}
        except ConfigError as error:
            result = {"error": str(error)}
        board.write(f"{key}/0", result)
    if "error" in result:
        raise ConfigError(result["error"])
    return result["value"]


def leader_first(make: Callable[[], T]) -> T:
    """Call `make` in process 0, then in the others, which find the files that it left on a shared disk."""
    results: list[T] = []
    from_leader(lambda: results.append(make()))
    return results[0] if results else make()


def any_process(mine: bool) -> bool:
    """Return whether `mine` is true in at least one process."""
    if jax.process_count() == 1:
        return mine
    board, call = Board("nash_mhc/any"), _next_call()
    board.write(f"{call}/{jax.process_index()}", mine)
    with waiting_for_peer():
        return any(board.gather(call, jax.process_count())[0].values())


def barrier() -> None:
    """Wait until every process has arrived here. (`from_leader` only waits for process 0.)"""
    any_process(False)  # False makes every process wait for all others


def run_collectively(work: Callable[[], T]) -> T:
    """Run `work` in all processes at once. An OSError or ConfigError in one is raised in all.

    Work that waits for a failed process is abandoned in its thread.
    """
    if jax.process_count() == 1:
        return work()
    board, call, me, count = Board("nash_mhc/together"), _next_call(), jax.process_index(), jax.process_count()
    mine = _in_thread(work)
    reported, pause = False, 0.02
    with contextlib.ExitStack() as waiting:
        while True:
            if not reported and mine.done():
                board.write(f"{call}/{me}", _outcome(mine.exception()))
                reported, pause = True, 0.02
                waiting.enter_context(waiting_for_peer())
            outcomes = board.read(call)
            if failed := {index: outcome for index, outcome in outcomes.items() if outcome is not None}:
                break
            if len(outcomes) == count:
                _delete_old_outcome(board, f"{call}/{me}")
                return mine.result()
            time.sleep(pause) if reported else futures.wait([mine], pause)
            pause = min(1.0, pause * 1.3)
    futures.wait([mine], _GRACE_S)
    if mine.done() and (error := mine.exception()) is not None and not isinstance(error, OSError):
        raise error
    index, (kind, number, text) = min(failed.items())
    if kind == "refused":
        raise ConfigError(text)
    raise OSError(number, f"process {index}: {text}")


def _outcome(error: BaseException | None) -> tuple[str, int, str] | None:
    """Return the facts about an error that the other processes need; None for success."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return "fault", error.errno or errno.EIO, error.strerror or str(error)[:300]
    return "refused" if isinstance(error, ConfigError) else "error", errno.EIO, str(error)[:300]


def _delete_old_outcome(board: Board, key: str) -> None:
    """Delete this process's outcome of two calls ago, which all processes have read: a run makes thousands of calls."""
    _cleanup.append(key)
    if len(_cleanup) > 2:
        board.delete(_cleanup.pop(0))


class Barrier:
    """A barrier that can be cancelled, for the threads of Orbax that write a checkpoint."""

    def __init__(self, name: str) -> None:
        self._board = Board(f"nash_mhc/barrier/{name}")
        self.cancelled = threading.Event()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        # Orbax enters the barrier in a `finally` even after a failure. The others would never arrive.
        if (fault := sys.exc_info()[1]) is not None:
            raise fault
        if jax.process_count() == 1:
            return
        self._board.write(f"{key}/{jax.process_index()}", True)
        _, missing = self._board.gather(key, jax.process_count(), timeout_ms / 1000, self.cancelled)
        if missing:
            raise TimeoutError(f"{process_names(missing)} did not reach {key} within {timeout_ms / 1000:.0f} s, or it failed")


# --- equal settings --------------------------------------------------------------------------------------------------

_SHOWN_CHARS, _SHOWN_DIFFERENCES = 60, 3


def check_settings_agree(settings: Mapping[str, Any], timeout: float = 60.0) -> None:
    """Raise ConfigError in every process if their settings differ, with names and values.

    Raise LostProcess if a process is missing. All processes call this in the same order; it uses no device.
    """
    state = distributed_state()
    if (count := state.num_processes or 1) == 1:
        return
    board, me = Board(f"nash_mhc/same/{_next_call()}"), state.process_id

    def gather(folder: str, count: int) -> dict[int, Any]:
        entries, missing = board.gather(folder, count, timeout)
        if missing:
            late = f"connected but did not send its settings within {timeout:.0f} s: dead or frozen"
            raise LostProcess(f"{process_names(missing)} {late}", *missing)
        return entries

    board.write(f"settings/{me}", {"--num-processes": count} | dict(settings))
    with waiting_for_peer():
        first = gather("settings", 1)[0]
        count = first["--num-processes"]  # may differ from this process's own
        everyone = gather("settings", count)
    for index, other in sorted(everyone.items()):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if not names:
            continue
        board.write(f"read/{me}", True)
        if me == 0:  # the store dies with process 0, so wait until the others have read it
            gather("read", count)
            time.sleep(1.0)
        differences = [
            f"{name} {_short(first.get(name))} in process 0, {_short(other.get(name))} in process {index}"
            for name in names[:_SHOWN_DIFFERENCES]
        ]
        more = f", and {len(names) - _SHOWN_DIFFERENCES} more" if len(names) > _SHOWN_DIFFERENCES else ""
        raise ConfigError(
            f"the processes of this run differ: {'; '.join(differences)}{more}; start all of them with the same "
            "flags, files and packages"
        )


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
