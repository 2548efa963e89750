"""A process that has lost another one names it."""

import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from nash_mhc.parallel import board
from nash_mhc.parallel.board import Board, coordinator_answers
from nash_mhc.runtime import watchdog
from nash_mhc.runtime.signals import TRY_AGAIN


class Notes(Board):
    """A board for one process."""

    def __init__(self, _name):
        self.notes = {}

    def write(self, key, note):
        self.notes[key] = note

    def read(self, folder):
        return {key.rpartition("/")[2]: note for key, note in self.notes.items() if key.startswith(f"{folder}/")}


@pytest.fixture
def left(monkeypatch):
    """An event that is set when the process exits, with its exit code."""
    gone = threading.Event()

    def leave(code=TRY_AGAIN):
        gone.code = code
        gone.set()
        raise SystemExit(code)

    monkeypatch.setattr(watchdog, "Board", Notes)
    monkeypatch.setattr(watchdog, "exit_now", leave)
    monkeypatch.setattr(watchdog.Watch, "_catch_aborts", lambda _: None)
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # SystemExit there ends the thread, as `leave` the process
    return gone


def test_a_process_without_heartbeat_is_named_when_a_collective_fails(left, capsys):
    watching = watchdog.Watch(stall_timeout=0.5)
    with pytest.raises(SystemExit), watching:
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED")
    watching._ended.set()  # its thread would have ended with the process
    watching._thread.join()
    assert left.code == TRY_AGAIN
    assert "error: process 1 connected but never sent a heartbeat" in capsys.readouterr().err


def test_a_process_without_heartbeat_times_out(left, capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "BEGIN_S", 0.3)
    with watchdog.Watch(stall_timeout=0.5):
        assert left.wait(60)
    assert left.code == TRY_AGAIN
    assert "process 1 connected but never sent a heartbeat" in capsys.readouterr().err


def test_an_own_error_is_raised_if_no_process_is_missing(left, monkeypatch):
    monkeypatch.setattr(watchdog, "SILENCE_S", 60.0)
    monkeypatch.setattr(watchdog.Watch, "_wait_for_verdict", lambda _: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"), watchdog.Watch(stall_timeout=0.5) as watched:
        watched._board.write("life/1", watched._beat() | {"name": "process 1"})
        while not watched._others.looked:  # until it has looked who is there
            time.sleep(0.01)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert not left.is_set()


def test_an_aborted_process_names_the_lost_one(left, capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "coordinator_answers", lambda: True)
    with watchdog.Watch(stall_timeout=0.5) as watching:
        watching._board.write("life/1", {"name": "process 1", "phase": "step 7", "moves": 3, "at": 0.0, "ended": False})
        watching._aborted()
        assert left.is_set()
    assert left.code == TRY_AGAIN
    assert "process 1 is dead or frozen" in capsys.readouterr().err


@pytest.mark.parametrize("dies", [True, False])
def test_a_coordinator_that_dies_during_the_check_is_lost(dies, monkeypatch):
    """The kernel closes a dead process's sockets one by one, and the listening one may be the last."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        monkeypatch.setattr(board, "distributed_state", lambda: SimpleNamespace(coordinator_address=address))
        asked = threading.Event()

        def die():
            server.accept()[0].close()
            asked.set()
            server.close()

        dying = threading.Thread(target=die)
        if dies:
            dying.start()
        began = time.monotonic()
        assert coordinator_answers(seconds=60.0 if dies else 0.3) is not dies
        assert asked.is_set() is dies
        assert time.monotonic() - began < 60.0
        if dies:
            dying.join()
