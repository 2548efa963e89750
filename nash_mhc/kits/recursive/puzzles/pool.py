"""The puzzles that rows are made of: made once, each of another symmetry class, and kept in a file.

Which puzzles there are follows from the kind alone, in whole numbers: every machine makes the same ones. They come in
an order of their own, so that a smaller pool is the beginning of a larger one; and a class is for training or held out
by its hash, whatever the size of the pool: what one run has trained on, no other one is evaluated on.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.order import mix, permuted
from nash_mhc.data.prepared.manifest import write_file
from nash_mhc.data.workers import progress
from nash_mhc.kits.recursive.puzzles import maze, sudoku
from nash_mhc.kits.recursive.puzzles.kinds import Grids, Kind, is_held_out
from nash_mhc.kits.recursive.puzzles.sudoku_search import solve

VERSION = 1  # of the puzzles and of the file: raise it where either changes
SHARE = 0.1  # of all classes that are held out
# (trained on, held out) at most: a maze has only 8 images, a sudoku of 9x9 cells more than anyone reads.
# Of 4x4 cells there are not as many.
SIZES = {"sudoku4": (4_000, 1_000), "sudoku9": (10_000, 1_000), "maze": (20_000, 1_000)}
_KEY = 77  # any number, but for ever the same
_LARGEST_BATCH, _MOST_TRIED = 4096, 1 << 24
_DTYPES = ("u1", "u1", "<u4")  # of Grids
# Every full grid of 4x4 cells is one of these two, but for a symmetry.
_SMALL_GRIDS = ("1234341221434321", "1234341223414123")


class Pool(NamedTuple):
    train: Grids
    validation: Grids

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(a.tobytes() for grids in self for a in grids)).hexdigest()


def sizes_of(kind: Kind) -> tuple[int, int]:
    return SIZES["maze" if kind.symmetry == "maze" else kind.name]


@functools.cache
def _every_small_sudoku(kind: Kind) -> Grids:
    """One puzzle of each class of 4x4 cells that has one solution and at least half of its cells empty."""
    subsets = (np.arange(1 << 16)[:, None] >> np.arange(16) & 1).astype(np.uint8)
    subsets = subsets[subsets.sum(axis=1) <= 8]
    answers = np.repeat([[int(digit) for digit in grid] for grid in _SMALL_GRIDS], len(subsets), axis=0).astype(np.uint8)
    cells = answers * np.tile(subsets, (len(_SMALL_GRIDS), 1))
    solved = solve(cells)
    found = Grids(cells, answers, solved.guesses).at(solved.solutions == 1)
    classes, first = np.unique(kind.classes(found.cells), return_index=True)
    cells, answers, ratings = found.at(first)
    moved = Grids(*kind.moved(cells, answers, mix(classes, _KEY)), ratings)  # or all would be clues of the same two grids
    return moved.at(permuted(np.arange(len(first)), len(first), _KEY))


def _candidates(kind: Kind, batch: int) -> Iterator[Grids]:
    """Puzzles in their order, for ever or until there are no more."""
    if kind.name == "sudoku4":
        yield _every_small_sudoku(kind)
        return
    for start in range(0, _MOST_TRIED, batch):
        numbers = np.arange(start, start + batch, dtype=np.uint64)
        if kind.symmetry == "maze":
            yield Grids(*maze.make(numbers, kind.height, kind.width, _KEY))
        else:
            cells, answers = sudoku.make(numbers, 3, _KEY)
            rated = Grids(cells, answers, solve(cells).guesses)
            yield rated.at(rated.ratings > 0)  # what singles alone solve teaches less, and there is enough else


def make_pool(kind: Kind, sizes: tuple[int, int], watch: Callable[[int, int, int], None] = lambda *_: None) -> Pool:
    """So many puzzles to train on and held out, or all that there are; no two of one class."""
    need = max(sizes[0], round(sizes[1] / SHARE))  # about so many have to be looked at
    parts: tuple[list[Grids], list[Grids]] = [], []
    seen = np.zeros(0, np.uint64)
    for grids in _candidates(kind, min(_LARGEST_BATCH, max(256, 2 * need))):
        classes = kind.classes(grids.cells)
        first = np.sort(np.unique(classes, return_index=True)[1])
        new = first[~np.isin(classes[first], seen)]
        seen = np.append(seen, classes[new])
        held_out = is_held_out(classes[new], SHARE)
        for part, which in zip(parts, (new[~held_out], new[held_out]), strict=True):
            part.append(grids.at(which))
        counts = [sum(len(each.cells) for each in part) for part in parts]
        done = [min(count, size) for count, size in zip(counts, sizes, strict=True)]
        watch(sum(done), sum(sizes), sum(done))
        if done == list(sizes):
            break
    return Pool(*(_joined(part).at(slice(size)) for part, size in zip(parts, sizes, strict=True)))


def _joined(parts: list[Grids]) -> Grids:
    arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Grids(*(a.astype(dtype) for a, dtype in zip(arrays, _DTYPES, strict=True)))


def open_pool(kind: Kind, sizes: tuple[int, int], cache_dir: Path) -> Pool:
    """From the file of that name; made, and made anew where the file is damaged."""
    path = cache_dir / f"puzzles-{kind.name}-{sizes[0]}-{sizes[1]}-v{VERSION}.npys"
    if (kept := _read(path, kind)) is not None:
        return kept
    with progress(f"making puzzles for {kind.name}", "puzzles") as watch:
        pool = make_pool(kind, sizes, watch)
    content = io.BytesIO()
    for array in (a for grids in pool for a in grids):
        np.save(content, array, allow_pickle=False)
    body = content.getvalue()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_file(path, hashlib.sha256(body).digest() + body)
    except OSError as error:
        where = f"--cache-dir {cache_dir}: cannot be written ({error.strerror or error})"
        raise ConfigError(f"{where}; choose another folder or make room") from error
    return pool


def _read(path: Path, kind: Kind) -> Pool | None:
    """What was kept, if it is whole."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); remove it, or choose another --cache-dir") from error
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        print(f"{path}: is damaged; making the puzzles of {kind.name} anew", file=sys.stderr)
        return None
    file = io.BytesIO(body)
    arrays = [np.load(file, allow_pickle=False) for _ in range(2 * len(_DTYPES))]
    return Pool(Grids(*arrays[:3]), Grids(*arrays[3:]))
