"""The search for a sudoku's solutions, of a thousand puzzles side by side.

A cell is a mask of the digits that it may still hold, a grid a column [N, L], one lane each. Every step is the same few
operations on whole arrays for all lanes; a lane guesses, goes back and ends by itself, as a search of one puzzle would,
so that what it finds does not depend on its neighbours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

BOXES = {16: 2, 81: 3}  # cells of a grid -> side of a box
LANES = 1024  # enough for numpy, few enough for the processor's cache
_ONE = np.uint16(1)


def box_side(cells: np.ndarray) -> int:
    """The side of a box of grids [.., N]."""
    return BOXES[cells.shape[-1]]


def full_mask(box: int) -> np.uint16:
    return np.uint16((1 << box * box) - 1)


@functools.cache
def digit_counts(box: int) -> np.ndarray:
    """How many digits a mask has."""
    return np.array([mask.bit_count() for mask in range(1 << box * box)], np.uint8)


def to_masks(cells_PN: np.ndarray) -> np.ndarray:
    """What each cell may hold by what is written in it alone, [N, P]."""
    box = box_side(cells_PN)
    return np.append(full_mask(box), 1 << np.arange(box * box)).astype(np.uint16)[cells_PN.T]


def to_digits(masks_NS: np.ndarray) -> np.ndarray:
    """The digits of full grids, a row each."""
    return np.ascontiguousarray(sum(masks_NS >> k != 0 for k in range(9)), np.uint8).T


def _where_zero(values: np.ndarray) -> np.ndarray:
    """All bits where a value is 0, else none: numpy is many times slower at conditions than at arithmetic."""
    out = values + np.uint16(0x7FFF)
    out >>= np.uint16(15)
    out -= _ONE
    return out


def _in_units(masks_NS: np.ndarray, box: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits that some cell of a unit may hold, and those that at least two may: rows, columns, boxes [3, n, S]."""
    n, count = box * box, masks_NS.shape[1]
    grid, boxes = masks_NS.reshape(n, n, count), masks_NS.reshape(box, box, box, box, count)
    once, twice, both = (np.zeros((3, n, count), np.uint16) for _ in range(3))
    in_boxes = [a[2].reshape(box, box, count) for a in (once, twice, both)]
    for k in range(n):
        steps = (
            (grid[:, k], once[0], twice[0], both[0]),
            (grid[k], once[1], twice[1], both[1]),
            (boxes[:, k // box, :, k % box], *in_boxes),
        )
        for cells, one, two, shared in steps:
            np.bitwise_and(one, cells, out=shared)
            np.bitwise_or(two, shared, out=two)
            np.bitwise_or(one, cells, out=one)
    return once, twice


def _of_cells(units_3nS: np.ndarray, box: int) -> np.ndarray:
    """The digits of a cell's three units together [N, S]."""
    n, count = units_3nS.shape[1:]
    rows, columns, boxes = units_3nS
    cells = rows[:, None] | columns[None]
    by_box = cells.reshape(box, box, box, box, count)
    by_box |= boxes.reshape(box, 1, box, 1, count)
    return cells.reshape(n * n, count)


class Swept(NamedTuple):
    masks_NS: np.ndarray
    is_dead: np.ndarray  # there is a contradiction
    is_stuck: np.ndarray  # nothing has changed: the grid is full, or someone has to guess


def sweep(masks_NS: np.ndarray, box: int) -> Swept:
    """Naked singles (a cell with one digit left forbids it to its peers), then hidden ones (a digit with one cell left
    in a unit is there), once each."""
    count = masks_NS.shape[1]
    single = _where_zero(masks_NS & (masks_NS - _ONE))
    single &= masks_NS
    taken, clashes = _in_units(single, box)
    wrong = np.bitwise_or.reduce(clashes.reshape(-1, count), axis=0)  # a digit that is there twice
    left = ~_of_cells(taken, box)
    left |= single
    left &= masks_NS

    once, twice = _in_units(left, box)
    wrong |= np.bitwise_and.reduce(once.reshape(-1, count), axis=0) ^ full_mask(box)  # a digit that has no cell
    once &= ~twice
    hidden = _of_cells(once, box)
    hidden &= left
    wrong |= np.bitwise_or.reduce(hidden & (hidden - _ONE), axis=0)  # two digits that need the same cell
    left &= _where_zero(hidden)
    left |= hidden
    wrong |= np.bitwise_or.reduce(_where_zero(left), axis=0)  # a cell that has no digit
    return Swept(left, wrong != 0, np.bitwise_or.reduce(left ^ masks_NS, axis=0) == 0)


def narrowest(masks_NS: np.ndarray, box: int) -> tuple[np.ndarray, np.ndarray]:
    """The first cell with the fewest digits above one, and how many they are; 1 where the grid is full."""
    counts = digit_counts(box)[masks_NS]
    cells = (counts - np.uint8(2)).argmin(axis=0)  # a byte: 1 - 2 is more than any other
    return cells, counts[cells, np.arange(len(cells))]


class Lanes:
    """Searches side by side, depth first: a guess gives a cell the lowest of its digits, and keeps the grid without
    that digit for later."""

    def __init__(self, masks_NL: np.ndarray, box: int) -> None:
        self._box, self._masks = box, masks_NL
        self._later = np.empty((8, *masks_NL.shape), np.uint16)  # [depth, N, L]
        self._depths = np.zeros(len(self), np.int64)
        self._is_busy = np.ones(len(self), bool)
        self.guesses = np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return self._masks.shape[1]

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lanes that found a solution, these solutions, lanes that have come to their end)"""
        self._masks, is_dead, is_stuck = sweep(self._masks, self._box)
        is_stuck &= self._is_busy & ~is_dead
        at = np.flatnonzero(is_stuck)
        cells, widths = narrowest(self._masks[:, at], self._box)
        full = at[widths == 1]
        solutions = to_digits(self._masks[:, full])
        self._guess(at[widths > 1], cells[widths > 1])
        is_dead &= self._is_busy
        is_dead[full] = True
        back = np.flatnonzero(is_dead & (self._depths > 0))
        self._depths[back] -= 1
        self._masks[:, back] = self._later[self._depths[back], :, back].T
        is_dead[back] = False
        ended = np.flatnonzero(is_dead)
        self._is_busy[ended] = False
        return full, solutions, ended

    def _guess(self, lanes: np.ndarray, cells: np.ndarray) -> None:
        if not len(lanes):
            return
        if self._depths[lanes].max() == len(self._later):
            self._later = np.concatenate([self._later, np.empty_like(self._later)])
        options = self._masks[cells, lanes]
        guess = options & ~(options - _ONE)
        self._masks[cells, lanes] = options ^ guess
        self._later[self._depths[lanes], :, lanes] = self._masks[:, lanes].T
        self._masks[cells, lanes] = guess
        self._depths[lanes] += 1
        self.guesses[lanes] += 1

    def end(self, lanes: np.ndarray) -> None:
        """These need not search on."""
        self._is_busy[lanes] = False

    def begin(self, lanes: np.ndarray, masks_NL: np.ndarray) -> None:
        """Another search in lanes that have ended."""
        self._masks[:, lanes] = masks_NL
        self._depths[lanes] = self.guesses[lanes] = 0
        self._is_busy[lanes] = True

    def without_idle(self) -> np.ndarray | None:
        """Gives up lanes that have ended, once they are many; the numbers that the others had, None where all stay."""
        kept = np.flatnonzero(self._is_busy)
        if len(kept) > len(self) // 2:
            return None
        self._masks, self._later = self._masks[:, kept], self._later[:, :, kept]
        self._depths, self._is_busy, self.guesses = self._depths[kept], self._is_busy[kept], self.guesses[kept]
        return kept


class Solved(NamedTuple):
    """Of each puzzle."""

    solutions: np.ndarray  # [P]: how many there are, counted up to `most`
    answers: np.ndarray  # [P, N]: the one that was found last, or zeros
    guesses: np.ndarray  # [P]: how often singles led no further


def solve(cells_PN: np.ndarray, *, most: int = 2) -> Solved:
    """Counts solutions up to `most`.

    The guesses are the rating of a puzzle: those that it takes to find the solution and to know that it is the only
    one. 0 says that singles alone solve it, in whichever form it is written; more depends on the order of its cells.
    """
    count, box, masks = len(cells_PN), box_side(cells_PN), to_masks(cells_PN)
    solved = Solved(np.zeros(count, np.int64), np.zeros(cells_PN.shape, np.uint8), np.zeros(count, np.int64))
    owners = np.arange(min(LANES, count))
    lanes, following = Lanes(masks[:, owners], box), len(owners)
    while len(owners):
        found, answers, ended = lanes.step()
        solved.solutions[owners[found]] += 1
        solved.answers[owners[found]] = answers
        enough = found[solved.solutions[owners[found]] >= most]
        lanes.end(enough)
        ended = np.union1d(ended, enough)
        solved.guesses[owners[ended]] = lanes.guesses[ended]
        again = ended[: count - following]
        owners[again] = np.arange(following, following + len(again))
        lanes.begin(again, masks[:, owners[again]])
        following += len(again)
        if len(again) < len(ended) and (kept := lanes.without_idle()) is not None:
            owners = owners[kept]
    return solved
