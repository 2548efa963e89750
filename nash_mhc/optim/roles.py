"""Training properties that follow from a parameter's role and axes: learning rate, weight decay, Muon's matrices."""

from __future__ import annotations

from typing import Any

from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from nash_mhc.optim.schedule import GROUPS
from nash_mhc.parallel.params import TABLE, Declared, map_declared

# Width of the model on which learning rates were tuned: the rate of its matrices is --learning-rate.
REFERENCE_WIDTH = 640


def decays(module: PyTree) -> PyTree:
    """Return the module's tree with True where weight decay applies: matrices and tables, not norms or biases."""
    return map_declared(module, lambda declared, _: declared.decays)


def rates(module: PyTree) -> PyTree:
    """Return the module's tree with each array's factor of the learning rate under Adam.

    Adam moves every entry of a matrix by about the rate, in directions that agree with the input, so outputs move by
    the rate times the width. Arrays with the width among their axes therefore have a rate of one over the width, and
    the same --learning-rate suits every width. Scales, biases and taps move outputs by the rate itself.
    """

    def factor(declared: Declared, array: Any) -> float:
        if not declared.role.by_width or "embed" not in declared.axes:
            return declared.role.rate
        return REFERENCE_WIDTH / array.shape[declared.axes.index("embed")] * declared.role.rate

    return map_declared(module, factor)


def group_of(declared: Declared, *, tied: bool) -> str:
    """Return the group whose learning rate a parameter has under `normuon`.

    tied: one table is both embedding and head.
    """
    if declared.role == TABLE:
        return "tied" if tied else "embedding"
    return declared.role.name if declared.role.name in GROUPS else "vector"


def is_orthogonal(module: PyTree) -> PyTree:
    """Return the module's tree with True where Muon makes updates orthogonal."""
    return map_declared(module, lambda declared, _: declared.role.orthogonal and declared.is_matrix)


def matrix_axes(module: PyTree) -> PyTree:
    """Return the module's tree with the input and output axes of each matrix; a stack is several matrices."""

    def numbers(declared: Declared, _: Any) -> MuonDimensionNumbers:
        _, inputs, outputs = declared.split(tuple(range(len(declared.axes))))
        return MuonDimensionNumbers(inputs, outputs)

    return map_declared(module, numbers)
