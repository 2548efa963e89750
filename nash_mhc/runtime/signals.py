"""SIGTERM, SIGINT, SIGHUP: exit immediately if nothing would be lost, else after the current step is saved.

Needs only the standard library: `python -m nash_mhc.train` listens before its slow imports start.
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

TRY_AGAIN = 75  # EX_TEMPFAIL: run the same command again; schedulers can requeue on it
# One request may arrive as two signals: timeout(1) signals its child and then the process group, and launchers forward
# the terminal's signals to every process. A second signal within this time is ignored.
_ECHO_S = 0.3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Raised by a run that was asked to stop, after saving `step` in `folder`."""

    def __init__(self, step: int, folder: str) -> None:
        super().__init__(f"step {step} is saved in {folder}")
        self.step, self.folder = step, folder


def exit_now(code: int = TRY_AGAIN) -> None:
    """End the process immediately without waiting for its threads."""
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for child in processes.active_children():
            child.kill()
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # show the cursor, which a progress bar hides
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class Signals:
    """Records requests to stop this process."""

    def __init__(self) -> None:
        self.caught: str | None = None  # name of the first signal
        self.before_leaving: Callable[[str], None] = lambda _: None  # called before an immediate exit
        self._caught_at = 0.0
        self._has_work = False  # whether there is something to save
        self.listening = False  # whether `listen` was called
        self._start_time = time.time()  # this module is imported early
        self._runs = 0
        self.ending: int | None = None  # exit code of a command that has finished its work

    def listen(self) -> None:
        """Handle signals in a thread, for a process that is nothing but a training run.

        A Python handler would wait until the main thread returns from C++, such as from a compilation. The thread
        reads the bytes that the interpreter's C handler writes to the wakeup descriptor.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in self._handled():
            signal.signal(number, lambda *_: None)
        self.listening, self._sockets = True, (reader, writer)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()

    def process_start_time(self) -> float | None:
        """Return when the process started, if it has only this run; None otherwise."""
        self._runs += 1
        return self._start_time if self.listening and self._runs == 1 else None

    @staticmethod
    def _handled() -> list[signal.Signals]:
        return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # respects nohup

    def _read(self, source: socket.socket) -> None:
        while received := source.recv(1):
            if received[0] in _SIGNALS:
                name = signal.Signals(received[0]).name
                if not self._has_work:
                    self._print(f"{name}: nothing is lost; start the same command again")
                    self.before_leaving(name)
                    exit_now()
                if self.caught is not None:
                    if time.monotonic() - self._caught_at < _ECHO_S:
                        continue
                    self._print(f"{name} again: exiting now; the next start resumes from the latest complete checkpoint")
                    exit_now()
                self._catch(name)

    def _catch(self, name: str) -> None:
        self.caught, self._caught_at = name, time.monotonic()
        self._print(f"{name}: saving the last finished step, then stopping; a second signal exits immediately")

    @staticmethod
    def _print(text: str) -> None:
        # A single write, because `print` writes the newline separately and other threads print as well.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def interrupt(self) -> None:
        """Interrupt the main thread from another one, like Ctrl-C."""
        self.caught = self.caught or "an interrupt"
        _thread.interrupt_main()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, there is something to save: signals are only recorded in `caught`.

        In a notebook or script, which does not call `listen`, the previous handlers are restored afterwards.
        """
        in_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in self._handled()} if in_main and not self.listening else {}

        def handle(number: int, _: FrameType | None) -> None:
            if self.caught is not None:
                raise KeyboardInterrupt
            self._catch(signal.Signals(number).name)

        for number in before:
            signal.signal(number, handle)
        self._has_work, self.caught = True, None
        try:
            yield
        finally:
            self._has_work = False
            for number, handler in before.items():
                signal.signal(number, handler)


SIGNALS = Signals()
