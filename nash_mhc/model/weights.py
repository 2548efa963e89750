"""Weights that are modules instead of arrays: adapters, quantizers, float8. All projections and tables use them.

A `Weight` replaces a declared parameter and computes its array. It declares its own arrays with the axes "inputs" and
"outputs" of that parameter:

    class LowRank(Weight):
        base: Array = param("inputs", "outputs")
        down: Array = param("inputs", "rank")
        up: Array = param("rank", "outputs")
"""

from __future__ import annotations

import math
import string
from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.ops import float8
from nash_mhc.ops.arithmetic import project as times
from nash_mhc.parallel.params import DerivedParam, param

# Hugging Face's names of projections, and the ends of our parameter names.
PROJECTIONS = {
    "q_proj": "q_DNH", "k_proj": "k_DKH", "v_proj": "v_DKH", "o_proj": "out_NHD",
    "gate_proj": "gate_DF", "up_proj": "up_DF", "down_proj": "down_FD",
}  # fmt: skip
_ATTENTION, _MLP = list(PROJECTIONS)[:4], list(PROJECTIONS)[4:]
GROUPS = {"all": _ATTENTION + _MLP, "attention": _ATTENTION, "mlp": _MLP}


class Weight(eqx.Module):
    @abstractmethod
    def array(self) -> Array:
        """Return the array to compute with, in the shape of the parameter that this replaces."""

    def project(self, x: Array, equation: str | None) -> Array:
        """Multiply x by this weight. Override it if there is a cheaper way than to build the array."""
        return project(x, self.array(), equation)


def is_derived(x: Any) -> bool:
    return isinstance(x, DerivedParam)


def has_derived(model: Any) -> bool:
    return any(map(is_derived, jax.tree.leaves(model, is_leaf=is_derived)))


def materialized(model: Any) -> Any:
    """Return the model with each weight module replaced by the array that it computes."""
    return jax.tree.map(lambda x: x.materialize() if is_derived(x) else x, model, is_leaf=is_derived)


def with_base_arrays(shape: Any) -> Any:
    """Return a model of shapes with each weight module replaced by its base array, without adapters or quantization."""
    return jax.tree.map(lambda x: x.base if is_derived(x) else x, shape, is_leaf=is_derived)


def count_by_storage(model: Any) -> dict[str, int]:
    """Return the number of weights by how they are stored ("2 bits"), of modules that say so."""
    counts: dict[str, int] = {}
    for x in filter(is_derived, jax.tree.leaves(model, is_leaf=is_derived)):
        counts[x.storage] = counts.get(x.storage, 0) + math.prod(x.base.shape)
    return counts


def array_of(weight: Any) -> Array:
    """Return the array of a weight, which is an array or a Weight."""
    return weight.array() if isinstance(weight, Weight) else weight


def project(x: Array, weight: Any, equation: str | None = None) -> Array:
    """Multiply x by a weight with an einsum equation; without one, contract the last axis of x and the first of it."""
    if isinstance(weight, Weight):
        return weight.project(x, equation)
    return times(x, weight) if equation is None else jnp.einsum(equation, x, weight)


class Float8(Weight):
    """A weight that is multiplied in float8 (`--matmul-dtype float8`)."""

    base: Float[Array, "..."] = param("inputs", "outputs")

    def array(self) -> Array:
        return self.base

    def project(self, x: Array, equation: str | None) -> Array:
        return float8.einsum(equation or _tensordot_equation(x.ndim, self.base.ndim), x, self.base)


def _tensordot_equation(x_ndim: int, w_ndim: int) -> str:
    """Return the einsum equation that contracts the last axis of x with the first of w."""
    letters = string.ascii_lowercase
    x, w = letters[:x_ndim], letters[x_ndim - 1 : x_ndim + w_ndim - 1]
    return f"{x},{w}->{x[:-1]}{w[1:]}"


def in_float8(layer: Any) -> Any:
    """Return the layer with its projections in float8. Adapters and quantized weights are left alone."""
    is_projection = lambda path: getattr(path[-1], "name", None) in PROJECTIONS.values()
    return jax.tree.map_with_path(lambda path, w: Float8(w) if is_projection(path) else w, layer)
