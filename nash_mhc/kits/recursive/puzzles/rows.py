"""Kinds of puzzles, and their rows: the question's cells are the inputs, the solution's cells the targets.

Generated puzzles, each of a different symmetry class, form a pool that is cached in a file. The pool follows from the
kind alone and is the same on every machine. A smaller pool is the beginning of a larger one, and a class is held out
by its hash. So no run is evaluated on a puzzle that another one was trained on, for pools of any size.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.fields import ConfigError, Settings
from nash_mhc.data.order import combine, mix, permuted, shuffled
from nash_mhc.data.pack import Rows, RowSource
from nash_mhc.data.prepared.folder import write_file
from nash_mhc.data.sources import DataSource, OpenRequest
from nash_mhc.data.stories import SPLITS
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.data.workers import progress
from nash_mhc.kits.recursive.puzzles import maze, sudoku
from nash_mhc.storage.files import digest_of

log = logging.getLogger(__name__)
_VERSION = 1  # of the puzzles and of the cache file; increase it when either changes
SHARE = 0.1  # of all classes that are held out
# Largest numbers (training, held-out). A maze has only 8 images, so it needs more; 4x4 cells have no more classes.
SIZES = {"sudoku4": (4_000, 1_000), "sudoku9": (10_000, 1_000), "maze": (20_000, 1_000)}
_KEY = 77  # arbitrary but fixed: the puzzles follow from it
_LARGEST_BATCH, _MOST_CANDIDATES = 4096, 1 << 24
_DTYPES = ("u1", "u1", "<u4")  # of Grids in the cache file
# Every full grid of 4x4 cells is symmetric to one of these.
_SMALL_GRIDS = ("1234341221434321", "1234341223414123")
_SYMMETRY = 3  # random stream of rows
_QUESTION, _ANSWER = "question", "solution"
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
            return sudoku.symmetry_class(cells_PN)
        return maze.hash_class(cells_PN, maze.images(self.height, self.width) if self.symmetry == "maze" else None)

    def transform(self, cells: np.ndarray, answers: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Transform each puzzle and its answer by a random symmetry, chosen by its number."""
        if self.symmetry == "sudoku":
            symmetries = sudoku.random_symmetries(numbers, int(self.height**0.5))
            return sudoku.transform(cells, symmetries), sudoku.transform(answers, symmetries)
        if self.symmetry == "maze":
            sources = maze.random_images(numbers, self.height, self.width)
            return np.take_along_axis(cells, sources, axis=1), np.take_along_axis(answers, sources, axis=1)
        return cells, answers

    def mistake(self, cells_N: np.ndarray, answer_N: np.ndarray) -> str | None:
        """Return what is wrong with an answer by the rules, or None if it is valid."""
        if changed := int(((cells_N != self.empty) & (cells_N != answer_N)).sum()):
            return f"{changed} of the given cells {'is' if changed == 1 else 'are'} changed"
        if self.symmetry == "sudoku":
            valid = sudoku.is_solution(answer_N[None].astype(np.uint8))[0]
            return None if valid else "a row, a column or a box lacks a digit"
        return maze.mistake(answer_N, self.height, self.width) if self.symbols == maze.SYMBOLS else None


def sudoku_kind(box: int) -> Kind:
    n = box * box
    return Kind(f"sudoku{n}", n, n, "." + "123456789"[:n], "sudoku")


def is_puzzle(name: str) -> bool:
    """Return whether the name is sudoku4, sudoku9, maze or one such as maze21x21."""
    return name in SIZES or re.fullmatch(r"maze\d+x\d+", name) is not None


def find_kind(name: str) -> Kind:
    """Return the kind of this name: sudoku4, sudoku9, maze (15x15 cells) or a size such as maze21x21."""
    if name in ("sudoku4", "sudoku9"):
        return sudoku_kind({"sudoku4": 2, "sudoku9": 3}[name])
    match = re.fullmatch(r"maze(?:(\d+)x(\d+))?", name)
    if match is None:
        raise ConfigError(f"--dataset {name}: unknown puzzle; use {', '.join(SIZES)} or a size such as maze21x21")
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


