"""Sums and matrix products, accumulated in float32 or wider."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which values of `dtype` are accumulated."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Array) -> Array:
    return x.astype(wide_dtype(x.dtype))


def add_up(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def product(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Contract one axis of each of two matrices, as inside a GPU kernel."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=wide_dtype(a.dtype))


@jax.custom_vjp
def project(x_BTD: Float[Array, "*B D"], w_DX: Float[Array, "D *X"]) -> Float[Array, "..."]:
    """Contract the last axis of x with the first of w.

    The gradient of w is a product over all tokens, for which a CPU transposes the left operand. Autodiff puts the
    cotangent there and fuses its computation (such as a silu) into the strided reads, once per weight. Here x is on
    the left, which all weights of a sub-layer share. On other platforms both cost the same.
    """
    return jnp.tensordot(x_BTD, w_DX, axes=1)


def _project_fwd(x_BTD, w_DX):  # type: ignore[no-untyped-def]
    return project(x_BTD, w_DX), (x_BTD, w_DX)


def _project_bwd(saved, dy):  # type: ignore[no-untyped-def]
    x_BTD, w_DX = saved
    tokens, outputs = tuple(range(x_BTD.ndim - 1)), w_DX.ndim - 1
    dx = jnp.tensordot(dy, w_DX, axes=(tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(1, w_DX.ndim))))
    return dx, jnp.tensordot(x_BTD, dy, axes=(tokens, tokens))


project.defvjp(_project_fwd, _project_bwd)
