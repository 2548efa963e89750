"""Named intermediates of a layer: what health, penalties, layer distillation and `inside` read.

A layer calls `capture("name", lambda: value)` where it has the value at hand. Nothing is computed or kept unless the
forward pass records that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class _Recorder:
    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.values: dict[str, Any] = {}


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a dict that receives the captures of these names. The traced code inside must return it."""
    recorder = _Recorder(names)
    token = _recorder.set(recorder)
    try:
        yield recorder.values
    finally:
        _recorder.reset(token)


def capture(name: str, value: Callable[[], Any]) -> None:
    """Record value() under this name, if the forward pass asks for it."""
    recorder = _recorder.get()
    if recorder is not None and name in recorder.names:
        recorder.values[name] = value()
