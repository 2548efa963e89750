"""What a parameter's role and its width say about training it: its rate, its decay, which axes of it are a matrix."""

from __future__ import annotations

from typing import Any

from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from nash_mhc.parallel.params import Declared, map_declared

# Of the model on which rates were measured: its matrices learn at the rate that a run is given.
REFERENCE_WIDTH = 640


def decays(module: PyTree) -> PyTree:
    """The module's tree with True where weight decay applies: matrices and tables, not norms or biases."""
    return map_declared(module, lambda declared, _: declared.decays)


def rates(module: PyTree) -> PyTree:
    """The module's tree with the factor of each array's learning rate under Adam.

    Adam moves every entry of a matrix by about the rate, all in directions that agree with its input: what comes out
    moves by the rate times the width. So what has the width among its axes learns at a rate of one over it, and the
    same number suits every width (tests/optim/test_rates.py watches how far activations move).
    Scales, biases and taps move what comes out by the rate itself.
    """

    def factor(declared: Declared, array: Any) -> float:
        if not declared.role.by_width or "embed" not in declared.axes:
            return declared.role.rate
        return REFERENCE_WIDTH / array.shape[declared.axes.index("embed")] * declared.role.rate

    return map_declared(module, factor)


def is_orthogonal(module: PyTree) -> PyTree:
    """The module's tree with True where Muon may make an update orthogonal."""
    return map_declared(module, lambda declared, _: declared.role.orthogonal and declared.is_matrix)


def matrix_axes(module: PyTree) -> PyTree:
    """Return the module's tree with the input and output axes of each matrix; a stack is several matrices."""

    def numbers(declared: Declared, _: Any) -> MuonDimensionNumbers:
        _, inputs, outputs = declared.split(tuple(range(len(declared.axes))))
        return MuonDimensionNumbers(inputs, outputs)

    return map_declared(module, numbers)
