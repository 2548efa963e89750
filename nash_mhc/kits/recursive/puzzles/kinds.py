"""The kinds of puzzles: the size of their grids, the symbols of their cells, their tokens and symmetries."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.order import mix
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.kits.recursive.puzzles import maze
from nash_mhc.kits.recursive.puzzles.sudoku import is_solution, random_symmetries, symmetry_class, transform

NAMES = ("sudoku4", "sudoku9", "maze")
_SMALLEST_MAZE, _LARGEST_MAZE = 9, 39  # larger ones take minutes to generate
_SPLIT = 20_479  # arbitrary but fixed: it decides which classes are held out


class CellTokenizer(Tokenizer):
    """Tokens 0, 1, ... are the symbols of the cells in their order. One more token ends a document.

    Line breaks are ignored, so that a grid may be written in lines.
    """

    name = "the tokenizer of puzzles"

    def __init__(self, symbols: str) -> None:
        if not symbols or len(set(symbols)) < len(symbols) or not symbols.isascii() or not symbols.isprintable():
            raise ConfigError(f"symbols {symbols!r}: must be different printable ASCII characters, one per kind of cell")
        self.symbols, self.vocab_size = symbols, len(symbols) + 1
        self.begin = self.end = len(symbols)
        self.fingerprint = f"cells {symbols}"
        self.byte_lengths = np.append(np.ones(len(symbols), np.int32), np.int32(0))
        self.numbers = {symbol: number for number, symbol in enumerate(symbols)}
        if "." in self.numbers:
            self.numbers.setdefault("0", self.numbers["."])  # another notation of an empty cell

    def encode(self, text: str) -> np.ndarray:
        cells = "".join(text.split("\n"))
        if unknown := next((symbol for symbol in cells if symbol not in self.numbers), None):
            raise ConfigError(f"{unknown!r} is not a symbol of this puzzle; use {' '.join(map(repr, self.symbols))}")
        return np.array([self.numbers[symbol] for symbol in cells], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self.symbols[int(t)] for t in np.asarray(tokens).ravel() if 0 <= t < len(self.symbols))

    def grid_text(self, cells: np.ndarray, width: int) -> str:
        """Return a grid in lines, which `encode` reads back."""
        text = self.decode(cells)
        return "\n".join(text[start : start + width] for start in range(0, len(text), width))


@dataclass(frozen=True)
class Kind:
    name: str
    height: int
    width: int
    symbols: str  # of cells 0, 1, ...
    symmetry: str  # "sudoku", "maze" or "none"

    @property
    def size(self) -> int:
        return self.height * self.width

    def tokenizer(self) -> CellTokenizer:
        return CellTokenizer(self.symbols)

    @property
    def tokens(self) -> str:
        """The value of --tokenizer for these symbols."""
        return "maze" if self.symbols == maze.SYMBOLS else f"sudoku{len(self.symbols) - 1}"

    @property
    def empty(self) -> int:
        """The value of a cell that the solver fills."""
        return self.symbols.index(" ") if " " in self.symbols else 0

    def classes(self, cells_PN: np.ndarray) -> np.ndarray:
        """Return a 64-bit number per puzzle that is equal for all of its symmetric forms."""
        if self.symmetry == "sudoku":
            return symmetry_class(cells_PN)
        return maze.hash_class(cells_PN, maze.images(self.height, self.width) if self.symmetry == "maze" else None)

    def transform(self, cells: np.ndarray, answers: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Transform each puzzle and its answer by a random symmetry, chosen by its number."""
        if self.symmetry == "sudoku":
            symmetries = random_symmetries(numbers, int(self.height**0.5))
            return transform(cells, symmetries), transform(answers, symmetries)
        if self.symmetry == "maze":
            sources = maze.random_images(numbers, self.height, self.width)
            return np.take_along_axis(cells, sources, axis=1), np.take_along_axis(answers, sources, axis=1)
        return cells, answers

    def mistake(self, cells_N: np.ndarray, answer_N: np.ndarray) -> str | None:
        """Return what is wrong with an answer by the rules, or None if it is valid."""
        if changed := int(((cells_N != self.empty) & (cells_N != answer_N)).sum()):
            return f"{changed} of the given cells {'is' if changed == 1 else 'are'} changed"
        if self.symmetry == "sudoku":
            valid = is_solution(answer_N[None].astype(np.uint8))[0]
            return None if valid else "a row, a column or a box lacks a digit"
        return maze.mistake(answer_N, self.height, self.width) if self.symbols == maze.SYMBOLS else None


def sudoku(box: int) -> Kind:
    n = box * box
    return Kind(f"sudoku{n}", n, n, "." + "123456789"[:n], "sudoku")


def is_puzzle(name: str) -> bool:
    """Return whether the name is sudoku4, sudoku9, maze or one such as maze21x21."""
    return name in NAMES or re.fullmatch(r"maze\d+x\d+", name) is not None


def find_kind(name: str) -> Kind:
    """Return the kind of this name: sudoku4, sudoku9, maze (15x15 cells) or a size such as maze21x21."""
    if name in ("sudoku4", "sudoku9"):
        return sudoku({"sudoku4": 2, "sudoku9": 3}[name])
    match = re.fullmatch(r"maze(?:(\d+)x(\d+))?", name)
    if match is None:
        raise ConfigError(f"--dataset {name}: unknown puzzle; use {', '.join(NAMES)} or a size such as maze21x21")
    height, width = (int(side or 15) for side in match.groups())
    nearest = [min(max(side | 1, _SMALLEST_MAZE), _LARGEST_MAZE) for side in (height, width)]
    if nearest != [height, width]:
        raise ConfigError(
            f"--dataset {name}: the sides of a maze must be odd, from {_SMALLEST_MAZE} to {_LARGEST_MAZE}; "
            f"use maze{nearest[0]}x{nearest[1]}"
        )
    return Kind(f"maze{height}x{width}", height, width, maze.SYMBOLS, "maze")


def is_held_out(classes: np.ndarray, share: float) -> np.ndarray:
    """Return whether each class is for validation. This depends on its number alone, so it is the same in every run."""
    return mix(classes, _SPLIT) < np.uint64(min(int(share * 2**64), 2**64 - 1))
