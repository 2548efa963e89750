"""Matrix products in float8, which GPUs from Hopper on multiply twice as fast as bfloat16.

Each array has one scale: a power of two, computed from its largest magnitude. Dividing by it is exact, and no scaling
state is carried between steps. Values use e4m3, gradients e5m2, which has a larger range. Scales are applied to the
product: XLA does not match its pattern for scaled operands here and would multiply in bfloat16 (docs/experiments.md).
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_VALUES, _GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


class Rounded(NamedTuple):
    numbers: Array  # float8
    scale: Array  # a scalar

    @property
    def array(self) -> Array:
        """Return the rounded values in the scale's dtype."""
        return self.numbers.astype(self.scale.dtype) * self.scale


def rounded(x: Array, kind: Any) -> Rounded:
    scale = scale_of(x, kind)
    return Rounded((x / scale).astype(kind), scale)


def scale_of(x: Array, kind: Any) -> Array:
    """Return a power of two that brings the largest magnitude of x into range; 1 for zeros and non-finite values."""
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(most / float(jnp.finfo(kind).max))
    # 2^-100 is small enough for any gradient, and far from the subnormals of float32 and bfloat16.
    return jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent, -100)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: Array, w: Array) -> Array:
    """Compute `jnp.einsum` of two arrays rounded to float8, and its gradient from a rounded cotangent.

    The equation must be one matrix product: no index may occur in all three arrays.
    """
    return _product(equation, rounded(x, _VALUES), rounded(w, _VALUES))


def _product(equation: str, a: Rounded, b: Rounded) -> Array:
    a_axes, b_axes, out_axes = re.split(",|->", equation)
    summed = [index for index in a_axes if index in b_axes]
    assert out_axes == "".join(index for index in a_axes + b_axes if index not in summed), equation
    axes = tuple(map(a_axes.index, summed)), tuple(map(b_axes.index, summed))
    # Not `jnp.einsum`, which finds no common dtype for e4m3 and e5m2.
    products = lax.dot_general(a.numbers, b.numbers, (axes, ((), ())), preferred_element_type=a.scale.dtype)
    return products * a.scale * b.scale  # one by one: the product of both scales may underflow


def _forward(equation, x, w):  # type: ignore[no-untyped-def]
    return einsum(equation, x, w), (x, w)


def _backward(equation, saved, dy):  # type: ignore[no-untyped-def]
    x, w = (rounded(a, _VALUES) for a in saved)
    dy = rounded(dy, _GRADIENTS)
    x_axes, w_axes, y_axes = re.split(",|->", equation)
    dx = _product(f"{y_axes},{w_axes}->{x_axes}", dy, w)
    return dx, _product(f"{x_axes},{y_axes}->{w_axes}", x, dy)


einsum.defvjp(_forward, _backward)
