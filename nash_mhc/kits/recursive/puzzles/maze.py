"""Mazes on a grid of cells, walls being cells too, with one shortest way from the start to the goal.

Rooms lie at the odd rows and columns, and what may be opened between two of them is the cell that they share. A random
spanning tree joins all rooms; a few more openings lead in circles or cut the way short, so that following one wall, or
closing dead ends, is not enough. As for sudoku, mazes lie flat, one a row [P, N], and are made many at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nash_mhc.data.order import combine, draw, mix

WALL, OPEN, START, GOAL, PATH = range(5)
SYMBOLS = "# SGo"
_AT_ONCE = 512  # mazes that are made together: they fit into the processor's cache
_TREE, _START, _GOAL, _TURN, _CLASS = range(1, 6)  # what random numbers are for


class Mazes(NamedTuple):
    cells: np.ndarray  # [P, N]
    answers: np.ndarray  # [P, N]: with the shortest way marked between start and goal
    lengths: np.ndarray  # [P]: its steps from cell to cell


class _Walls(NamedTuple):
    """What may be opened: between which two rooms. Inside this file mazes lie side by side, the last axis."""

    h: int  # rooms
    w: int
    one: np.ndarray  # [E], those that lie beside each other first
    other: np.ndarray

    def right_and_down(self, is_open_EP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether one can go to the right from a room [h, w - 1, P], and down [h - 1, w, P]."""
        split = self.h * (self.w - 1)
        return is_open_EP[:split].reshape(self.h, self.w - 1, -1), is_open_EP[split:].reshape(self.h - 1, self.w, -1)


def _walls(h: int, w: int) -> _Walls:
    rooms = np.arange(h * w).reshape(h, w)
    pairs = ((rooms[:, :-1], rooms[:-1]), (rooms[:, 1:], rooms[1:]))
    return _Walls(h, w, *(np.concatenate([a.ravel() for a in side]) for side in pairs))


