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

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from nash_mhc.ops.project import project as times

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


def array_of(weight: Any) -> Array:
    """Of an array, or of a Weight."""
    return weight.array() if isinstance(weight, Weight) else weight


def project(x: Array, weight: Any, equation: str | None = None) -> Array:
    """x times an array or a Weight, by an einsum's equation; without one, over x's last axis and the weight's first."""
    if isinstance(weight, Weight):
        return weight.project(x, equation)
    return times(x, weight) if equation is None else jnp.einsum(equation, x, weight)
