"""Weights that are more than an array: an adapter, a quantizer.
Every projection, the embedding and the output go through here.

A module that stands where a parameter was declared makes the array that is computed with, from arrays of its own. These
name the axes of the parameter "inputs" and "outputs":

    class LowRank(Weight):
        base: Array = param("inputs", "outputs")
        down: Array = param("inputs", "rank")
        up: Array = param("rank", "outputs")
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from nash_mhc.ops.project import project as times
from nash_mhc.parallel.params import DerivedParam

# Theirs are the names that people know; ours end the parameters' names.
PROJECTIONS = {
    "q_proj": "q_DNH", "k_proj": "k_DKH", "v_proj": "v_DKH", "o_proj": "out_NHD",
    "gate_proj": "gate_DF", "up_proj": "up_DF", "down_proj": "down_FD",
}  # fmt: skip
_ATTENTION, _MLP = list(PROJECTIONS)[:4], list(PROJECTIONS)[4:]
GROUPS = {"all": _ATTENTION + _MLP, "attention": _ATTENTION, "mlp": _MLP}


class Weight(eqx.Module):
    @abstractmethod
    def array(self) -> Array:
        """What is computed with, in the shape of the parameter whose place this takes."""

    def project(self, x: Array, equation: str | None) -> Array:
        """x times this weight; one that knows a cheaper way than to make the whole array has its own."""
        return project(x, self.array(), equation)


def is_derived(x: Any) -> bool:
    return isinstance(x, DerivedParam)


def has_derived(model: Any) -> bool:
    return any(map(is_derived, jax.tree.leaves(model, is_leaf=is_derived)))


def materialized(model: Any) -> Any:
    """Return the model with plain arrays: what its weight modules compute with."""
    return jax.tree.map(lambda x: x.materialize() if is_derived(x) else x, model, is_leaf=is_derived)


def bases(shape: Any) -> Any:
    """Return a model of shapes with the trained array of each weight module in its place."""
    return jax.tree.map(lambda x: x.base if is_derived(x) else x, shape, is_leaf=is_derived)


def count_by_storage(model: Any) -> dict[str, int]:
    """Return the number of weights by how they are stored ("2 bits"), of modules that say so."""
    counts: dict[str, int] = {}
    for x in filter(is_derived, jax.tree.leaves(model, is_leaf=is_derived)):
        counts[x.storage] = counts.get(x.storage, 0) + math.prod(x.base.shape)
    return counts


def array_of(weight: Any) -> Array:
    """Of an array, or of a Weight."""
    return weight.array() if isinstance(weight, Weight) else weight


def project(x: Array, weight: Any, equation: str | None = None) -> Array:
    """x times an array or a Weight, by an einsum's equation; without one, over x's last axis and the weight's first."""
    if isinstance(weight, Weight):
        return weight.project(x, equation)
    return times(x, weight) if equation is None else jnp.einsum(equation, x, weight)
