"""Numbers kept in bfloat16 that small changes add up in: rounded up or down by chance, so that the mean is right.

Rounded to the nearest, a weight near 1 would never move by less than 1/256, and most updates would be lost. Which way a
number goes follows from its place in its array and a salt, made of the step and the array's own number: the same on
every mesh, and in a resumed run the same as in an unbroken one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, UInt32

Salt = UInt32[Array, ""]
Salted = Callable[..., Salt]  # makes one when it is asked for
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: numbers in a row are spread far from one another by it
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 does not have


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Every bit of the result depends on every bit of x (a 32-bit finalizer: a few operations, where a generator that
    is good enough for secrets takes a hundred, for each of the weights in every step)."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)


def salt_of(*numbers: Any) -> Salt:
    salt = jnp.uint32(0)
    for number in numbers:
        salt = _mixed(salt * jnp.uint32(_GOLDEN) + jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(1))
    return salt


def _places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The number of each element, in the whole array, however it is split over devices."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return place


def stochastic_bfloat16(x: Float[Array, "..."], salt: Salt) -> Float[Array, "..."]:
    """bfloat16 numbers next to x: the nearer one is the likelier, just so that on average they are x."""
    random = _mixed(_places(x.shape) * jnp.uint32(_GOLDEN) + salt) & jnp.uint32(_LOW)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + random) & jnp.uint32(0xFFFFFFFF ^ _LOW), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def wide(x: Any) -> Any:
    """As it is computed with, however it is kept."""
    return x.astype(jnp.float32)


def map_numbered(fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    """fn(the leaf's number, leaves): each array has a salt of its own."""
    numbers = iter(range(len(jax.tree.leaves(trees[0]))))
    return jax.tree.map(lambda *leaves: fn(next(numbers), *leaves), *trees)


def stored(x: Float[Array, "..."], dtype: jnp.dtype, salt: Salted) -> Float[Array, "..."]:
    """x as it is kept from step to step. The salt is made where it is used: in float32, those of all arrays would be a
    third of the time that a step takes to trace."""
    return stochastic_bfloat16(x, salt()) if dtype == jnp.bfloat16 else x.astype(dtype)
