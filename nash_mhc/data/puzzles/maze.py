"""Mazes on a grid of cells, walls being cells too, with one shortest way from the start to the goal.

Rooms lie at the odd rows and columns, and what may be opened between two of them is the cell that they share. A random
spanning tree joins all rooms; a few more openings lead in circles or cut the way short, so that following one wall, or
closing dead ends, is not enough. As for sudoku, mazes lie flat, one a row [P, N], and are made many at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from nash_mhc.data.order import combine, draw, mix

WALL, OPEN, START, GOAL, PATH = range(5)
SYMBOLS = "# SGo"
_TREE, _START, _GOAL, _TURN, _CLASS = range(1, 6)  # what random numbers are for


class Mazes(NamedTuple):
    cells: np.ndarray  # [P, N]
    answers: np.ndarray  # [P, N]: with the shortest way marked between start and goal
    lengths: np.ndarray  # [P]: its steps from cell to cell


class _Walls(NamedTuple):
    """What may be opened: between which two rooms."""

    h: int  # rooms
    w: int
    one: np.ndarray  # [E], those that lie beside each other first
    other: np.ndarray

    def right_and_down(self, is_open_PE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether one can go to the right from a room [P, h, w - 1], and down [P, h - 1, w]."""
        split = self.h * (self.w - 1)
        return is_open_PE[:, :split].reshape(-1, self.h, self.w - 1), is_open_PE[:, split:].reshape(-1, self.h - 1, self.w)


def _walls(h: int, w: int) -> _Walls:
    rooms = np.arange(h * w).reshape(h, w)
    pairs = ((rooms[:, :-1], rooms[:-1]), (rooms[:, 1:], rooms[1:]))
    return _Walls(h, w, *(np.concatenate([a.ravel() for a in side]) for side in pairs))


def make(numbers: np.ndarray, height: int, width: int, key: int) -> Mazes:
    """Mazes of so many cells, odd numbers of at least 5, each a function of its number and the key alone."""
    keys, walls = mix(numbers, key), _walls(height // 2, width // 2)
    h, w, each = walls.h, walls.w, np.arange(len(numbers))
    weights = np.stack([mix(keys, combine(_TREE, wall)) for wall in range(len(walls.one))], axis=1)
    order = np.argsort(weights, axis=1, kind="stable")
    is_open = _tree(walls, order)
    starts = draw(keys, _START, h * w)
    goals = _far_goals(keys, _walked(walls, is_open, starts)[0])
    _open_more(walls, is_open, order, starts, goals)

    from_start, from_goal = (_walked(walls, is_open, places)[0] for places in (starts, goals))
    steps = from_start[each, goals]
    on_way = (from_start + from_goal == steps[:, None]).reshape(-1, h, w)
    right, down = walls.right_and_down(is_open)
    cells = np.full((len(keys), height, width), WALL, np.uint8)
    cells[:, 1::2, 1::2] = OPEN
    cells[:, 1::2, 2:-1:2][right] = OPEN
    cells[:, 2:-1:2, 1::2][down] = OPEN
    answers = cells.copy()
    answers[:, 1::2, 1::2][on_way] = PATH
    # Rooms of the one way that one can step between follow each other on it.
    answers[:, 1::2, 2:-1:2][right & on_way[:, :, 1:] & on_way[:, :, :-1]] = PATH
    answers[:, 2:-1:2, 1::2][down & on_way[:, 1:] & on_way[:, :-1]] = PATH
    for symbol, places in ((START, starts), (GOAL, goals)):
        for grid in (cells, answers):
            grid[each, places // w * 2 + 1, places % w * 2 + 1] = symbol
    return Mazes(cells.reshape(len(keys), -1), answers.reshape(len(keys), -1), steps * 2)


def _tree(walls: _Walls, order_PE: np.ndarray) -> np.ndarray:
    """Which walls are open [P, E], once each was taken down in this order that parts rooms that nothing joins yet."""
    each = np.arange(len(order_PE))
    parts = np.tile(np.arange(walls.h * walls.w, dtype=np.uint16), (len(each), 1))
    is_open = np.zeros(order_PE.shape, bool)
    for which in order_PE.T:
        here, there = parts[each, walls.one[which]], parts[each, walls.other[which]]
        is_open[each, which] = here != there
        parts = np.where(parts == there[:, None], here[:, None], parts)
    return is_open


def _open_more(walls: _Walls, is_open: np.ndarray, order_PE: np.ndarray, starts: np.ndarray, goals: np.ndarray) -> None:
    """Takes down more of the walls, at most one for eight rooms: where there is one shortest way then, and not less
    than half as long as in the tree."""
    each = np.arange(len(is_open))
    at_least = _walked(walls, is_open, starts)[0][each, goals] / 2
    left = order_PE[~is_open[each[:, None], order_PE]].reshape(len(each), -1)  # a tree leaves as many in every maze
    for which in left.T[: walls.h * walls.w // 8]:
        is_open[each, which] = True
        distances, ways = (a[each, goals] for a in _walked(walls, is_open, starts))
        is_open[each, which] = (ways == 1) & (distances >= at_least)


def _walked(walls: _Walls, is_open: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps from the start to each room [P, h * w], and how many shortest ways lead there, counted up to 2."""
    count, h, w = len(starts), walls.h, walls.w
    right, down = walls.right_and_down(is_open.astype(np.uint8))
    reached = np.zeros((count, h, w), np.uint8)
    reached.reshape(count, -1)[np.arange(count), starts] = 1
    distances, ways, step = np.zeros((count, h, w), np.int32), reached.copy(), np.int32(0)
    while reached.any():
        step += np.int32(1)
        new = np.zeros_like(reached)
        new[:, :, 1:] += reached[:, :, :-1] * right
        new[:, :, :-1] += reached[:, :, 1:] * right
        new[:, 1:] += reached[:, :-1] * down
        new[:, :-1] += reached[:, 1:] * down
        reached = np.minimum(new, 2) * (ways == 0)
        ways += reached
        distances += step * (reached > 0)
    return distances.reshape(count, -1), ways.reshape(count, -1)


def _far_goals(keys: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """A room at least three quarters as far away as the farthest."""
    is_far = distances * 4 >= distances.max(axis=1, keepdims=True) * 3
    chances = np.stack([mix(keys, combine(_GOAL, room)) for room in range(distances.shape[1])], axis=1)
    return (chances * is_far).argmax(axis=1)


@functools.cache
def images(height: int, width: int) -> np.ndarray:
    """All ways to turn and mirror a grid [8, N], or [4, N] where it is no square: the cell that comes to each place."""
    cells = np.arange(height * width).reshape(height, width)
    forms = [cells, cells.T] if height == width else [cells]
    turned = [form[::down, ::right] for form in forms for down in (1, -1) for right in (1, -1)]
    return np.stack([form.ravel() for form in turned])


def turns(numbers: np.ndarray, height: int, width: int) -> np.ndarray:
    """One of these for each 64-bit number [P, N]."""
    every = images(height, width)
    return every[draw(numbers, _TURN, len(every))]


def hash_class(cells_PN: np.ndarray, sources_GN: np.ndarray | None) -> np.ndarray:
    """A 64-bit number of each grid [P], the same for all of its images: the least of their hashes. None: of itself."""
    size = cells_PN.shape[1]
    places, keys = np.arange(size), mix(np.arange(size * 16, dtype=np.uint64), _CLASS).reshape(size, 16)
    every = places[None] if sources_GN is None else sources_GN
    hashes = [keys[places, cells_PN[:, sources]].sum(axis=1) for sources in every]
    return np.minimum.reduce(hashes)
