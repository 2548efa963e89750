"""Failures of storage as OSErrors: Orbax, TensorStore and object stores each raise their own."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.orbax import log_failures_once

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
def as_config_error(place: object) -> Iterator[None]:
    """For whoever only wants to look: a place that cannot be reached is a ConfigError."""
    try:
        with as_os_errors():
            yield
    except OSError as error:
        raise ConfigError(f"{place}: cannot be reached ({reason(error)})") from error


def reason(fault: OSError) -> str:
    """In a few words, on one line."""
    return fault.strerror or " ".join(str(fault).split()) or type(fault).__name__


log_failures_once(lambda error: _as_os_error(error) is not None)
