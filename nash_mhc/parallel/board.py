"""Notes that the processes of a run leave each other, and what is built on them: who decides, who waits for whom."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.jax import distributed_state

T = TypeVar("T")
ANSWER_S = 20.0  # process 0 holds the notes; without an answer for this long, it is taken for dead or frozen
_LOOK_S = 1.0


class LostProcess(jax.errors.JaxRuntimeError):
    """Another process of the run is gone, frozen, or does not come to where this one is_waiting for it."""

    def __init__(self, verdict: str, *missing: int, frozen: bool = False) -> None:
        super().__init__(verdict)
        self.missing, self.frozen = missing, frozen  # frozen: process 0 gave no answer at all


class Board:
    """Notes that every process can write and read, in the coordinator's memory: for the rare word, never for a step.

    Every call ends within ANSWER_S of what it asks for: LostProcess where process 0 does not answer or is gone.
    """

    def __init__(self, name: str) -> None:
        self._client = distributed_state().client
        self._name = name

    def write(self, key: str, note: Any) -> None:
        _answered(lambda: self._client.key_value_set(f"{self._name}/{key}", json.dumps(note), allow_overwrite=True))

    def delete(self, key: str) -> None:
        _answered(lambda: self._client.key_value_delete(f"{self._name}/{key}"))

    def read(self, folder: str) -> dict[str, Any]:
        """All notes under `folder/`, by the rest of their keys."""
        found = _answered(lambda: self._client.key_value_dir_get(f"{self._name}/{folder}/"))
        return {key.rpartition("/")[2]: json.loads(note) for key, note in found}

    def wait(self, key: str, seconds: float) -> Any:
        """The note under `key`, as soon as it is there; TimeoutError."""
        get = self._client.blocking_key_value_get
        try:
            return json.loads(_answered(lambda: get(f"{self._name}/{key}", int(seconds * 1000)), seconds + ANSWER_S))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from None
            raise


def _answered(ask: Callable[[], T], seconds: float = ANSWER_S) -> T:
    """What process 0 answers. In a thread of its own: a frozen one would be waited for without end."""
    answer, done = _in_thread(ask)
    # Counted in looks, not by the clock: where this process was frozen itself, nobody has failed to answer.
    for _ in range(max(1, round(seconds / _LOOK_S))):
        if done.wait(_LOOK_S):
            try:
                return answer.result()
            except jax.errors.JaxRuntimeError as error:
                if "UNAVAILABLE" in str(error):
                    raise LostProcess("process 0, which holds the notes of all processes, is gone", 0) from error
                raise
    text = f"process 0, which holds the notes of all processes, has given no answer for {seconds:.0f} s"
    raise LostProcess(text, 0, frozen=True)


def coordinator_answers(seconds: float = 2.0) -> bool:
    """Whether process 0 is still there, and there all the time: one that dies loses its sockets one after another."""
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


_calls = 0  # of what follows: the same in all processes, which call it in the same order


def _next_call() -> str:
    global _calls  # noqa: PLW0603
    _calls += 1
    return str(_calls)


def from_leader(make: Callable[[], T]) -> T:
    """What process 0 makes, in every process; a ConfigError there is one everywhere. For plain values.

    All processes call it, in the same order.
    """
    if jax.process_count() == 1:
        return make()
    board, key = Board("nash_mhc/leader"), _next_call()
    if jax.process_index():
        note = _patiently(board, key)
    else:
        try:
            note = {"made": make()}
        except ConfigError as error:
            note = {"refused": str(error)}
        board.write(key, note)
    if "refused" in note:
        raise ConfigError(note["refused"])
    return note["made"]


def leader_first(make: Callable[[], T]) -> T:
    """`make()` in every process, but in process 0 before all others: what it leaves on a shared disk, they find."""
    made: list[T] = []
    from_leader(lambda: made.append(make()))
    return made[0] if made else make()


def any_process(mine: bool) -> bool:
    """Whether `mine` is true in at least one process. Called by all, in the same order as everything here."""
    if jax.process_count() == 1:
        return mine
    board, call = Board("nash_mhc/any"), _next_call()
    board.write(f"{call}/{jax.process_index()}", mine)
    return any(_patiently(board, f"{call}/{index}") for index in range(jax.process_count()))


def barrier() -> None:
    """Until every process has come this far. (That `from_leader` returns says nothing of those who follow.)"""
    any_process(False)  # nobody says yes, so that all are asked


_waits = 0


@contextlib.contextmanager
def waiting_for_peer() -> Iterator[None]:
    """Inside, this process is_waiting for another one: whoever looks for the one that holds up all passes it over."""
    global _waits  # noqa: PLW0603
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1


def is_waiting() -> bool:
    return _waits > 0


def _patiently(board: Board, key: str) -> Any:
    with waiting_for_peer():
        while True:  # preparing data may take hours; runtime/watchdog.py finds out who stands still meanwhile
            with contextlib.suppress(TimeoutError):
                return board.wait(key, 60)


_MERCY_S = 1.0  # for work that may end by itself, once it has failed elsewhere


def run_collectively(work: Callable[[], T]) -> T:
    """Run `work()` in all processes at once. What fails in one fails in all, with its OSError or ConfigError.

    Work that is_waiting for the process that failed is abandoned in its thread.
    """
    if jax.process_count() == 1:
        return work()
    board, call, me, count = Board("nash_mhc/run_collectively"), _next_call(), jax.process_index(), jax.process_count()
    mine, done = _in_thread(work)
    said, look = False, 0.02
    with contextlib.ExitStack() as held:
        while True:
            if not said and done.is_set():
                board.write(f"{call}/{me}", _outcome(mine.exception()))
                said, look = True, 0.02
                held.enter_context(waiting_for_peer())
            notes = board.read(call)
            if failed := {index: note for index, note in notes.items() if note is not None}:
                break
            if len(notes) == count:
                _forget(board, call, me)
                return mine.result()
            time.sleep(look) if said else done.wait(look)
            look = min(1.0, look * 1.3)
    done.wait(_MERCY_S)
    if done.is_set() and (error := mine.exception()) is not None and not isinstance(error, OSError):
        raise error
    index, (kind, number, text) = min(failed.items())
    if kind == "refused":
        raise ConfigError(text)
    raise OSError(number, f"process {index}: {text}")


def _in_thread(work: Callable[[], T]) -> tuple[Future[T], threading.Event]:
    result: Future[T] = Future()
    done = threading.Event()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        done.set()

    threading.Thread(target=run, name="together", daemon=True).start()
    return result, done


def _outcome(error: BaseException | None) -> tuple[str, int, str] | None:
    """What the other processes are to know of it: nothing, where it went well."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return "fault", error.errno or errno.EIO, error.strerror or str(error)[:300]
    return "refused" if isinstance(error, ConfigError) else "error", errno.EIO, str(error)[:300]


