"""Orbax and TensorStore: how replicated arrays are written, and their duplicate logging of errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

SEEN = ("0.12.8",)  # of orbax-checkpoint


def write_replicas_in_parts(least: int | None) -> None:
    """Make each replica of an array write a slice of at least `least` bytes; None: one replica writes all of it.

    Slicing compiles a program per array while the first save waits, so it does not pay for one process or for small
    slices. Applies to all of Orbax in this process. Without the handler, Orbax's default applies.
    """
    import jax
    import orbax.checkpoint as ocp

    try:
        handler = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=least is not None, min_slice_bytes_for_replica_parallel=least
        )
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    except (AttributeError, TypeError):
        return


def log_failures_once(is_fault: Callable[[BaseException | None], bool]) -> None:
    """Drop log records about failures that are also raised. Without the loggers, this does nothing."""

    def is_new(record: logging.LogRecord) -> bool:
        """Drop a failure that is logged with its traceback, possibly by several threads, before it is raised."""
        return not (record.levelno == logging.ERROR and record.exc_info and is_fault(record.exc_info[1]))

    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # its warning about missing credentials precedes an error
    for name in ("absl", "asyncio", "gcsfs", "fsspec.prefetcher"):
        logging.getLogger(name).addFilter(is_new)
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        """Drop TensorStore's reports about the other writes of a failed save."""
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether a record comes from outside Orbax, which also raises what it logs.

    Looks at the stack, because a logger created before absl was imported does not know its caller.
    """
    frame = sys._getframe()
    for _ in range(16):
        if frame is None or frame.f_globals.get("__name__", "").startswith("orbax."):
            return frame is None
        frame = frame.f_back  # type: ignore[assignment]
    return True
