"""Parameter declarations: the logical axes of each dimension, and the role, which determines how it is trained.

    gate_DF: Float[Array, "D F"] = param("embed", "ffn")

`parallel/sharding.py` shards by the axes; `optim/` chooses learning rate, decay and optimizer by the role.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

Axes = tuple[str, ...]


class Role(NamedTuple):
    """How a parameter is trained."""

    name: str
    rate: float = 1.0  # multiplies the learning rate
    decays: bool = True  # whether weight decay applies, if it has more than one axis
    orthogonal: bool = False  # whether it maps vectors to vectors, so that Muon may orthogonalize its updates
    by_width: bool = True  # whether its learning rate falls with the model width


MATRIX = Role("matrix", orthogonal=True)  # maps one vector to another
TABLE = Role("table")  # a vector for each token
VALUE = Role("value")  # a vector for each token, added to the values of attention
HEAD = Role("head")  # an output projection that is not tied to the embedding
VECTOR = Role("vector", decays=False)  # scales, biases, taps of convolutions
GATE = Role("gate", rate=4.0)  # maps a token to a few logits; docs/experiments.md compares rates 0.1, 1 and 16
ADAPTER = Role("adapter", by_width=False)  # LoRA matrices: exactly the given rate, as in published recipes
STATE = Role("state", decays=False, by_width=False)  # not trained; updated by `after_update` (model/protocol.py)


class DerivedParam(eqx.Module):
    """A module in place of a declared parameter, which computes that array before it is cast and gathered.

    Each device therefore computes its own shard, from unrounded values.
    """

    base: Any  # the trained array, in the shape of the parameter

    @property
    @abstractmethod
    def storage(self) -> str:
        """Return how an exported model stores it, such as "2 bits"."""

    @abstractmethod
    def materialize(self) -> Array:
        """Return the array, with the shape and axes of the parameter."""


class Declared(NamedTuple):
    """The declaration of an array. `axes` starts with its stack axes, which only count parameters."""

    axes: Axes  # one logical axis per dimension
    role: Role
    inputs: int  # number of input axes of a matrix, which follow the stack axes
    cast: bool  # whether it is cast to the compute dtype
    stack: int = 0  # number of stack axes

    @property
    def decays(self) -> bool:
        return self.role.decays and self.is_matrix

    @property
    def is_large(self) -> bool:
        """Return whether this is a matrix or table that is cast to the compute dtype (most of a model's memory)."""
        return self.role in (MATRIX, TABLE, VALUE, HEAD) and self.cast

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) - self.stack > 1

    def split(self, per_axis: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split a tuple with one entry per axis, such as a shape, into (stack axes, input axes, output axes)."""
        between = self.stack + self.inputs
        return per_axis[: self.stack], per_axis[self.stack : between], per_axis[between:]


def param(*axes: str, role: Role | None = None, inputs: int = 1, cast: bool = True, stack: Axes = (), **default: Any) -> Any:
    """Declare a parameter field: an array, or a tuple, list or dict of arrays with these axes.

    The default role is VECTOR for one axis and MATRIX for more. Parameters of one axis have no weight decay and stay
    in float32, because bfloat16 cannot resolve updates of a norm scale near 1. `stack` names leading axes that only
    count parameters, such as experts. `default` is passed to `eqx.field`.
    """
    role = role or (MATRIX if len(axes) > 1 else VECTOR)
    declared = Declared((*stack, *axes), role, inputs, cast and len(axes) > 1, len(stack))
    return eqx.field(metadata={"declared": declared}, **default)


def stacked(*axes: str) -> Any:
    """Declare a field of modules whose arrays all start with these axes, such as "layers" or "experts"."""
    return eqx.field(metadata={"stacked": axes})


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path (`layers.ffn.up_DF`), as in parameters.txt, checkpoints and patterns."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def map_declared(module: PyTree, leaf: Callable[[Declared, Any], Any]) -> PyTree:
    """Return the tree with each array replaced by `leaf(declaration, array)`; None stays None.

    Tuples, lists and dicts may contain modules and parameters.
    """
    return _walk(module, leaf, _Place((), None), type(module).__name__)


class _Place(NamedTuple):
    """The declarations of the fields around a value."""

    stack: Axes  # of the enclosing stacks
    own: Declared | None  # declaration of the parameter, or of the one that the enclosing module replaces


def _replace_parameter(outer: Declared | None, own: Declared) -> Declared:
    """Return the declaration of an array in a module that replaces the parameter `outer`.

    Its axes "inputs" and "outputs" are those of `outer`. "groups" are its inputs too, but the last one counts groups
    and is replicated. An array with the axes ("inputs", "outputs") also has the role of `outer`.
    """
    if outer is None:
        return own
    stack, inputs, outputs = outer.split(outer.axes)
    of = {"inputs": inputs, "outputs": outputs, "groups": (*inputs[:-1], "groups")}
    axes = tuple(axis for name in own.axes for axis in of.get(name, (name,)))
    has_all_axes = own.axes == ("inputs", "outputs")
    count = len(inputs) if own.axes[:1] == ("inputs",) else own.inputs
    role, cast = (outer.role, outer.cast) if has_all_axes else (own.role, own.cast)
    return Declared(stack + axes, role, count, cast, len(stack) + own.stack)


def _walk(value: Any, leaf: Callable[[Declared, Any], Any], place: _Place, path: str) -> Any:
    """Visit the leaves in the order of `jax.tree.leaves`."""
    if value is None:
        return None
    if isinstance(value, eqx.Module):
        return _walk_fields(value, leaf, place, path)
    if isinstance(value, dict):
        return {key: _walk(value[key], leaf, place, f"{path}[{key!r}]") for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        each = [_walk(item, leaf, place, f"{path}[{i}]") for i, item in enumerate(value)]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if place.own is None:
        raise ValueError(f"{path} is an array without logical axes; declare it with param(...)")
    axes = place.stack + place.own.axes
    if len(axes) != len(value.shape):
        raise ValueError(f"{path} has shape {value.shape} but declares the axes {axes}")
    return leaf(place.own._replace(axes=axes, stack=len(place.stack) + place.own.stack), value)


def _walk_fields(module: Any, leaf: Callable[[Declared, Any], Any], place: _Place, path: str) -> Any:
    # Without the constructor, whose types and checks are for arrays, not for specs and masks.
    result = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if not field.metadata.get("static", False):
            own = field.metadata.get("declared")
            own = own and _replace_parameter(place.own, own)
            inside = _Place(place.stack + field.metadata.get("stacked", ()), own)
            value = _walk(value, leaf, inside, f"{path}.{field.name}")
        object.__setattr__(result, field.name, value)
    return result
