"""SIGTERM, SIGINT, SIGHUP: leave at once where nothing would be lost, else between two steps, with everything saved.

Only the standard library: `python -m nash_mhc.train` listens before its slow imports begin.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

TRY_AGAIN = 75  # EX_TEMPFAIL: nothing is wrong, start the same command again; schedulers can requeue on it
# A request to stop may come twice at once: timeout(1) signals its child and then the group that the child is in, and
# launchers pass on what a terminal has sent to all of them. Nobody who has become impatient is as quick.
_ECHO_S = 0.3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop has stopped; `step` is saved in `folder`."""

    def __init__(self, step: int, folder: str) -> None:
        super().__init__(f"step {step} is saved in {folder}")
        self.step, self.folder = step, folder


def exit_now(code: int = TRY_AGAIN) -> None:
    """Ends the process here and now, whatever its threads are in the middle of; what is on disk stays as it is."""
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for child in processes.active_children():
            child.kill()
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a progress bar hides the cursor
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class Signals:
    """Whether this process has been asked to stop, and by what."""

    def __init__(self) -> None:
        self.caught: str | None = None  # the first one's name
        self.before_leaving: Callable[[str], None] = lambda _: None  # called when there is nothing to wait for
        self._caught_at = 0.0
        self._work = False  # whether there is something to save
        self.listening = False  # from the process's start to its end
        self._started = time.time()  # this is among the first modules of a process that trains
        self._runs = 0
        self.ending: int | None = None  # the exit code of a command that has done its work and is on its way out

    def listen(self) -> None:
        """For a process that is a training run from its start to its end.

        A handler in Python waits until the main thread comes back from C++, out of a compilation for instance. The
        bytes that the interpreter's own handler writes are read by a thread that does not wait for it.
        """
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in self._wanted():
            signal.signal(number, lambda *_: None)
        self.listening, self._sockets = True, (ours, theirs)
        threading.Thread(target=self._read, args=(ours,), name="signals", daemon=True).start()

    def process_start_time(self) -> float | None:
        """When the process began, for its first run where it is there for that run alone; None for any other."""
        self._runs += 1
        return self._started if self.listening and self._runs == 1 else None

    @staticmethod
    def _wanted() -> list[signal.Signals]:
        return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup

    def _read(self, source: socket.socket) -> None:
        while received := source.recv(1):
            if received[0] in _SIGNALS:
                name = signal.Signals(received[0]).name
                if not self._work:
                    self._say(f"{name}: nothing is lost; start the same command again")
                    self.before_leaving(name)
                    exit_now()
                if self.caught is not None:
                    if time.monotonic() - self._caught_at < _ECHO_S:
                        continue
                    self._say(f"{name} again: leaving at once; the last whole checkpoint is where the next start goes on from")
                    exit_now()
                self._catch(name)

    def _catch(self, name: str) -> None:
        self.caught, self._caught_at = name, time.monotonic()
        self._say(f"{name}: the last finished step is saved, then the run ends; a second signal ends it at once")

    @staticmethod
    def _say(text: str) -> None:
        # In one piece: `print` writes the end of the line by itself, and this thread is not the only one that writes.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def interrupt(self) -> None:
        """From another thread: the run's own is to give up, in the way of Ctrl-C."""
        self.caught = self.caught or "an interrupt"
        _thread.interrupt_main()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, what has been computed is worth saving: a signal is remembered, for the one who asks for `caught`.

        In a notebook or a script, which did not ask to `listen`,
        signals mean what they always do before and after this.
        """
        in_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in self._wanted()} if in_main and not self.listening else {}

        def handle(number: int, _: FrameType | None) -> None:
            if self.caught is not None:
                raise KeyboardInterrupt
            self._catch(signal.Signals(number).name)

        for number in before:
            signal.signal(number, handle)
        self._work, self.caught = True, None
        try:
            yield
        finally:
            self._work = False
            for number, handler in before.items():
                signal.signal(number, handler)


SIGNALS = Signals()
