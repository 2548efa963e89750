"""Choose the form of an operation for the platform that a program is compiled for, and run GPU kernels."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

Compare = Callable[[str, Callable[..., Any], tuple[Any, ...], Any], None]  # (name, plain form, operands, kernel's result)
_COMPARE: contextvars.ContextVar[Compare | None] = contextvars.ContextVar("compare", default=None)
_ANY_ORDER: contextvars.ContextVar[bool] = contextvars.ContextVar("any_order", default=False)


def is_gpu() -> bool:
    """Return whether the current trace is for a GPU: that of the mesh, or else the default backend."""
    if _COMPARE.get() is not None:
        return True
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" if device is None else device.platform not in ("cpu", "tpu")


def on_platform(*operands: Any, default: Callable[..., Any], cuda: Callable[..., Any], fits: bool = True) -> Any:
    """Call `cuda` on an NVIDIA GPU if the operands fit its kernel, else `default`.

    Under a mesh the platform is known at trace time, so only its form is traced. (`lax.platform_dependent` traces both,
    a tenth of the tracing time.) Without a mesh, JAX decides at lowering.
    """
    if not fits:
        return default(*operands)
    if (compare := _COMPARE.get()) is not None:
        return _run_compared(compare, operands, default, cuda)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("cpu", "tpu"):
        return default(*operands)
    return lax.platform_dependent(*operands, default=default, cuda=cuda)


def run_kernel(
    name: str,
    kernel: Callable[..., None],
    args: Sequence[Array],
    outs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int = 1,
    **options: Any,
) -> list[Array]:
    """Run a Pallas kernel through Triton. `outs` are shapes and dtypes; `options` are those of `pallas_call`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    shapes = [jax.ShapeDtypeStruct(*out) for out in outs]
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    run = pl.pallas_call(kernel, out_shape=shapes, grid=grid, compiler_params=params, name=name, **options)
    return list(run(*args))


@contextlib.contextmanager
def comparing_kernels(compare: Compare) -> Iterator[None]:
    """Trace the GPU kernels, in Pallas's interpreter if there is no GPU, and pass each one's result to `compare`."""
    token = _COMPARE.set(compare)
    try:
        yield
    finally:
        _COMPARE.reset(token)


def _run_compared(compare: Compare, operands: tuple[Any, ...], plain: Callable[..., Any], form: Callable[..., Any]) -> Any:
    inner, outer = (f.func if isinstance(f, functools.partial) else f for f in (form, plain))
    interpreted = jax.default_backend() != "gpu" and "interpret" in inspect.signature(inner).parameters
    got = form(*operands, interpret=True) if interpreted else form(*operands)
    name = inner.__name__.removeprefix("_").removesuffix("_in_kernel").removesuffix("_by_kernel")
    compare(f"{outer.__module__.rpartition('.')[2]}.{name}", plain, operands, got)
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
