"""Matrix products of float8 numbers: what a GPU from Hopper on multiplies twice as fast as bfloat16.

Each array has one scale, a power of two that is found from its largest number: dividing by it is exact, nothing has to
be remembered from step to step, and a run that goes on computes the same bits. Values are kept with 3 bits after the
leading one (e4m3), gradients, which differ more in size, with 2 and a larger range (e5m2). Products are of the float8
numbers themselves, their scales come after: XLA has a pattern for "float8 times a scale" on both sides as well, but
does not find it here, and multiplies bfloat16 (docs/experiments.md).
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
    scale: Array  # of all of them

    @property
    def array(self) -> Array:
        """What it stands for, in the scale's dtype."""
        return self.numbers.astype(self.scale.dtype) * self.scale


def rounded(x: Array, kind: Any) -> Rounded:
    scale = scale_of(x, kind)
    return Rounded((x / scale).astype(kind), scale)


def scale_of(x: Array, kind: Any) -> Array:
    """A power of two by which the largest number of x fits; 1 for zeros, and for what is not finite and stays so."""
    most = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(most / float(jnp.finfo(kind).max))
    # 2^-100 is small enough for any gradient, and far from where float32 and bfloat16 lose bits.
    return jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent, -100)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: Array, w: Array) -> Array:
    """As `jnp.einsum`, of values that are rounded to float8; on the way back, of rounded gradients. Of two arrays, one
    product, and no index in all three."""
    return _product(equation, rounded(x, _VALUES), rounded(w, _VALUES))


def _product(equation: str, a: Rounded, b: Rounded) -> Array:
    of_a, of_b, of_both = re.split(",|->", equation)
    summed = [index for index in of_a if index in of_b]
    assert of_both == "".join(index for index in of_a + of_b if index not in summed), equation
    axes = tuple(map(of_a.index, summed)), tuple(map(of_b.index, summed))
    # Not `jnp.einsum`, which has no common dtype for the two kinds.
    products = lax.dot_general(a.numbers, b.numbers, (axes, ((), ())), preferred_element_type=a.scale.dtype)
    return products * a.scale * b.scale  # each is at least 2^-100: both together may be nothing


def _forward(equation, x, w):  # type: ignore[no-untyped-def]
    return einsum(equation, x, w), (x, w)


def _backward(equation, saved, dy):  # type: ignore[no-untyped-def]
    x, w = (rounded(a, _VALUES) for a in saved)
    dy = rounded(dy, _GRADIENTS)
    of_x, of_w, of_y = re.split(",|->", equation)
    return _product(f"{of_y},{of_w}->{of_x}", dy, w), _product(f"{of_x},{of_y}->{of_w}", x, dy)


einsum.defvjp(_forward, _backward)
