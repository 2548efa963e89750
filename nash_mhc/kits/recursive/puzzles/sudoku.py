"""Sudoku of 4x4 and 9x9 cells: made by the thousand, each a function of its number.

A cell is 0 (empty) or a digit from 1; grids lie flat, a puzzle a row [P, N].
"""

from __future__ import annotations

import numpy as np

from nash_mhc.data.order import combine, draw, mix
from nash_mhc.kits.recursive.puzzles.sudoku_search import (
    LANES,
    Lanes,
    box_side,
    full_mask,
    narrowest,
    sweep,
    to_digits,
    to_masks,
)

_FILL, _DIG = 1, 2  # what random numbers are for


def is_solution(cells_PN: np.ndarray) -> np.ndarray:
    """Whether each grid is full and has every digit once in every row, column and box."""
    box = box_side(cells_PN)
    n = box * box
    grid = cells_PN.reshape(-1, n, n)
    boxes = grid.reshape(-1, box, box, box, box).swapaxes(2, 3).reshape(-1, n, n)
    wanted = np.arange(1, n + 1)
    return np.logical_and.reduce([(np.sort(a, axis=2) == wanted).all(axis=(1, 2)) for a in (grid, grid.swapaxes(1, 2), boxes)])


def fill(numbers: np.ndarray, box: int, key: int) -> np.ndarray:
    """Random full grids, one for each number [P, N]: a digit at random where the fewest are possible, and what follows
    from it, until the grid is full; from the beginning again where that leads to a contradiction."""
    keys, full = mix(numbers, combine(key, _FILL)), full_mask(box)
    answers = np.zeros((len(numbers), box**4), np.uint8)
    for start in range(0, len(numbers), LANES):
        owners, turn = np.arange(start, min(start + LANES, len(numbers))), 0
        masks = np.full((box**4, len(owners)), full)
        while len(owners):
            masks, is_dead, is_stuck = sweep(masks, box)
            masks[:, is_dead] = full
            at = np.flatnonzero(is_stuck | is_dead)
            cells, widths = narrowest(masks[:, at], box)
            done = at[widths == 1]
            answers[owners[done]] = to_digits(masks[:, done])
            at, cells, widths = at[widths > 1], cells[widths > 1], widths[widths > 1]
            options, skipped = masks[cells, at], draw(keys[owners[at]], turn, widths)
            for k in range(box * box - 1):  # without so many of the lowest digits, the lowest
                options = np.where(k < skipped, options & (options - np.uint16(1)), options)
            masks[cells, at] = options & ~(options - np.uint16(1))
            left = np.delete(np.arange(len(owners)), done)
            masks, owners, turn = masks[:, left], owners[left], turn + 1
    return answers


def dig(answers_PN: np.ndarray, numbers: np.ndarray, key: int, *, clues: int = 0) -> np.ndarray:
    """Takes digits out of full grids, in a random order for each number, as long as there is only one solution.

    What stays is minimal (no clue can be spared), unless it would have fewer than so many clues.
    """
    box, (count, size) = box_side(answers_PN), answers_PN.shape
    cells, full = answers_PN.copy(), full_mask(box)
    places = mix(numbers[:, None] * np.uint64(128) + np.arange(size, dtype=np.uint64), combine(key, _DIG))
    order = np.argsort(places, axis=1, kind="stable")
    if clues >= size:
        return cells
    turns = np.zeros(count, np.int64)  # how many clues have been asked for
    spare = np.full(count, size - clues)  # how many may still go

    def question(puzzles: np.ndarray) -> np.ndarray:
        """There is one solution with the digit of this cell: is there one with another?"""
        at = order[puzzles, turns[puzzles]], np.arange(len(puzzles))
        masks = to_masks(cells[puzzles])
        masks[at] ^= full
        return masks

    owners = np.arange(min(LANES, count))
    lanes, following = Lanes(question(owners), box), len(owners)
    while len(owners):
        found, _, ended = lanes.step()
        lanes.end(found)
        gone = owners[np.setdiff1d(ended, found)]
        cells[gone, order[gone, turns[gone]]] = 0
        spare[gone] -= 1
        ended = np.union1d(ended, found)
        turns[owners[ended]] += 1
        is_done = (turns[owners[ended]] == size) | (spare[owners[ended]] == 0)
        new = ended[is_done][: count - following]
        owners[new] = np.arange(following, following + len(new))
        following += len(new)
        asked = np.union1d(ended[~is_done], new)
        lanes.begin(asked, question(owners[asked]))
        if len(asked) < len(ended) and (kept := lanes.without_idle()) is not None:
            owners = owners[kept]
    return cells


def make(numbers: np.ndarray, box: int, key: int, *, clues: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(puzzles, answers) [P, N], each a function of its number and the key alone."""
    answers = fill(numbers, box, key)
    return dig(answers, numbers, key, clues=clues), answers