def _forget(board: Board, call: str, me: int) -> None:
    """The note of two calls before, which all have read. There may be thousands of calls in a run."""
    _said.append(f"{call}/{me}")
    if len(_said) > 2:
        board.delete(_said.pop(0))


_said: list[str] = []


def process_names(indices: list[int]) -> str:
    return " and ".join(f"process {index}" for index in indices)


class Barrier:
    """A barrier for all processes that can be given up, as Orbax takes one for the threads that write a checkpoint."""

    def __init__(self, name: str) -> None:
        self._board, self._met = Board(f"nash_mhc/meeting/{name}"), dict[str, int]()
        self.cancelled = threading.Event()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        # Orbax meets the others even after a failure, in a `finally`. They would never come: they wait somewhere else.
        if (fault := sys.exc_info()[1]) is not None:
            raise fault
        use = self._met[key] = self._met.get(key, 0) + 1
        me, count = jax.process_index(), jax.process_count()
        self._board.write(f"{key}/{use}/{me}", True)
        look, end = 0.02, time.monotonic() + timeout_ms / 1000
        while len(there := self._board.read(f"{key}/{use}")) < count:
            if self.cancelled.wait(look):
                raise TimeoutError(f"given up: {key}")
            if time.monotonic() > end:
                missing = [index for index in range(count) if str(index) not in there]
                raise TimeoutError(f"{process_names(missing)} did not come to {key} within {timeout_ms / 1000:.0f} s")
            look = min(1.0, look * 1.5)
        if use > 2:
            self._board.delete(f"{key}/{use - 2}/{me}")
