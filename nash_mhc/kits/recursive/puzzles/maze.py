"""Generate mazes with one shortest path from start to goal, many at a time. Walls are cells, too.

Rooms are at the odd rows and columns, with a wall cell between neighbors. A random spanning tree joins all rooms, and a
few more openings create cycles and shortcuts, so that following a wall or closing dead ends does not solve a maze.
Mazes are flat, one per row [P, N].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nash_mhc.data.order import combine, draw, mix

WALL, OPEN, START, GOAL, PATH = range(5)
SYMBOLS = "# SGo"
_BATCH = 512  # mazes generated together: they fit into the processor's cache
_TREE, _START, _GOAL, _TURN, _CLASS = range(1, 6)  # random streams


class Mazes(NamedTuple):
    cells: np.ndarray  # [P, N]
    answers: np.ndarray  # [P, N]: with the shortest path marked between start and goal
    lengths: np.ndarray  # [P]: steps of the path


class _Walls(NamedTuple):
    """The walls that may be opened, by their two rooms. Inside this file, mazes are along the last axis."""

    h: int  # rooms
    w: int
    one: np.ndarray  # [E], horizontal neighbors first
    other: np.ndarray

    def right_and_down(self, is_open_EP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each room is open to the right [h, w - 1, P] and down [h - 1, w, P]."""
        split = self.h * (self.w - 1)
        return is_open_EP[:split].reshape(self.h, self.w - 1, -1), is_open_EP[split:].reshape(self.h - 1, self.w, -1)


def _walls(h: int, w: int) -> _Walls:
    rooms = np.arange(h * w).reshape(h, w)
    pairs = ((rooms[:, :-1], rooms[:-1]), (rooms[:, 1:], rooms[1:]))
    return _Walls(h, w, *(np.concatenate([a.ravel() for a in side]) for side in pairs))