class Grids(NamedTuple):
    """Generated puzzles, one per row."""

    cells: np.ndarray  # [P, N] uint8: the questions
    answers: np.ndarray  # [P, N] uint8
    ratings: np.ndarray  # [P]: difficulty: guesses of a sudoku, length of the path of a maze

    def at(self, which: np.ndarray | slice) -> Grids:
        return Grids(*(a[which] for a in self))


class Pool(NamedTuple):
    train: Grids
    validation: Grids

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(a.tobytes() for grids in self for a in grids)).hexdigest()


@functools.cache
def _all_small_sudoku(kind: Kind) -> Grids:
    """Return one 4x4 puzzle of each class that has one solution and at least half of its cells empty."""
    subsets = (np.arange(1 << 16)[:, None] >> np.arange(16) & 1).astype(np.uint8)
    subsets = subsets[subsets.sum(axis=1) <= 8]
    answers = np.repeat([[int(digit) for digit in grid] for grid in _SMALL_GRIDS], len(subsets), axis=0).astype(np.uint8)
    cells = answers * np.tile(subsets, (len(_SMALL_GRIDS), 1))
    solved = sudoku.solve(cells)
    unique = Grids(cells, answers, solved.guesses).at(solved.solutions == 1)
    classes, first = np.unique(kind.classes(unique.cells), return_index=True)
    cells, answers, ratings = unique.at(first)
    # Otherwise all of them would be clues of the same two grids.
    transformed = Grids(*kind.transform(cells, answers, mix(classes, _KEY)), ratings)
    return transformed.at(permuted(np.arange(len(first)), len(first), _KEY))


def _candidates(kind: Kind, batch: int) -> Iterator[Grids]:
    if kind.name == "sudoku4":
        yield _all_small_sudoku(kind)
        return
    for start in range(0, _MOST_CANDIDATES, batch):
        numbers = np.arange(start, start + batch, dtype=np.uint64)
        if kind.symmetry == "maze":
            yield Grids(*maze.generate(numbers, kind.height, kind.width, _KEY))
        else:
            cells, answers = sudoku.generate(numbers, 3, _KEY)
            rated = Grids(cells, answers, sudoku.solve(cells).guesses)
            yield rated.at(rated.ratings > 0)  # puzzles that singles solve teach less


def make_pool(kind: Kind, sizes: tuple[int, int], watch: Callable[[int, int, int], None] = lambda *_: None) -> Pool:
    """Generate (training, held-out) puzzles, or all that exist if there are fewer; no two of one class."""
    need = max(sizes[0], round(sizes[1] / SHARE))  # about the number of candidates
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
    joined = [[np.concatenate(arrays) for arrays in zip(*part, strict=True)] for part in parts]
    typed = [Grids(*(a.astype(dtype) for a, dtype in zip(arrays, _DTYPES, strict=True))) for arrays in joined]
    return Pool(*(grids.at(slice(size)) for grids, size in zip(typed, sizes, strict=True)))


def open_pool(kind: Kind, sizes: tuple[int, int], cache_dir: Path) -> Pool:
    """Read the pool from its cache file, or generate and write it if the file is missing or damaged."""
    path = cache_dir / f"puzzles-{kind.name}-{sizes[0]}-{sizes[1]}-v{_VERSION}.npys"
    if (pool := _read_pool(path, kind)) is not None:
        return pool
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
        what = f"--cache-dir {cache_dir}: cannot be written ({error.strerror or error})"
        raise ConfigError(f"{what}; choose another directory or free space") from error
    return pool


def _read_pool(path: Path, kind: Kind) -> Pool | None:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); remove it, or choose another --cache-dir") from error
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        log.warning(f"{path}: damaged; generating the puzzles of {kind.name} again")
        return None
    file = io.BytesIO(body)
    arrays = [np.load(file, allow_pickle=False) for _ in range(2 * len(_DTYPES))]
    return Pool(Grids(*arrays[:3]), Grids(*arrays[3:]))


