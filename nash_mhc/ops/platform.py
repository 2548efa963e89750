"""Which form of an operation a program gets: that of the platform which it is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def is_gpu() -> bool:
    """Whether what is traced now is for a GPU: of the mesh, or else of the process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" if device is None else device.platform not in ("cpu", "tpu")


def on_platform(*operands: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    """`forms` by the names of platforms, `default` for all others.

    Under a mesh the platform is known while a program is traced, and only its form is; JAX would trace all of them and
    drop the others, which was a tenth of the time. Without a mesh, JAX decides where the program is lowered.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("cpu", "tpu"):  # a GPU calls itself by one name and its forms by another
        return forms.get(device.platform, default)(*operands)
    return lax.platform_dependent(*operands, default=default, **forms)