def generate(numbers: np.ndarray, height: int, width: int, key: int) -> Mazes:
    """Return mazes with odd sides of at least 5, each a function of its number and the key alone."""
    starts = range(0, len(numbers), _BATCH)
    parts = [_generate(mix(numbers[start : start + _BATCH], key), height, width) for start in starts]
    return Mazes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _generate(keys: np.ndarray, height: int, width: int) -> Mazes:
    walls, each = _walls(height // 2, width // 2), np.arange(len(keys))
    h, w = walls.h, walls.w
    weights = np.stack([mix(keys, combine(_TREE, wall)) for wall in range(len(walls.one))])
    order = np.argsort(weights, axis=0, kind="stable")
    is_open = _spanning_tree(walls, order)
    starts = draw(keys, _START, h * w)
    goals = _far_goals(keys, _distances(walls, is_open, starts))
    _add_openings(walls, is_open, order, starts, goals)

    from_start, from_goal = (_distances(walls, is_open, places) for places in (starts, goals))
    steps = from_start[goals, each]
    on_path = (from_start + from_goal == steps).reshape(h, w, -1)
    right, down = walls.right_and_down(is_open)
    cells = np.full((height, width, len(keys)), WALL, np.uint8)
    cells[1::2, 1::2] = OPEN
    cells[1::2, 2:-1:2][right] = OPEN
    cells[2:-1:2, 1::2][down] = OPEN
    answers = cells.copy()
    answers[1::2, 1::2][on_path] = PATH
    # Connected rooms on the only shortest path are consecutive on it.
    answers[1::2, 2:-1:2][right & on_path[:, 1:] & on_path[:, :-1]] = PATH
    answers[2:-1:2, 1::2][down & on_path[1:] & on_path[:-1]] = PATH
    for symbol, places in ((START, starts), (GOAL, goals)):
        for grid in (cells, answers):
            grid[places // w * 2 + 1, places % w * 2 + 1, each] = symbol
    flat = [np.ascontiguousarray(grid.reshape(height * width, -1).T) for grid in (cells, answers)]
    return Mazes(flat[0], flat[1], steps.astype(np.int64) * 2)


def _spanning_tree(walls: _Walls, order_EP: np.ndarray) -> np.ndarray:
    """Return the open walls [E, P] of Kruskal's algorithm: in this order, open each wall between unconnected rooms."""
    each = np.arange(order_EP.shape[1])
    parts = np.tile(np.arange(walls.h * walls.w, dtype=np.uint16)[:, None], (1, len(each)))
    is_open = np.zeros(order_EP.shape, bool)
    for which in order_EP:
        one, other = parts[walls.one[which], each], parts[walls.other[which], each]
        is_open[which, each] = one != other
        parts ^= (parts == other) * (one ^ other)  # joins the two parts
    return is_open


def _add_openings(walls: _Walls, is_open: np.ndarray, order_EP: np.ndarray, starts: np.ndarray, goals: np.ndarray) -> None:
    """Open up to one more wall per eight rooms, in place.

    Each must leave one shortest path, at least half as long as in the tree.
    """
    each = np.arange(len(starts))
    at_least = _to_goal(walls, is_open, starts, goals)[0] / 2
    is_closed = ~is_open[order_EP, each]
    closed = order_EP.T[is_closed.T].reshape(len(each), -1).T  # a tree leaves the same number in every maze
    for which in closed[: walls.h * walls.w // 8]:
        is_open[which, each] = True
        steps, paths = _to_goal(walls, is_open, starts, goals)
        is_open[which, each] = (paths == 1) & (steps >= at_least)


def _breadth_first(walls: _Walls, is_open: np.ndarray, starts: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, step by step, how many shortest paths (counted up to 2) reach each room in this step [R, P]."""
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
    """Return the steps from the start to each room [R, P]."""
    distances = np.zeros((walls.h * walls.w, len(starts)), np.uint16)
    for step, reached in enumerate(_breadth_first(walls, is_open, starts)):
        distances += (reached != 0) * np.uint16(step)
    return distances


def _to_goal(walls: _Walls, is_open: np.ndarray, starts: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps from the start to the goal [P], number of shortest paths, counted up to 2)."""
    steps, paths, each = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.uint8), np.arange(len(starts))
    for step, reached in enumerate(_breadth_first(walls, is_open, starts)):
        at_goal = reached[goals, each]
        steps += step * (at_goal != 0)
        paths += at_goal
        if paths.all():
            break
    return steps, paths


def shortest_paths(cells_PN: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, number of shortest paths, counted up to 2) of each maze [P].

    The number is 0 without exactly one start and one goal, or without a path.
    """
    walls, found = _walls(height, width), []
    for begin in range(0, len(cells_PN), _BATCH):
        cells = cells_PN[begin : begin + _BATCH].T
        is_open = (cells[walls.one] != WALL) & (cells[walls.other] != WALL)  # here every cell is a room
        starts, goals = ((cells == symbol).argmax(axis=0) for symbol in (START, GOAL))
        has_both = ((cells == START).sum(axis=0) == 1) & ((cells == GOAL).sum(axis=0) == 1)
        steps, paths = _to_goal(walls, is_open, starts, goals)
        found.append((steps, paths * has_both))
    steps, paths = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return steps, paths


def mistake(answer_N: np.ndarray, height: int, width: int) -> str | None:
    """Return what is wrong with an answer, whose marked cells alone must be a shortest path."""
    marked_N = np.where(answer_N == OPEN, WALL, answer_N)
    (steps, shortest), (paths, _) = shortest_paths(np.stack([marked_N, answer_N]), height, width)
    if not paths:
        return "the marked cells do not connect S to G"
    if steps != shortest or (answer_N == PATH).sum() != steps - 1:
        return f"the marked path is not the shortest, which has {shortest} steps"
    return None


def _far_goals(keys: np.ndarray, distances_RP: np.ndarray) -> np.ndarray:
    """Return a random room at least three quarters as far away as the farthest."""
    is_far = distances_RP * 4 >= distances_RP.max(axis=0) * 3
    chances = np.stack([mix(keys, combine(_GOAL, room)) for room in range(len(distances_RP))])
    return (chances * is_far).argmax(axis=0)


@functools.cache
def images(height: int, width: int) -> np.ndarray:
    """Return the source cells of all rotations and reflections of a grid: [8, N], or [4, N] if it is not square."""
    cells = np.arange(height * width).reshape(height, width)
    forms = [cells, cells.T] if height == width else [cells]
    turned = [form[::down, ::right] for form in forms for down in (1, -1) for right in (1, -1)]
    return np.stack([form.ravel() for form in turned])


def random_images(numbers: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return one of these for each 64-bit number [P, N]."""
    every = images(height, width)
    return every[draw(numbers, _TURN, len(every))]


def hash_class(cells_PN: np.ndarray, sources_GN: np.ndarray | None) -> np.ndarray:
    """Return a 64-bit hash of each grid [P]: the smallest over its images, or its own if `sources_GN` is None."""
    size = cells_PN.shape[1]
    places, keys = np.arange(size), mix(np.arange(size * 16, dtype=np.uint64), _CLASS).reshape(size, 16)
    every = places[None] if sources_GN is None else sources_GN
    hashes = [keys[places, cells_PN[:, sources]].sum(axis=1) for sources in every]
    return np.minimum.reduce(hashes)
