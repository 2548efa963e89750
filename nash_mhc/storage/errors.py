"""Storage failures as OSErrors: Orbax, TensorStore and object stores each raise their own types."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.orbax import log_failures_once

# Failures of communication between processes. They may surface in the middle of a restore.
_PEER_FAILURE = re.compile(r"[A-Z_]+: (Gloo \w+ failed|.*NCCL operation |.*[Cc]oordination service)")
# Libraries of object stores. Some of their errors are not OSErrors.
_OBJECT_STORE_LIBRARIES = ("gcsfs", "google", "aiohttp", "fsspec", "requests")


def _to_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError behind an error; None for bugs, device out-of-memory and other non-storage errors."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    if code := re.search(r"os_error_code='(\d+)'", text):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    # TensorStore raises ValueErrors that start with a status code (UNAVAILABLE: ...). XLA's errors start with one, too.
    is_tensorstore = re.match(r"[A-Z]+(_[A-Z]+)*: ", text) and type(error).__name__ != "JaxRuntimeError"
    if is_tensorstore or type(error).__module__.partition(".")[0] in _OBJECT_STORE_LIBRARIES:
        return OSError(text[:160])
    return None


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise storage failures as OSError, and a lost peer as JaxRuntimeError (runtime/watchdog.py finds out which)."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "JaxRuntimeError" and _PEER_FAILURE.match(str(error)):
            import jax  # deferred: listing checkpoints must be fast

            raise jax.errors.JaxRuntimeError(str(error)) from error
        if (fault := _to_os_error(error)) is None:
            raise
        raise fault from None


@contextlib.contextmanager
def as_config_error(place: object) -> Iterator[None]:
    """Raise a storage failure as a one-line ConfigError that names `place`."""
    try:
        with as_os_errors():
            yield
    except OSError as error:
        raise ConfigError(f"{place}: cannot be reached ({reason(error)})") from error


def reason(fault: OSError) -> str:
    """Return the cause of an error on one line."""
    return fault.strerror or " ".join(str(fault).split()) or type(fault).__name__


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


log_failures_once(lambda error: _to_os_error(error) is not None)
