"""Generate, solve and transform sudoku of 4x4 and 9x9 cells, about a thousand at a time.

A cell is 0 (empty) or a digit from 1. Grids are flat, one puzzle per row [P, N]. The search holds one grid per column
[N, L], each cell a bit mask of its possible digits. The result for a puzzle does not depend on the others.
"""

from __future__ import annotations

import functools
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from nash_mhc.data.order import combine, draw, mix

BOXES = {16: 2, 81: 3}  # cells of a grid -> side of a box
LANES = 1024  # searches side by side: enough for numpy, few enough for the processor's cache
_ONE = np.uint16(1)
_FILL, _DIG = 1, 2  # random streams of `generate`
_ROWS, _COLUMNS, _FLIP, _LABELS = range(1, 5)  # random streams of `random_symmetries`
_CHUNK = 512  # puzzles whose symmetry classes are computed together: they fit into the processor's cache


def box_side(cells: np.ndarray) -> int:
    """Return the side of a box of grids [.., N]."""
    return BOXES[cells.shape[-1]]


def is_solution(cells_PN: np.ndarray) -> np.ndarray:
    """Return whether each grid has every digit once in every row, column and box."""
    box = box_side(cells_PN)
    n = box * box
    grid = cells_PN.reshape(-1, n, n)
    boxes = grid.reshape(-1, box, box, box, box).swapaxes(2, 3).reshape(-1, n, n)
    digits = np.arange(1, n + 1)
    return np.logical_and.reduce([(np.sort(a, axis=2) == digits).all(axis=(1, 2)) for a in (grid, grid.swapaxes(1, 2), boxes)])


def _full_mask(box: int) -> np.uint16:
    return np.uint16((1 << box * box) - 1)


@functools.cache
def _digit_counts(box: int) -> np.ndarray:
    """Return the number of digits in each mask."""
    return np.array([mask.bit_count() for mask in range(1 << box * box)], np.uint8)


def _to_masks(cells_PN: np.ndarray) -> np.ndarray:
    """Return the possible digits of each cell [N, P], from the cell alone."""
    box = box_side(cells_PN)
    return np.append(_full_mask(box), 1 << np.arange(box * box)).astype(np.uint16)[cells_PN.T]


def _to_digits(masks_NS: np.ndarray) -> np.ndarray:
    """Return the digits of full grids, one grid per row."""
    return np.ascontiguousarray(sum(masks_NS >> k != 0 for k in range(9)), np.uint8).T


def _zero_mask(values: np.ndarray) -> np.ndarray:
    """Return all bits where a value is 0, else none. In numpy, arithmetic is much faster than conditions."""
    out = values + np.uint16(0x7FFF)
    out >>= np.uint16(15)
    out -= _ONE
    return out


