"""Which form of an operation a program gets: that of the platform which it is compiled for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

Seen = Callable[[str, Callable[..., Any], tuple[Any, ...], Any], None]
_SEEN: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("seen", default=None)
_ANY_ORDER: contextvars.ContextVar[bool] = contextvars.ContextVar("any_order", default=False)


def is_gpu() -> bool:
    """Whether what is traced now is for a GPU: of the mesh, or else of the process."""
    if _SEEN.get() is not None:
        return True
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" if device is None else device.platform not in ("cpu", "tpu")


def on_platform(*operands: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    """`forms` by the names of platforms, `default` for all others.

    Under a mesh the platform is known while a program is traced, and only its form is; JAX would trace all of them and
    drop the others, which was a tenth of the time. Without a mesh, JAX decides where the program is lowered.
    """
    if (seen := _SEEN.get()) is not None and "cuda" in forms:
        return _compared(seen, operands, default, forms["cuda"])
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("cpu", "tpu"):  # a GPU calls itself by one name and its forms by another
        return forms.get(device.platform, default)(*operands)
    return lax.platform_dependent(*operands, default=default, **forms)


@contextlib.contextmanager
def compared(seen: Seen) -> Iterator[None]:
    """What is traced meanwhile takes the GPU's forms, in Pallas's interpreter where there is no GPU. Of each, `seen`
    gets its name, the plain form as a function, the operands, and what it came to."""
    before = _SEEN.set(seen)
    try:
        yield
    finally:
        _SEEN.reset(before)


def _compared(seen: Seen, operands: tuple[Any, ...], plain: Callable[..., Any], form: Callable[..., Any]) -> Any:
    inner = form.func if isinstance(form, functools.partial) else form
    interpreted = jax.default_backend() != "gpu" and "interpret" in inspect.signature(inner).parameters
    got = form(*operands, interpret=True) if interpreted else form(*operands)
    name = inner.__name__.removeprefix("_").removesuffix("_in_kernel").removesuffix("_by_kernel")
    seen(f"{inner.__module__.rpartition('.')[2]}.{name}", plain, operands, got)
    return got


@contextlib.contextmanager
def in_any_order(yes: bool) -> Iterator[None]:
    """Let programs traced inside add up in any order: they need not give the same bits in every run."""
    before = _ANY_ORDER.set(yes)
    try:
        yield
    finally:
        _ANY_ORDER.reset(before)


def sums_in_any_order() -> bool:
    return _ANY_ORDER.get()
