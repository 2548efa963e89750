"""Choose the form of an operation for the platform that a program is compiled for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

Compare = Callable[[str, Callable[..., Any], tuple[Any, ...], Any], None]  # (name, plain form, operands, kernel's result)
_COMPARE: contextvars.ContextVar[Compare | None] = contextvars.ContextVar("compare", default=None)
_ANY_ORDER: contextvars.ContextVar[bool] = contextvars.ContextVar("any_order", default=False)


def is_gpu() -> bool:
    """Return whether the current trace is for a GPU: that of the mesh, or else the default backend."""
    if _COMPARE.get() is not None:
        return True
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" if device is None else device.platform not in ("cpu", "tpu")


def on_platform(*operands: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    """Call the form for this platform: one of `forms`, by platform name, or `default`.

    Under a mesh the platform is known at trace time, so only its form is traced. (`lax.platform_dependent` traces all
    of them, a tenth of the tracing time.) Without a mesh, JAX decides at lowering.
    """
    if (compare := _COMPARE.get()) is not None and "cuda" in forms:
        return _run_compared(compare, operands, default, forms["cuda"])
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("cpu", "tpu"):  # a GPU's device platform is "gpu", its forms are "cuda"
        return forms.get(device.platform, default)(*operands)
    return lax.platform_dependent(*operands, default=default, **forms)


@contextlib.contextmanager
def comparing_kernels(compare: Compare) -> Iterator[None]:
    """Trace the GPU kernels, in Pallas's interpreter if there is no GPU, and pass each one's result to `compare`."""
    token = _COMPARE.set(compare)
    try:
        yield
    finally:
        _COMPARE.reset(token)


def _run_compared(compare: Compare, operands: tuple[Any, ...], plain: Callable[..., Any], form: Callable[..., Any]) -> Any:
    inner = form.func if isinstance(form, functools.partial) else form
    interpreted = jax.default_backend() != "gpu" and "interpret" in inspect.signature(inner).parameters
    got = form(*operands, interpret=True) if interpreted else form(*operands)
    name = inner.__name__.removeprefix("_").removesuffix("_in_kernel").removesuffix("_by_kernel")
    compare(f"{inner.__module__.rpartition('.')[2]}.{name}", plain, operands, got)
    return got


@contextlib.contextmanager
def in_any_order(yes: bool) -> Iterator[None]:
    """Allow programs traced inside to sum in any order, so results may differ between runs."""
    before = _ANY_ORDER.set(yes)
    try:
        yield
    finally:
        _ANY_ORDER.reset(before)


def sums_in_any_order() -> bool:
    return _ANY_ORDER.get()
