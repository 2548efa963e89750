"""The kinds of puzzles: how large their grids are, what their cells hold, and what leaves a puzzle the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.order import mix
from nash_mhc.kits.recursive.puzzles import maze
from nash_mhc.kits.recursive.puzzles.cells import CellTokenizer
from nash_mhc.kits.recursive.puzzles.sudoku_symmetry import symmetries, symmetry_class, transformed

NAMES = ("sudoku4", "sudoku9", "maze")
_SMALLEST_MAZE, _LARGEST_MAZE = 9, 39  # larger ones take minutes to make
_SPLIT = 20_479  # any number, but for ever the same: which classes are held out follows from it


class Grids(NamedTuple):
    """Puzzles, one a row."""

    cells: np.ndarray  # [P, N] uint8: as given
    answers: np.ndarray  # [P, N] uint8
    ratings: np.ndarray  # [P]: how hard each is; what that means is up to the kind

    def at(self, which: np.ndarray | slice) -> Grids:
        return Grids(*(a[which] for a in self))


@dataclass(frozen=True)
class Kind:
    name: str
    height: int
    width: int
    symbols: str  # of cells 0, 1, ...
    symmetry: str  # that of a "sudoku", of a "maze", or "none"

    @property
    def size(self) -> int:
        return self.height * self.width

    def tokenizer(self) -> CellTokenizer:
        return CellTokenizer(self.symbols)

    @property
    def tokens(self) -> str:
        """What `--tokenizer` calls these symbols."""
        return "maze" if self.symbols == maze.SYMBOLS else f"sudoku{len(self.symbols) - 1}"

    def classes(self, cells_PN: np.ndarray) -> np.ndarray:
        """A 64-bit number of each puzzle, equal for those that are the same but for a symmetry."""
        if self.symmetry == "sudoku":
            return symmetry_class(cells_PN)
        return maze.hash_class(cells_PN, maze.images(self.height, self.width) if self.symmetry == "maze" else None)

    def moved(self, cells: np.ndarray, answers: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Puzzles and answers alike, each by a symmetry that its number chooses."""
        if self.symmetry == "sudoku":
            how = symmetries(numbers, int(self.height**0.5))
            return transformed(cells, how), transformed(answers, how)
        if self.symmetry == "maze":
            sources = maze.turns(numbers, self.height, self.width)
            return np.take_along_axis(cells, sources, axis=1), np.take_along_axis(answers, sources, axis=1)
        return cells, answers


def sudoku(box: int) -> Kind:
    n = box * box
    return Kind(f"sudoku{n}", n, n, "." + "123456789"[:n], "sudoku")


def is_puzzle(name: str) -> bool:
    """Whether puzzles are called so: sudoku4, sudoku9, maze or such as maze21x21."""
    return name in NAMES or re.fullmatch(r"maze\d+x\d+", name) is not None


def find_kind(name: str) -> Kind:
    """By its name: sudoku4, sudoku9, maze (of 15x15 cells) or such as maze21x21; ConfigError where there is none."""
    if name in ("sudoku4", "sudoku9"):
        return sudoku({"sudoku4": 2, "sudoku9": 3}[name])
    found = re.fullmatch(r"maze(?:(\d+)x(\d+))?", name)
    if found is None:
        raise ConfigError(f"--dataset {name}: there is no such puzzle; there are {', '.join(NAMES)} and such as maze21x21")
    height, width = (int(side or 15) for side in found.groups())
    if not all(side % 2 and _SMALLEST_MAZE <= side <= _LARGEST_MAZE for side in (height, width)):
        raise ConfigError(
            f"--dataset {name}: a maze has an odd number of cells each way, from {_SMALLEST_MAZE} to {_LARGEST_MAZE}; "
            f"choose such as maze{_nearest_side(height)}x{_nearest_side(width)}"
        )
    return Kind(f"maze{height}x{width}", height, width, maze.SYMBOLS, "maze")


def _nearest_side(side: int) -> int:
    return min(max(side | 1, _SMALLEST_MAZE), _LARGEST_MAZE)


def is_held_out(classes: np.ndarray, share: float) -> np.ndarray:
    """Whether a class is for validation: by its number alone, and so for all puzzles of it, whoever asks."""
    return mix(classes, _SPLIT) < np.uint64(min(int(share * 2**64), 2**64 - 1))