def make(numbers: np.ndarray, height: int, width: int, key: int) -> Mazes:
    """Mazes of so many cells, odd numbers of at least 5, each a function of its number and the key alone."""
    starts = range(0, len(numbers), _AT_ONCE)
    parts = [_make(mix(numbers[start : start + _AT_ONCE], key), height, width) for start in starts]
    return Mazes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _make(keys: np.ndarray, height: int, width: int) -> Mazes:
    walls, each = _walls(height // 2, width // 2), np.arange(len(keys))
    h, w = walls.h, walls.w
    weights = np.stack([mix(keys, combine(_TREE, wall)) for wall in range(len(walls.one))])
    order = np.argsort(weights, axis=0, kind="stable")
    is_open = _tree(walls, order)
    starts = draw(keys, _START, h * w)
    goals = _far_goals(keys, _distances(walls, is_open, starts))
    _open_more(walls, is_open, order, starts, goals)

    from_start, from_goal = (_distances(walls, is_open, places) for places in (starts, goals))
    steps = from_start[goals, each]
    on_way = (from_start + from_goal == steps).reshape(h, w, -1)
    right, down = walls.right_and_down(is_open)
    cells = np.full((height, width, len(keys)), WALL, np.uint8)
    cells[1::2, 1::2] = OPEN
    cells[1::2, 2:-1:2][right] = OPEN
    cells[2:-1:2, 1::2][down] = OPEN
    answers = cells.copy()
    answers[1::2, 1::2][on_way] = PATH
    # Rooms of the one way that one can step between follow each other on it.
    answers[1::2, 2:-1:2][right & on_way[:, 1:] & on_way[:, :-1]] = PATH
    answers[2:-1:2, 1::2][down & on_way[1:] & on_way[:-1]] = PATH
    for symbol, places in ((START, starts), (GOAL, goals)):
        for grid in (cells, answers):
            grid[places // w * 2 + 1, places % w * 2 + 1, each] = symbol
    flat = [np.ascontiguousarray(grid.reshape(height * width, -1).T) for grid in (cells, answers)]
    return Mazes(flat[0], flat[1], steps.astype(np.int64) * 2)


def _tree(walls: _Walls, order_EP: np.ndarray) -> np.ndarray:
    """Which walls are open [E, P], once each was taken down in this order that parts rooms that nothing joins yet."""
    each = np.arange(order_EP.shape[1])
    parts = np.tile(np.arange(walls.h * walls.w, dtype=np.uint16)[:, None], (1, len(each)))
    is_open = np.zeros(order_EP.shape, bool)
    for which in order_EP:
        here, there = parts[walls.one[which], each], parts[walls.other[which], each]
        is_open[which, each] = here != there
        parts ^= (parts == there) * (here ^ there)  # all of that part becomes of this one
    return is_open


def _open_more(walls: _Walls, is_open: np.ndarray, order_EP: np.ndarray, starts: np.ndarray, goals: np.ndarray) -> None:
    """Takes down more of the walls, at most one for eight rooms: where there is one shortest way then, and not less
    than half as long as in the tree."""
    each = np.arange(len(starts))
    at_least = _to_goal(walls, is_open, starts, goals)[0] / 2
    is_left = ~is_open[order_EP, each]
    left = order_EP.T[is_left.T].reshape(len(each), -1).T  # a tree leaves as many in every maze
    for which in left[: walls.h * walls.w // 8]:
        is_open[which, each] = True
        steps, ways = _to_goal(walls, is_open, starts, goals)
        is_open[which, each] = (ways == 1) & (steps >= at_least)


def _walk(walls: _Walls, is_open: np.ndarray, starts: np.ndarray) -> Iterator[np.ndarray]:
    """Step by step from the start: in how many shortest ways, counted up to 2, each room is reached in it [R, P]."""
    h, w = walls.h, walls.w
    right, down = walls.right_and_down(is_open.astype(np.uint8) * np.uint8(255))
    reached = np.zeros((h, w, len(starts)), np.uint8)
    reached[starts // w, starts % w, np.arange(len(starts))] = 1
    is_new = np.full(reached.shape, 255, np.uint8)
    while reached.any():
        yield reached.reshape(h * w, -1)
        is_new &= (reached != 0) - np.uint8(1)
        following = np.zeros_like(reached)
        following[:, 1:] += reached[:, :-1] & right
        following[:, :-1] += reached[:, 1:] & right
        following[1:] += reached[:-1] & down
        following[:-1] += reached[1:] & down
        following &= is_new
        reached = np.minimum(following, 2)


def _distances(walls: _Walls, is_open: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Steps from the start to each room [R, P]."""
    found = np.zeros((walls.h * walls.w, len(starts)), np.uint16)
    for step, reached in enumerate(_walk(walls, is_open, starts)):
        found += (reached != 0) * np.uint16(step)
    return found


def _to_goal(walls: _Walls, is_open: np.ndarray, starts: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps from the start to the goal [P], and in how many shortest ways, counted up to 2."""
    steps, ways, each = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.uint8), np.arange(len(starts))
    for step, reached in enumerate(_walk(walls, is_open, starts)):
        here = reached[goals, each]
        steps += step * (here != 0)
        ways += here
        if ways.all():
            break
    return steps, ways


def count_shortest_ways(cells_PN: np.ndarray, height: int, width: int) -> np.ndarray:
    """Count the shortest ways from start to goal in each maze [P], up to 2; 0 without one start, one goal or a way."""
    walls, found = _walls(height, width), []
    for begin in range(0, len(cells_PN), _AT_ONCE):
        cells = cells_PN[begin : begin + _AT_ONCE].T
        is_open = (cells[walls.one] != WALL) & (cells[walls.other] != WALL)  # every cell is a room here
        starts, goals = ((cells == symbol).argmax(axis=0) for symbol in (START, GOAL))
        has_both = ((cells == START).sum(axis=0) == 1) & ((cells == GOAL).sum(axis=0) == 1)
        found.append(_to_goal(walls, is_open, starts, goals)[1] * has_both)
    return np.concatenate(found)


def _far_goals(keys: np.ndarray, distances_RP: np.ndarray) -> np.ndarray:
    """A room at least three quarters as far away as the farthest."""
    is_far = distances_RP * 4 >= distances_RP.max(axis=0) * 3
    chances = np.stack([mix(keys, combine(_GOAL, room)) for room in range(len(distances_RP))])
    return (chances * is_far).argmax(axis=0)


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