def _unit_masks(masks_NS: np.ndarray, box: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the digits possible in at least one and in at least two cells of each row, column and box [3, n, S]."""
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


def _cell_masks(units_3nS: np.ndarray, box: int) -> np.ndarray:
    """Return the union of the masks of each cell's row, column and box [N, S]."""
    n, count = units_3nS.shape[1:]
    rows, columns, boxes = units_3nS
    cells = rows[:, None] | columns[None]
    by_box = cells.reshape(box, box, box, box, count)
    by_box |= boxes.reshape(box, 1, box, 1, count)
    return cells.reshape(n * n, count)


class Propagated(NamedTuple):
    masks_NS: np.ndarray
    is_dead: np.ndarray  # there is a contradiction
    is_stuck: np.ndarray  # no change: the grid is full or needs a guess


def _propagate(masks_NS: np.ndarray, box: int) -> Propagated:
    """Apply naked singles (one digit left in a cell) and hidden singles (one cell left for a digit)."""
    count = masks_NS.shape[1]
    single = _zero_mask(masks_NS & (masks_NS - _ONE))
    single &= masks_NS
    taken, clashes = _unit_masks(single, box)
    wrong = np.bitwise_or.reduce(clashes.reshape(-1, count), axis=0)  # a digit twice in a unit
    left = ~_cell_masks(taken, box)
    left |= single
    left &= masks_NS

    once, twice = _unit_masks(left, box)
    wrong |= np.bitwise_and.reduce(once.reshape(-1, count), axis=0) ^ _full_mask(box)  # a digit without a cell
    once &= ~twice
    hidden = _cell_masks(once, box)
    hidden &= left
    wrong |= np.bitwise_or.reduce(hidden & (hidden - _ONE), axis=0)  # two digits that need the same cell
    left &= _zero_mask(hidden)
    left |= hidden
    wrong |= np.bitwise_or.reduce(_zero_mask(left), axis=0)  # a cell without a digit
    return Propagated(left, wrong != 0, np.bitwise_or.reduce(left ^ masks_NS, axis=0) == 0)


def _fewest_options(masks_NS: np.ndarray, box: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the first cell with the fewest digits above one, that number); the number is 1 for a full grid."""
    counts = _digit_counts(box)[masks_NS]
    cells = (counts - np.uint8(2)).argmin(axis=0)  # 1 - 2 wraps around to the largest byte
    return cells, counts[cells, np.arange(len(cells))]


class _Lanes:
    """Depth-first searches side by side. A guess takes a cell's lowest digit and stacks the grid without that digit."""

    def __init__(self, masks_NL: np.ndarray, box: int) -> None:
        self._box, self._masks = box, masks_NL
        self._stack = np.empty((8, *masks_NL.shape), np.uint16)  # [depth, N, L]
        self._depths = np.zeros(masks_NL.shape[1], np.int64)
        self._is_busy = np.ones(masks_NL.shape[1], bool)
        self.guesses = np.zeros(masks_NL.shape[1], np.int64)

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (lanes that found a solution, these solutions, lanes whose search has ended)."""
        self._masks, is_dead, is_stuck = _propagate(self._masks, self._box)
        is_stuck &= self._is_busy & ~is_dead
        stuck = np.flatnonzero(is_stuck)
        cells, widths = _fewest_options(self._masks[:, stuck], self._box)
        full = stuck[widths == 1]
        solutions = _to_digits(self._masks[:, full])
        self._guess(stuck[widths > 1], cells[widths > 1])
        is_dead &= self._is_busy
        is_dead[full] = True
        back = np.flatnonzero(is_dead & (self._depths > 0))
        self._depths[back] -= 1
        self._masks[:, back] = self._stack[self._depths[back], :, back].T
        is_dead[back] = False
        ended = np.flatnonzero(is_dead)
        self._is_busy[ended] = False
        return full, solutions, ended

    def _guess(self, lanes: np.ndarray, cells: np.ndarray) -> None:
        if not len(lanes):
            return
        if self._depths[lanes].max() == len(self._stack):
            self._stack = np.concatenate([self._stack, np.empty_like(self._stack)])
        options = self._masks[cells, lanes]
        guess = options & ~(options - _ONE)
        self._masks[cells, lanes] = options ^ guess
        self._stack[self._depths[lanes], :, lanes] = self._masks[:, lanes].T
        self._masks[cells, lanes] = guess
        self._depths[lanes] += 1
        self.guesses[lanes] += 1

    def stop(self, lanes: np.ndarray) -> None:
        self._is_busy[lanes] = False

    def restart(self, lanes: np.ndarray, masks_NL: np.ndarray) -> None:
        """Start other searches in lanes that have ended."""
        self._masks[:, lanes] = masks_NL
        self._depths[lanes] = self.guesses[lanes] = 0
        self._is_busy[lanes] = True

    def drop_idle(self) -> np.ndarray | None:
        """Drop the idle lanes if they are at least half. Return the indices of the others, or None if all stay."""
        busy = np.flatnonzero(self._is_busy)
        if len(busy) > len(self._is_busy) // 2:
            return None
        self._masks, self._stack = self._masks[:, busy], self._stack[:, :, busy]
        self._depths, self._is_busy, self.guesses = self._depths[busy], self._is_busy[busy], self.guesses[busy]
        return busy


class Solved(NamedTuple):
    solutions: np.ndarray  # [P]: their number, counted up to `most`
    answers: np.ndarray  # [P, N]: the solution found last, or zeros
    guesses: np.ndarray  # [P]: how often singles were not enough


def solve(cells_PN: np.ndarray, *, most: int = 2) -> Solved:
    """Count the solutions of each puzzle up to `most`.

    The guesses rate a puzzle: those needed to find the solution and to prove that it is the only one. 0 means that
    singles solve it, and holds for every symmetric form. Above 0, the number depends on the order of the cells.
    """
    count, box, masks = len(cells_PN), box_side(cells_PN), _to_masks(cells_PN)
    solved = Solved(np.zeros(count, np.int64), np.zeros(cells_PN.shape, np.uint8), np.zeros(count, np.int64))
    owners = np.arange(min(LANES, count))  # the puzzle of each lane
    lanes, following = _Lanes(masks[:, owners], box), len(owners)
    while len(owners):
        full, answers, ended = lanes.step()
        solved.solutions[owners[full]] += 1
        solved.answers[owners[full]] = answers
        enough = full[solved.solutions[owners[full]] >= most]
        lanes.stop(enough)
        ended = np.union1d(ended, enough)
        solved.guesses[owners[ended]] = lanes.guesses[ended]
        reused = ended[: count - following]
        owners[reused] = np.arange(following, following + len(reused))
        lanes.restart(reused, masks[:, owners[reused]])
        following += len(reused)
        if len(reused) < len(ended) and (busy := lanes.drop_idle()) is not None:
            owners = owners[busy]
    return solved


def generate(numbers: np.ndarray, box: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (puzzles, answers) [P, N]. Puzzles are minimal: every clue is needed."""
    answers = _random_grids(numbers, box, key)
    return _remove_clues(answers, numbers, key), answers


def _random_grids(numbers: np.ndarray, box: int, key: int) -> np.ndarray:
    """Return a random full grid for each number [P, N].

    Set a random digit where the fewest are possible and propagate, until the grid is full. Restart at a contradiction.
    """
    keys, full = mix(numbers, combine(key, _FILL)), _full_mask(box)
    answers = np.zeros((len(numbers), box**4), np.uint8)
    for start in range(0, len(numbers), LANES):
        owners, turn = np.arange(start, min(start + LANES, len(numbers))), 0
        masks = np.full((box**4, len(owners)), full)
        while len(owners):
            masks, is_dead, is_stuck = _propagate(masks, box)
            masks[:, is_dead] = full
            at = np.flatnonzero(is_stuck | is_dead)
            cells, widths = _fewest_options(masks[:, at], box)
            done = at[widths == 1]
            answers[owners[done]] = _to_digits(masks[:, done])
            at, cells, widths = at[widths > 1], cells[widths > 1], widths[widths > 1]
            options, skipped = masks[cells, at], draw(keys[owners[at]], turn, widths)
            for k in range(box * box - 1):  # clear the `skipped` lowest digits
                options = np.where(k < skipped, options & (options - _ONE), options)
            masks[cells, at] = options & ~(options - _ONE)
            left = np.delete(np.arange(len(owners)), done)
            masks, owners, turn = masks[:, left], owners[left], turn + 1
    return answers


def _remove_clues(answers_PN: np.ndarray, numbers: np.ndarray, key: int) -> np.ndarray:
    """Remove digits in a random order wherever the solution stays unique."""
    box, (count, size) = box_side(answers_PN), answers_PN.shape
    cells, full = answers_PN.copy(), _full_mask(box)
    places = mix(numbers[:, None] * np.uint64(128) + np.arange(size, dtype=np.uint64), combine(key, _DIG))
    order = np.argsort(places, axis=1, kind="stable")
    turns = np.zeros(count, np.int64)  # clues tried so far

    def without_digit(puzzles: np.ndarray) -> np.ndarray:
        """Return masks that exclude the digit of the clue to try: a solution of these would be a second one."""
        at = order[puzzles, turns[puzzles]], np.arange(len(puzzles))
        masks = _to_masks(cells[puzzles])
        masks[at] ^= full
        return masks

    owners = np.arange(min(LANES, count))
    lanes, following = _Lanes(without_digit(owners), box), len(owners)
    while len(owners):
        solved, _, ended = lanes.step()
        lanes.stop(solved)
        removable = owners[np.setdiff1d(ended, solved)]
        cells[removable, order[removable, turns[removable]]] = 0
        ended = np.union1d(ended, solved)
        turns[owners[ended]] += 1
        is_done = turns[owners[ended]] == size
        new = ended[is_done][: count - following]
        owners[new] = np.arange(following, following + len(new))
        following += len(new)
        reused = np.union1d(ended[~is_done], new)
        lanes.restart(reused, without_digit(owners[reused]))
        if len(reused) < len(ended) and (busy := lanes.drop_idle()) is not None:
            owners = owners[busy]
    return cells


# Symmetries: renamed digits, permuted bands, stacks, rows and columns, transposition.


class Symmetries(NamedTuple):
    sources: np.ndarray  # [P, N]: the cell whose digit moves to this cell
    labels: np.ndarray  # [P, n + 1]: the new name of each digit, and 0 for 0


@functools.cache
def _line_orders(box: int) -> np.ndarray:
    """Return all orders of the rows that keep bands together [orders, n]."""
    bands = list(permutations(range(box)))
    return np.array([
        [band * box + row for band in order for row in within[band]] for order in bands for within in product(bands, repeat=box)
    ])  # fmt: skip


def _sources(rows: np.ndarray, columns: np.ndarray, is_flipped: np.ndarray) -> np.ndarray:
    """Return the cells of grids with these orders of rows and columns [P, n], some transposed."""
    n = rows.shape[1]
    plain = rows[:, :, None] * n + columns[:, None, :]
    flipped = columns[:, None, :] * n + rows[:, :, None]
    return np.where(is_flipped[:, None, None], flipped, plain).reshape(len(rows), n * n)


def random_symmetries(numbers: np.ndarray, box: int) -> Symmetries:
    """Return an almost uniformly random symmetry for each 64-bit number."""
    orders, n = _line_orders(box), box * box
    rows, columns = (orders[draw(numbers, what, len(orders))] for what in (_ROWS, _COLUMNS))
    keys = np.stack([mix(numbers, combine(_LABELS, digit)) for digit in range(n)], axis=1)
    labels = np.zeros((len(numbers), n + 1), np.uint8)
    labels[:, 1:] = np.argsort(keys, axis=1, kind="stable") + 1
    return Symmetries(_sources(rows, columns, draw(numbers, _FLIP, 2) == 1), labels)


def transform(cells_PN: np.ndarray, symmetries: Symmetries) -> np.ndarray:
    first = np.arange(len(cells_PN))[:, None]
    moved = cells_PN.ravel()[first * cells_PN.shape[1] + symmetries.sources]
    return symmetries.labels.ravel()[first * symmetries.labels.shape[1] + moved]


def symmetry_class(cells_PN: np.ndarray) -> np.ndarray:
    """Return a 64-bit number per puzzle [P] that is equal for all of its symmetric forms.

    For 4x4 cells it is the canonical form, so that different classes have different numbers. For 9x9 cells two classes
    may collide, rarely; they are then on the same side of a split.
    """
    classify = _canonical if box_side(cells_PN) == 2 else _refined
    parts = [classify(cells_PN[start : start + _CHUNK]) for start in range(0, len(cells_PN), _CHUNK)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


@functools.cache
def _all_sources(box: int) -> np.ndarray:
    """Return all permutations of the cells [128, N] for boxes of 2."""
    orders = _line_orders(box)
    rows, columns, flips = (a.ravel() for a in np.meshgrid(np.arange(len(orders)), np.arange(len(orders)), [False, True]))
    return _sources(orders[rows], orders[columns], flips)


def _canonical(cells_PN: np.ndarray) -> np.ndarray:
    """Return one number per puzzle: the smallest over its symmetric forms, digits renumbered by first appearance."""
    images = np.ascontiguousarray(cells_PN.T[_all_sources(2)].swapaxes(0, 1))  # [N, 128, P]
    is_digit = [images == digit for digit in range(1, 5)]
    first = np.stack([np.where(at.any(axis=0), at.argmax(axis=0), len(images)) for at in is_digit])
    names = 1 + (first[:, None] > first[None]).sum(axis=1, dtype=np.uint8)
    codes = np.zeros(images.shape[1:], np.uint64)
    for cell in range(len(images)):
        codes = codes * np.uint64(5) + sum(name * at[cell] for name, at in zip(names, is_digit, strict=True))
    return codes.min(axis=0)


def _refined(cells_PN: np.ndarray, rounds: int = 4) -> np.ndarray:
    """Return hashes by color refinement (Weisfeiler and Leman) of cells, lines, bands, boxes and digits.

    The color of a cell is mixed with those of its line, band, box and digit, whose colors are sums over their cells.
    Sums ignore order, rows are treated like columns, and no step uses the name of a digit: so the result is invariant.
    """
    box, count = box_side(cells_PN), len(cells_PN)
    n, cells = box * box, np.ascontiguousarray(cells_PN.T)
    clues = np.flatnonzero(cells)
    digits = cells.ravel()[clues].astype(np.int64) * count + clues % count  # index of (digit, puzzle)
    colors = mix((cells != 0).astype(np.uint64), 1)
    for turn in range(rounds):
        grid = colors.reshape(n, n, count)
        lines = [mix(grid.sum(axis=axis), combine(turn, 1)) for axis in (1, 0)]  # rows, columns
        bands = [mix(a.reshape(box, box, count).sum(axis=1), combine(turn, 2)) for a in lines]
        rows, columns = (mix(a + np.repeat(b, box, axis=0), combine(turn, 3)) for a, b in zip(lines, bands, strict=True))
        boxes = mix(colors.reshape(box, box, box, box, count).sum(axis=(1, 3)), combine(turn, 4))
        around = rows[:, None] + columns[None]
        around.reshape(box, box, box, box, count)[...] += boxes[:, None, :, None]
        of_digits = np.zeros((n + 1) * count, np.uint64)
        np.add.at(of_digits, digits, colors.ravel()[clues])
        around.ravel()[clues] += mix(of_digits, combine(turn, 5))[digits]
        colors = mix(colors + around.reshape(n * n, count), combine(turn, 6))
    return mix(colors.sum(axis=0), rounds)
