"""Stochastic rounding to bfloat16, so that small updates of bfloat16 weights and moments are right on average.

Rounded to nearest, a weight near 1 could not change by less than 1/256, and most updates would be lost. The random bits
are a hash of an element's index, the step and the array's number: the same on every mesh and in a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, UInt32

Salt = UInt32[Array, ""]
MakeSalt = Callable[..., Salt]
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples are far apart
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return a 32-bit hash: a few operations per element, where a cryptographic generator takes a hundred."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)


def salt_of(*numbers: Any) -> Salt:
    """Return a hash of some integers."""
    salt = jnp.uint32(0)
    for number in numbers:
        salt = _hash(salt * jnp.uint32(_GOLDEN) + jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(1))
    return salt


def _indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the index of each element in the whole array, however it is sharded."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def stochastic_bfloat16(x: Float[Array, "..."], salt: Salt) -> Float[Array, "..."]:
    """Round to one of the two nearest bfloat16 numbers, with probabilities that make x the mean."""
    random = _hash(_indices(x.shape) * jnp.uint32(_GOLDEN) + salt) & jnp.uint32(_LOW)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + random) & jnp.uint32(0xFFFFFFFF ^ _LOW), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def to_float32(x: Any) -> Any:
    return x.astype(jnp.float32)


def round_to(x: Float[Array, "..."], dtype: jnp.dtype, make_salt: MakeSalt) -> Float[Array, "..."]:
    """Cast x to the dtype that it is stored in, with stochastic rounding to bfloat16.

    The salt is made only where it is used: for float32, tracing the salts of all arrays would take a third of the time
    that it takes to trace a step.
    """
    return stochastic_bfloat16(x, make_salt()) if dtype == jnp.bfloat16 else x.astype(dtype)


def map_with_index(fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Map fn(index of the leaf, leaves): with the index, each array gets its own salt."""
    indices = iter(range(len(jax.tree.leaves(trees[0]))))
    return jax.tree.map(lambda *leaves: fn(next(indices), *leaves), *trees)
