"""What goes wrong with storage, as one kind of error and without the noise:
Orbax and TensorStore each have their own."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator

from nash_mhc.config.schema import ConfigError

# What processes say of each other, and not of the storage, although they may meet in the middle of a restore.
_OF_OTHER_PROCESSES = re.compile(r"[A-Z_]+: (Gloo \w+ failed|.*NCCL operation |.*[Cc]oordination service)")

# Not all of what these raise is an OSError.
_OF_OBJECT_STORES = ("gcsfs", "google", "aiohttp", "fsspec", "requests")


def _as_os_error(error: BaseException | None) -> OSError | None:
    """None for what is no fault of the storage: a mistake of ours, a device that ran out of memory."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    if code := re.search(r"os_error_code='(\d+)'", text):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    # TensorStore raises ValueErrors that begin with the name of a status (UNAVAILABLE:
    # ...), and so does XLA its own errors.
    of_tensorstore = re.match(r"[A-Z]+(_[A-Z]+)*: ", text) and type(error).__name__ != "JaxRuntimeError"
    if of_tensorstore or type(error).__module__.partition(".")[0] in _OF_OBJECT_STORES:
        return OSError(text[:160])
    return None


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """A lost peer, in whatever form Orbax hands it on, is JAX's error: runtime/watchdog.py finds out who it was."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "JaxRuntimeError" and _OF_OTHER_PROCESSES.match(str(error)):
            import jax  # listing checkpoints must not wait for it

            raise jax.errors.JaxRuntimeError(str(error)) from error
        if (fault := _as_os_error(error)) is None:
            raise
        raise fault from None


@contextlib.contextmanager
def one_line(place: object) -> Iterator[None]:
    """For whoever only wants to look: a place that cannot be reached is a ConfigError."""
    try:
        with as_os_errors():
            yield
    except OSError as error:
        raise ConfigError(f"{place}: cannot be reached ({reason(error)})") from error


def reason(fault: OSError) -> str:
    """In a few words, on one line."""
    return fault.strerror or " ".join(str(fault).split()) or type(fault).__name__


def _not_told_twice(record: logging.LogRecord) -> bool:
    """They log a fault with its traceback, some in each thread that it passes, and raise it as well:
    one line tells it."""
    return not (record.levelno == logging.ERROR and record.exc_info and _as_os_error(record.exc_info[1]))


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """It logs whatever goes wrong in its threads, and of a folder that is gone says the strangest things; what matters
    of it is raised. By who is calling: this logger may not know (it was made before absl could make one of its own
    kind)."""
    frame = sys._getframe()
    for _ in range(16):
        if frame is None or frame.f_globals.get("__name__", "").startswith("orbax."):
            return frame is None
        frame = frame.f_back  # type: ignore[assignment]
    return True


logging.getLogger("absl").addFilter(_not_of_orbax)
logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns of what it does about a missing account; the failure is raised
for _name in ("absl", "asyncio", "gcsfs", "fsspec.prefetcher"):
    logging.getLogger(_name).addFilter(_not_told_twice)

_other_hook = sys.unraisablehook


def _hook(unraisable: sys.UnraisableHookArgs) -> None:
    """TensorStore prints that nobody waits for the other parts of a save any more, once one of them has failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        _other_hook(unraisable)


sys.unraisablehook = _hook
