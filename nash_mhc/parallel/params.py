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
# what it weighs. docs/log.md has what came of 0.1, 1 and 16.
GATE = Role("gate", rate=4.0)
# A narrow correction of a matrix: at the very rate that a run is given, which is what everyone's recipes mean by it.
ADAPTER = Role("adapter", by_width=False)

# What the codes of a quantized weight are multiplied by: at the rate that a run is given, likewise, and never shrunk.
SCALE = Role("scale", decays=False, by_width=False)
WATCHED = Role("watched", decays=False, by_width=False)  # not trained: what a step has seen of something that is


class Made(eqx.Module):
    """Stands where a parameter was declared, and makes its array: before that is cast to the compute dtype and put
    together, so that every device makes its own share, from numbers that are not rounded yet."""

    @abstractmethod
    def made(self) -> Array:
        """In the shape and with the axes of the parameter."""


class Declared(NamedTuple):
    axes: Axes  # one logical axis a dimension
    role: Role
    inputs: int  # how many of the axes, the first ones, belong to the vector that goes in (stacks of layers not counted)
    cast: bool  # whether it is computed with in the compute dtype

    @property
    def decays(self) -> bool:
        return self.role.decays and self.is_matrix

    @property
    def is_large(self) -> bool:
        """Whether it is one of those that make up a model's size, and are rounded to the compute dtype before use."""
        return self.role in (MATRIX, TABLE) and self.cast

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) - ("layers" in self.axes) > 1


def param(*axes: str, role: Role | None = None, inputs: int = 1, cast: bool = True, **default: Any) -> Any:
    """Declares a parameter field. Without a role, what has one axis is a VECTOR and everything else a MATRIX.

    Vectors of one axis neither decay nor leave float32:
    a norm scale near 1 has no bits left for its updates in bfloat16. `default`, where it may be left out.
    """
    role = role or (MATRIX if len(axes) > 1 else VECTOR)
    return eqx.field(metadata={"declared": Declared(axes, role, inputs, cast and len(axes) > 1)}, **default)


def stacked() -> Any:
    """Declares a field that holds a module whose arrays all have a leading layer axis."""
    return eqx.field(metadata={"stacked": True})


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by their readable path (`layers.ffn.up_DF`): parameters.txt, checkpoints and patterns name them so."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def map_declared(module: PyTree, leaf: Callable[[Declared, Any], Any]) -> PyTree:
    """The same module with each array replaced by leaf(how it was declared, the array); None stays None."""
    return _walk(module, leaf, (), type(module).__name__, None)


def _in_place_of(outer: Declared | None, own: Declared) -> Declared:
    """The declaration of an array inside of a module that stands where another parameter was declared.

    Among its axes, "inputs" and "outputs" are those of that parameter; "groups" are its inputs, of which the last is
    counted in groups that every device has all of. With inputs and outputs, it has that parameter's role, too.
    """
    if outer is None:
        return own
    of = {"inputs": outer.axes[: outer.inputs], "outputs": outer.axes[outer.inputs :]}
    of["groups"] = (*of["inputs"][:-1], "groups")
    axes = tuple(axis for name in own.axes for axis in of.get(name, (name,)))
    whole = own.axes == ("inputs", "outputs")
    inputs = len(of["inputs"]) if own.axes[:1] == ("inputs",) else own.inputs
    return Declared(axes, outer.role if whole else own.role, inputs, outer.cast if whole else own.cast)


def _walk(module: Any, leaf: Callable[[Declared, Any], Any], prefix: Axes, path: str, outer: Declared | None) -> Any:
    replaced: dict[str, Any] = {}
    for field in (f for f in dataclasses.fields(module) if not f.metadata.get("static", False)):
        value, here = getattr(module, field.name), f"{path}.{field.name}"
        if value is None:
            replaced[field.name] = None
        elif isinstance(value, eqx.Module):
            inside = ("layers", *prefix) if field.metadata.get("stacked") else prefix
            place = field.metadata.get("declared")
            replaced[field.name] = _walk(value, leaf, inside, here, place and _in_place_of(outer, place))
        elif (declared := field.metadata.get("declared")) is not None:
            declared = _in_place_of(outer, declared)
            declared = declared._replace(axes=prefix + declared.axes)
            if len(declared.axes) != len(value.shape):
                raise ValueError(f"{here} has shape {value.shape} but declares the axes {declared.axes}")
            replaced[field.name] = leaf(declared, value)
        else:
            raise ValueError(f"{here} is an array without logical axes; declare it with param(...)")
    # Rebuilt around the constructor: these leaves are specs and masks, not the arrays that the fields are typed for.
    twin = object.__new__(type(module))
    for field in dataclasses.fields(module):
        object.__setattr__(twin, field.name, replaced.get(field.name, getattr(module, field.name)))
    return twin