class GridRows(RowSource):
    """Rows of these puzzles, each one document without padding.

    If endless, each pass reads every puzzle once in a new order and in another symmetric form. Both follow from the
    seed and the row's number. Otherwise there is one pass over the puzzles as they are.
    """

    examples = "puzzles"
    most_documents: int | None = 1

    def __init__(
        self, kind: Kind, cells: np.ndarray, answers: np.ndarray, *, name: str, seed: int, endless: bool, identity: str,
        held_out: str = "",
    ) -> None:  # fmt: skip
        self.kind, self.name, self.endless, self.identity, self.held_out = kind, name, endless, identity, held_out
        self._cells, self._answers, self._seed = cells, answers, seed

    @property
    def puzzles(self) -> int:
        """The number of different puzzles."""
        return len(self._cells)

    def __len__(self) -> int:
        return sys.maxsize if self.endless else self.puzzles

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        at = np.asarray(indices, np.int64)
        puzzles = self._puzzles(at)
        cells, answers = self._cells[puzzles], self._answers[puzzles]
        if self.endless:
            cells, answers = self.kind.transform(cells, answers, mix(at, combine(self._seed, _SYMMETRY)))
        inputs, targets = cells.astype(np.int32), answers.astype(np.int32)
        return Rows(inputs, targets, np.ones_like(inputs), np.ones(inputs.shape, np.float32))

    def show(self, index: int) -> str:
        """Return the question and the solution side by side."""
        row = self[index]
        given, answer = (self.kind.tokenizer().grid_text(a, self.kind.width).split("\n") for a in (row.inputs, row.targets))
        width = max(len(_QUESTION), self.kind.width)
        pairs = zip([_QUESTION, *given], [_ANSWER, *answer], strict=True)
        return "\n".join(f"{left:<{width}}   {right}" for left, right in pairs)

    def _puzzles(self, at: np.ndarray) -> np.ndarray:
        """Return the puzzle of each row."""
        if len(at) and not 0 <= at.min() <= at.max() < len(self):
            raise IndexError(f"{self.name} has rows 0 to {len(self) - 1}, not {at.min()} to {at.max()}")
        return shuffled(at, self.puzzles, seed=self._seed) if self.endless else at


class PuzzleRows(GridRows):
    """Generated puzzles: sudoku4, sudoku9, maze, or a maze of another size (maze21x21). Training rows are endless."""

    def __init__(
        self, name: str, *, seed: int, split: str, cache_dir: str | Path, sizes: tuple[int, int] | None = None
    ) -> None:
        kind, is_training = find_kind(name), split == SPLITS[0]
        check_split(split)
        pool = open_pool(kind, sizes or SIZES["maze" if kind.symmetry == "maze" else kind.name], Path(cache_dir))
        cells, answers, _ = pool.train if is_training else pool.validation
        identity = digest_of(["puzzles", _VERSION, kind.name, pool.digest])
        super().__init__(kind, cells, answers, name=name, seed=seed, endless=is_training, identity=identity)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: use {' or '.join(SPLITS)}")


def tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of the kind of puzzles with this name, or None if it is not a kind of puzzles."""
    return find_kind(name).tokenizer() if is_puzzle(name) else None


def puzzle_settings(kind: Kind, values: Mapping[str, Any]) -> Settings:
    """Infer the settings of a run on these puzzles: a row is a grid, the symbols of its cells are the tokens."""
    dataset = values["data.dataset"]
    if values["objective.name"] == "next_token":
        raise ConfigError(
            f"--dataset {dataset}: puzzles need --objective puzzle; add --model-kind recursive and a preset that sets "
            "it: --model-size sudoku4 or sudoku9"
        )
    settings = {"data.seq_len": kind.size, "data.tokenizer": kind.tokens}
    return {path: (value, f"puzzles {dataset}") for path, value in settings.items()}


def _open(request: OpenRequest) -> RowSource:
    cfg = request.cfg
    if cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {cfg.dataset_name}: puzzles have no subsets; leave it out")
    return PuzzleRows(cfg.dataset, seed=request.seed, split=request.split, cache_dir=cfg.cache_dir)


GENERATED = DataSource(
    takes=lambda dataset, form: is_puzzle(dataset),
    open=_open,
    infers=lambda values: puzzle_settings(find_kind(values["data.dataset"]), values),
    has_test=False,
)
