"""Orbax, and TensorStore below it: how arrays are written, and what both log although they raise it as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

SEEN = ("0.12.8",)  # of orbax-checkpoint


def write_replicas_in_parts(least: int | None) -> None:
    """Have each device that holds the same values write a part of at least so many bytes; None: one writes them all.

    Each part is cut out by a program of its own, compiled while the first save waits: useless for one process and for
    small parts. The handler of jax.Array is Orbax's for the whole process. Without it, Orbax splits as it does.
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
    """Drop log records and messages about failures that are raised as well. Without the loggers, nothing is dropped."""

    def is_new(record: logging.LogRecord) -> bool:
        """They log a fault with its traceback, some in each thread that it passes, and raise it."""
        return not (record.levelno == logging.ERROR and record.exc_info and is_fault(record.exc_info[1]))

    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # warns about a missing account; the failure is raised
    for name in ("absl", "asyncio", "gcsfs", "fsspec.prefetcher"):
        logging.getLogger(name).addFilter(is_new)
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        """TensorStore reports the other parts of a save, for which nothing waits once one of them has failed."""
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs all that goes wrong in its threads, and raises what matters. absl's logger does not know the caller if
    it was made before absl could make one of its own kind, so the stack is asked."""
    frame = sys._getframe()
    for _ in range(16):
        if frame is None or frame.f_globals.get("__name__", "").startswith("orbax."):
            return frame is None
        frame = frame.f_back  # type: ignore[assignment]
    return True
