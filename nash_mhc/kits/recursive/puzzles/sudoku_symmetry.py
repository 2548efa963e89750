"""What keeps a sudoku a sudoku: other digits, bands, stacks, rows and columns exchanged, the grid transposed.

Puzzles that become each other in this way are the same puzzle to a person and may not lie on both sides of a split:
`symmetry_class` is a number that all of them share.
"""

from __future__ import annotations

import functools
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from nash_mhc.data.order import combine, draw, mix
from nash_mhc.kits.recursive.puzzles.sudoku_search import box_side

_ROWS, _COLUMNS, _FLIP, _LABELS = range(1, 5)  # what random numbers are for
_CHUNK = 512  # puzzles that are looked at together: their colours fit into the processor's cache


class Symmetries(NamedTuple):
    """One for each puzzle."""

    sources: np.ndarray  # [P, N]: the cell whose digit comes to this place
    labels: np.ndarray  # [P, n + 1]: the new digit of each, and 0 for 0


@functools.cache
def _line_orders(box: int) -> np.ndarray:
    """All orders of the rows that keep bands together, [bands x rows within each, n]."""
    bands = list(permutations(range(box)))
    orders = [
        [band * box + row for band in order for row in within[band]] for order in bands for within in product(bands, repeat=box)
    ]
    return np.array(orders)


def _sources(rows: np.ndarray, columns: np.ndarray, is_flipped: np.ndarray) -> np.ndarray:
    """Cells of grids with these orders of rows and columns [P, n], transposed where it says so."""
    n = rows.shape[1]
    plain = rows[:, :, None] * n + columns[:, None, :]
    flipped = columns[:, None, :] * n + rows[:, :, None]
    return np.where(is_flipped[:, None, None], flipped, plain).reshape(len(rows), n * n)


def symmetries(numbers: np.ndarray, box: int) -> Symmetries:
    """A random symmetry for each 64-bit number, all but equally likely."""
    orders, n = _line_orders(box), box * box
    rows, columns = (orders[draw(numbers, what, len(orders))] for what in (_ROWS, _COLUMNS))
    keys = np.stack([mix(numbers, combine(_LABELS, digit)) for digit in range(n)], axis=1)
    labels = np.zeros((len(numbers), n + 1), np.uint8)
    labels[:, 1:] = np.argsort(keys, axis=1, kind="stable") + 1
    return Symmetries(_sources(rows, columns, draw(numbers, _FLIP, 2) == 1), labels)


def transformed(cells_PN: np.ndarray, how: Symmetries) -> np.ndarray:
    """Each grid by its symmetry."""
    first = np.arange(len(cells_PN))[:, None]
    moved = cells_PN.ravel()[first * cells_PN.shape[1] + how.sources]
    return how.labels.ravel()[first * how.labels.shape[1] + moved]


def symmetry_class(cells_PN: np.ndarray) -> np.ndarray:
    """A 64-bit number of each puzzle [P], equal for all that are the same but for a symmetry.

    Of 4x4 cells it is the puzzle's canonical form itself, so that different classes have different numbers. Of 9x9
    cells, two different ones may share a number by a rare chance; they lie on the same side of a split then.
    """
    of = _canonical if box_side(cells_PN) == 2 else _refined
    parts = [of(cells_PN[start : start + _CHUNK]) for start in range(0, len(cells_PN), _CHUNK)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


@functools.cache
def _every_source(box: int) -> np.ndarray:
    """All ways to exchange places, [128, N] for boxes of 2."""
    orders = _line_orders(box)
    rows, columns, flips = (a.ravel() for a in np.meshgrid(np.arange(len(orders)), np.arange(len(orders)), [False, True]))
    return _sources(orders[rows], orders[columns], flips)


def _canonical(cells_PN: np.ndarray) -> np.ndarray:
    """The least of all forms of a puzzle, read as a number, with digits named in the order in which they appear."""
    images = np.ascontiguousarray(cells_PN.T[_every_source(2)].swapaxes(0, 1))  # [N, 128, P]
    names = np.zeros((5, *images.shape[1:]), np.uint8)
    named, code = np.zeros(images.shape[1:], np.uint8), np.zeros(images.shape[1:], np.uint64)
    for here in images:
        is_digit = [here == digit for digit in range(1, 5)]
        new = here != 0
        for digit, there in enumerate(is_digit, 1):
            new &= ~there | (names[digit] == 0)
        named += new
        for digit, there in enumerate(is_digit, 1):
            names[digit] += named * (there & new)
        code = code * np.uint64(5) + sum(names[digit] * there for digit, there in enumerate(is_digit, 1))
    return code.min(axis=0)


def _refined(cells_PN: np.ndarray, rounds: int = 4) -> np.ndarray:
    """Colour refinement (Weisfeiler and Leman) of cells, lines, bands, boxes and digits.

    A cell's new colour is made of its own and those of what it lies in; a line's, a box's and a digit's of the sum of
    its cells', a band's of its lines'. Sums do not know any order, rows are treated like columns, and no step asks for
    the name of a digit: so the colours of a puzzle's images are the images of its colours, and their sum is the same.
    """
    box, count = box_side(cells_PN), len(cells_PN)
    n, cells = box * box, np.ascontiguousarray(cells_PN.T)
    clues = np.flatnonzero(cells)
    digits = cells.ravel()[clues].astype(np.int64) * count + clues % count  # of which puzzle which digit
    colours = mix((cells != 0).astype(np.uint64), 1)
    for turn in range(rounds):
        grid = colours.reshape(n, n, count)
        lines = [mix(grid.sum(axis=axis), combine(turn, 1)) for axis in (1, 0)]  # of rows, of columns
        bands = [mix(a.reshape(box, box, count).sum(axis=1), combine(turn, 2)) for a in lines]
        rows, columns = (mix(a + np.repeat(b, box, axis=0), combine(turn, 3)) for a, b in zip(lines, bands, strict=True))
        boxes = mix(colours.reshape(box, box, box, box, count).sum(axis=(1, 3)), combine(turn, 4))
        around = rows[:, None] + columns[None]
        around.reshape(box, box, box, box, count)[...] += boxes[:, None, :, None]
        of_digits = np.zeros((n + 1) * count, np.uint64)
        np.add.at(of_digits, digits, colours.ravel()[clues])
        around.ravel()[clues] += mix(of_digits, combine(turn, 5))[digits]
        colours = mix(colours + around.reshape(n * n, count), combine(turn, 6))
    return mix(colours.sum(axis=0), rounds)
