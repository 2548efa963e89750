"""How a parameter is declared: the logical axes of its dimensions, and its role, which says how it is trained.

    gate_DF: Float[Array, "D F"] = param("embed", "ffn")

`parallel/sharding.py` lays it on the mesh by its axes, `optim/` chooses its rate,
its decay and its optimizer by its role.
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
    """What a parameter does in a model, as far as training is concerned."""

    name: str
    rate: float = 1.0  # factor of the learning rate
    decays: bool = True  # whether weight decay applies where it has more than one axis
    orthogonal: bool = False  # whether it is a map between vectors, whose updates Muon may make orthogonal
    by_width: bool = True  # whether it learns the more slowly the wider the model is


MATRIX = Role("matrix", orthogonal=True)  # maps one vector to another
TABLE = Role("table")  # a vector for each token
VECTOR = Role("vector", decays=False)  # scales, biases, taps of convolutions
# Makes few numbers of a whole token, such as logits of weights, which are squashed afterwards: it learns faster than
# what it weighs. docs/experiments.md has what came of 0.1, 1 and 16.
GATE = Role("gate", rate=4.0)
# A narrow correction of a matrix: at the very rate that a run is given, which is what everyone's recipes mean by it.
ADAPTER = Role("adapter", by_width=False)

STATE = Role("state", decays=False, by_width=False)  # not trained; a hook updates it: `model/protocol.py`, after_update


class DerivedParam(eqx.Module):
    """Stands where a parameter was declared, and makes its array: before that is cast to the compute dtype and put
    together, so that every device makes its own share, from numbers that are not rounded yet."""

    base: Any  # the trained array, in the shape of the parameter

    @property
    @abstractmethod
    def storage(self) -> str:
        """How an exported model stores it, such as "2 bits"."""

    @abstractmethod
    def materialize(self) -> Array:
        """In the shape and with the axes of the parameter."""


class Declared(NamedTuple):
    """How one array was declared. `axes` begin with its stack axes, which are no dimensions of the parameter itself."""

    axes: Axes  # one logical axis a dimension
    role: Role
    inputs: int  # number of input axes of a matrix: the first ones after the stack axes
    cast: bool  # whether it is computed with in the compute dtype
    stack: int = 0  # number of stack axes

    @property
    def decays(self) -> bool:
        return self.role.decays and self.is_matrix

    @property
    def is_large(self) -> bool:
        """Whether it is one of those that make up a model's size, and are rounded to the compute dtype before use."""
        return self.role in (MATRIX, TABLE) and self.cast

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) - self.stack > 1

    def split(self, per_axis: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split a tuple with one entry per axis, such as a shape, into (stack axes, input axes, output axes)."""
        between = self.stack + self.inputs
        return per_axis[: self.stack], per_axis[self.stack : between], per_axis[between:]


def param(*axes: str, role: Role | None = None, inputs: int = 1, cast: bool = True, stack: Axes = (), **default: Any) -> Any:
    """Declare a parameter field: an array, or a tuple, list or dict of arrays with these axes.

    Without a role, a parameter of one axis is a VECTOR and any other a MATRIX. Vectors of one axis neither decay nor
    leave float32: a norm scale near 1 has no bits left for its updates in bfloat16. `stack` names leading axes that
    only count parameters, such as experts. `default` is that of the field.
    """
    role = role or (MATRIX if len(axes) > 1 else VECTOR)
    declared = Declared((*stack, *axes), role, inputs, cast and len(axes) > 1, len(stack))
    return eqx.field(metadata={"declared": declared}, **default)


def stacked(*axes: str) -> Any:
    """Declare a field that holds modules whose arrays all begin with these axes, such as "layers" or "experts"."""
    return eqx.field(metadata={"stacked": axes})


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by their readable path (`layers.ffn.up_DF`): parameters.txt, checkpoints and patterns name them so."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def map_declared(module: PyTree, leaf: Callable[[Declared, Any], Any]) -> PyTree:
    """Return the same tree with each array replaced by leaf(how it was declared, the array); None stays None.

    Modules and parameters may lie in tuples, lists and dicts.
    """
    return _walk(module, leaf, _Place((), None), type(module).__name__)


class _Place(NamedTuple):
    """What the fields around a value declare of it."""

    stack: Axes  # of the stacks that it is in
    own: Declared | None  # the parameter that it is, or that the module around it stands for


def _replace_parameter(outer: Declared | None, own: Declared) -> Declared:
    """Return the declaration of an array inside of a module that stands where another parameter was declared.

    Among its axes, "inputs" and "outputs" are those of that parameter; "groups" are its inputs, of which the last is
    counted in groups that every device has all of. With inputs and outputs, it has that parameter's role, too.
    """
    if outer is None:
        return own
    stack, inputs, outputs = outer.split(outer.axes)
    of = {"inputs": inputs, "outputs": outputs, "groups": (*inputs[:-1], "groups")}
    axes = tuple(axis for name in own.axes for axis in of.get(name, (name,)))
    whole = own.axes == ("inputs", "outputs")
    count = len(inputs) if own.axes[:1] == ("inputs",) else own.inputs
    role, cast = (outer.role, outer.cast) if whole else (own.role, own.cast)
    return Declared(stack + axes, role, count, cast, len(stack) + own.stack)


def _walk(value: Any, leaf: Callable[[Declared, Any], Any], place: _Place, path: str) -> Any:
    """Walk in the order of `jax.tree.leaves`."""
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
    # Rebuilt around the constructor: these leaves are specs and masks, not the arrays that the fields are typed for.
    twin = object.__new__(type(module))
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if not field.metadata.get("static", False):
            own = field.metadata.get("declared")
            own = own and _replace_parameter(place.own, own)
            inside = _Place(place.stack + field.metadata.get("stacked", ()), own)
            value = _walk(value, leaf, inside, f"{path}.{field.name}")
        object.__setattr__(twin, field.name, value)
    return twin
