"""Rows of puzzles: the question's cells are the inputs, the solution's cells the targets. Generated puzzles by name.

Generated puzzles form a pool, each of another symmetry class, which is cached in a file. The pool follows from the kind
alone and is the same on every machine. A smaller pool is the beginning of a larger one, and a class is held out by its
hash. So no run is evaluated on a puzzle that another one was trained on, for pools of any size.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
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
from nash_mhc.kits.recursive.puzzles.kinds import Kind, find_kind, is_held_out, is_puzzle
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
        log.warning(f"{path}: is damaged; making the puzzles of {kind.name} again")
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
            f"--dataset {dataset}: puzzles need --objective puzzle; add --model-kind recursive --model-size sudoku4 (or "
            "sudoku9), which sets it"
        )
    settings = {"data.seq_len": kind.size, "data.tokenizer": kind.tokens}
    return {path: (value, f"puzzles {dataset}") for path, value in settings.items()}


def _open(request: OpenRequest) -> RowSource:
    cfg = request.cfg
    if cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {cfg.dataset_name}: puzzles have no variants; omit it")
    return PuzzleRows(cfg.dataset, seed=request.seed, split=request.split, cache_dir=cfg.cache_dir)


GENERATED = DataSource(
    takes=lambda dataset, form: is_puzzle(dataset),
    open=_open,
    infers=lambda values: puzzle_settings(find_kind(values["data.dataset"]), values),
    has_test=False,
)
