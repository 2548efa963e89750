"""Sums and products as all operations have them: in float32, or in what is wider still."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def wide_dtype(dtype: Any) -> Any:
    """What numbers of that dtype are added up in."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Array) -> Array:
    return x.astype(wide_dtype(x.dtype))


def add_up(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def product(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Of two matrices, summed over one axis of each: as a GPU's kernel has it."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=wide_dtype(a.dtype))
