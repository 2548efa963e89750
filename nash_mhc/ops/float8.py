"""Matrix products of float8 numbers: what a GPU from Hopper on multiplies twice as fast as bfloat16.

Each array has one scale, a power of two that is found from its largest number: dividing by it is exact, nothing has to
be remembered from step to step, and a run that goes on computes the same bits. Values are kept with 3 bits after the
leading one (e4m3), gradients, which differ more in size, with 2 and a larger range (e5m2). Where there are no such
products, the rounded numbers are multiplied in the dtype that they came in.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_VALUES, _GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


def rounded(x: Array, kind: Any) -> Array:
    """To numbers of that kind, times a scale of all of x; in x's dtype."""
    # A compiler that finds "float8 times a scale" on both sides of a product takes the GPU's own product for it.
    scale = scale_of(x, kind)
    return (x / scale).astype(kind).astype(x.dtype) * scale


def scale_of(x: Array, kind: Any) -> Array:
    """A power of two by which the largest number of x fits; 1 for zeros, and for what is not finite and stays so."""
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(most / float(jnp.finfo(kind).max))
    # 2^-100 is small enough for any gradient, and far from where float32 and bfloat16 lose bits.
    return jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent, -100)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: Array, w: Array) -> Array:
    """As `jnp.einsum`, of values that are rounded to float8; on the way back, of rounded gradients."""
    return jnp.einsum(equation, rounded(x, _VALUES), rounded(w, _VALUES))


def _forward(equation, x, w):  # type: ignore[no-untyped-def]
    return einsum(equation, x, w), (x, w)


def _backward(equation, saved, dy):  # type: ignore[no-untyped-def]
    x, w = (rounded(a, _VALUES) for a in saved)
    dy = rounded(dy, _GRADIENTS)
    of_x, rest = equation.split(",")
    of_w, of_y = rest.split("->")
    return jnp.einsum(f"{of_y},{of_w}->{of_x}", dy, w), jnp.einsum(f"{of_x},{of_y}->{of_w}", x, dy)


einsum.defvjp(_forward, _backward)
