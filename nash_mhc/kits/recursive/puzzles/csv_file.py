"""Puzzles from CSV files: a question and its answer per line, one character per cell.

Sudoku of 4x4 and 9x9 cells are recognized by their size and trained on in all symmetric forms. Other grids of digits,
and mazes (`#`, a space, S, G, and o for the path), are trained on as they are. Refused are lines with mistakes, sudoku
with a second solution and mazes with a second shortest path.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import io
import itertools
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.pack import NothingHeldOut, RowSource
from nash_mhc.data.prepared.folder import write_file
from nash_mhc.data.sources import DataSource, OpenRequest
from nash_mhc.data.stories import SPLITS
from nash_mhc.data.workers import progress
from nash_mhc.kits.recursive.puzzles import maze
from nash_mhc.kits.recursive.puzzles.rows import GridRows, Kind, check_split, is_held_out, puzzle_settings, sudoku_kind
from nash_mhc.kits.recursive.puzzles.sudoku import BOXES, LANES, is_solution, solve
from nash_mhc.storage.files import digest_of, digests_of_sources, reading

_VERSION = 1  # of the rows made from a file; increase it when they change
_QUESTIONS, _ANSWERS = ("question", "puzzle", "quizzes"), ("answer", "solution", "solutions")
_BLOCK = 16_384  # lines checked together
_UNKNOWN = 255


class _Line(NamedTuple):
    number: int
    question: str
    answer: str


class _Content(NamedTuple):
    kind: Kind
    cells: np.ndarray
    answers: np.ndarray
    classes: np.ndarray
    lines: np.ndarray  # line number of each puzzle


class CsvRows(GridRows):
    """The puzzles of a file. A puzzle is held out by the hash of its symmetry class, or of its question.

    So all copies of a puzzle, and all symmetric forms of a sudoku, are on the same side. A file whose puzzles have
    passed the check for unique solutions leaves a note in `cache_dir`, so that the next start skips the check.
    """

    def __init__(
        self, path: str | Path, *, seed: int, split: str, validation_fraction: float, cache_dir: str | Path | None = None
    ) -> None:
        path = Path(path)
        check_split(split)
        is_training = split == SPLITS[0]
        if not is_training and not validation_fraction:
            raise NothingHeldOut(f"--dataset {path}: no puzzles are held out for split {split!r}; raise --validation-fraction")
        with reading(f"--dataset {path}"):
            (digest,), state = digests_of_sources([path]), path.stat()
            version = (path.absolute(), state.st_size, state.st_mtime_ns)
            kind, cells, answers, classes, _ = _read(*version)
        note = None if cache_dir is None else Path(cache_dir) / "puzzles" / f"{digest}.one-solution"
        has_rules = kind.symmetry == "sudoku" or kind.symbols == maze.SYMBOLS
        if has_rules and not (note is not None and note.exists()):
            _check_solutions(path, *version)
            if note is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                write_file(note, b"")
        held_out = is_held_out(classes, validation_fraction)
        used = held_out != is_training
        if not used.any():
            remedy = "lower" if is_training else "raise"
            raise ConfigError(
                f"--dataset {path}: none of its {len(classes):,} puzzles is in split {split!r}; add some, or {remedy} "
                "--validation-fraction"
            )
        forms = "symmetric forms" if kind.symmetry == "sudoku" else "copies"
        super().__init__(
            kind,
            cells[used],
            answers[used],
            name=str(path),
            seed=seed,
            endless=is_training and kind.symmetry != "none",
            identity=digest_of(["puzzle file", _VERSION, digest, validation_fraction]),
            held_out=f"held out: {held_out.sum():,} of {len(classes):,} puzzles, with all of their {forms}"
            if validation_fraction
            else "",
        )


# Reading


@functools.lru_cache(maxsize=1)
def _read(path: Path, size: int, modified_ns: int) -> _Content:
    """Read and check a file. The cache serves both splits of a run, until the file changes."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # cells, answers, classes
    numbers: list[int] = []
    kind: Kind | None = None
    with _opened(path) as (file, text), progress(f"reading {path.name}", "puzzles") as watch:
        lines = _lines(path, text)
        while block := list(itertools.islice(lines, _BLOCK)):
            kind = kind or kind_of_text(block[0].question)
            cells, answers = _checked(path, kind, block)
            parts.append((cells, answers, kind.classes(cells)))
            numbers += [line.number for line in block]
            watch(file.tell(), size, len(numbers))
    if kind is None:
        raise _no_puzzles(path)
    cells, answers, classes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _Content(kind, cells, answers, classes, np.array(numbers))


def _no_puzzles(path: Path) -> ConfigError:
    return ConfigError(f"--dataset {path}: has no puzzles, only a header; add some")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, TextIO]]:
    """Open (the file, whose position shows the progress, and its text). Invalid text becomes unknown symbols."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        unpacked = stack.enter_context(gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
        yield file, stack.enter_context(io.TextIOWrapper(unpacked, "utf-8-sig", errors="replace", newline=""))


def _lines(path: Path, text: TextIO) -> Iterator[_Line]:
    """Yield the questions and answers, from the columns that the header names."""
    reader = csv.reader(text)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        question, answer = _column(path, header, _QUESTIONS), _column(path, header, _ANSWERS)
        for record in reader:
            if not record:
                continue
            if len(record) != len(header):
                raise _bad_line(path, reader.line_num, f"has {len(record)} fields, but the header has {len(header)}")
            yield _Line(reader.line_num, record[question], record[answer])
    except csv.Error as error:
        raise _bad_line(path, reader.line_num, f"is not CSV ({error})") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be unpacked ({error}); create it again") from error


def _bad_line(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {what}; correct the line or remove it")


def _column(path: Path, header: list[str], names: tuple[str, ...]) -> int:
    columns = [number for number, name in enumerate(header) if name in names]
    if len(columns) != 1:
        count = "more than one" if columns else "no"
        found = ", ".join(header) or "none"
        raise ConfigError(f"{path}:1: {count} column is named {' or '.join(names)} (found {found}); rename the columns")
    return columns[0]


# Checks


def kind_of_text(question: str) -> Kind:
    """Return the kind of a question, by its size and symbols."""
    size = len(question)
    if set(question) & set("#SG"):
        symbols = maze.SYMBOLS
    elif size in BOXES:
        return sudoku_kind(BOXES[size])
    else:
        symbols = ".123456789"
    side = math.isqrt(size)
    height, width = (side, side) if side * side == size else (1, size)
    return Kind("grid", height, width, symbols, "none")


def _checked(path: Path, kind: Kind, block: list[_Line]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells of the questions and of the answers. Raise ConfigError for the first wrong line."""
    for line in block:
        for name, text in (("question", line.question), ("answer", line.answer)):
            if len(text) != kind.size:
                other = "the question" if name == "answer" and len(line.question) == kind.size else "the first line"
                raise _bad_line(path, line.number, f"the {name} has {len(text)} cells, but {other} has {kind.size}")
    numbers = np.full(256, _UNKNOWN, np.uint8)
    for symbol, number in kind.tokenizer().numbers.items():
        numbers[ord(symbol)] = number

    def cells_of(texts: Iterator[str]) -> np.ndarray:
        joined = "".join(texts).encode("latin-1", errors="replace")
        return numbers[np.frombuffer(joined, np.uint8)].reshape(len(block), kind.size)

    cells, answers = cells_of(line.question for line in block), cells_of(line.answer for line in block)
    wrong = {
        "question": cells == _UNKNOWN,
        "answer": answers == _UNKNOWN,
        "clue": (cells != answers) & (cells != kind.empty),
        "solution": ~is_solution(answers)[:, None] if kind.symmetry == "sudoku" else np.zeros((len(block), 1), bool),
    }
    rows = np.logical_or.reduce([mask.any(axis=1) for mask in wrong.values()])
    if rows.any():
        row = int(rows.argmax())
        what = next(name for name, mask in wrong.items() if mask[row].any())
        raise _bad_line(path, block[row].number, _explain(kind, block[row], what, int(wrong[what][row].argmax())))
    return cells, answers


def _explain(kind: Kind, line: _Line, what: str, cell: int) -> str:
    position = f"cell {cell + 1}"
    if what in ("question", "answer"):
        symbol = (line.question if what == "question" else line.answer)[cell]
        valid = ", ".join(map(repr, kind.symbols))
        if kind.symbols[0] == ".":
            valid = f". or 0 (empty) and 1 to {kind.symbols[-1]}"
        return f"its {what} has {symbol!r} in {position}; valid are {valid}"
    if what == "clue":
        return f"its answer has {line.answer[cell]!r} in {position}, where the question has {line.question[cell]!r}"
    return "its answer is not a solution: a row, a column or a box does not have every digit once"


@functools.lru_cache(maxsize=1)
def _check_solutions(path: Path, *version: Any) -> None:
    """Raise ConfigError for puzzles with a second solution, which training would count as wrong."""
    kind, cells, _, _, lines = _read(*version)
    if kind.symmetry == "sudoku":
        count, what = lambda cells: solve(cells).solutions, "the puzzle has more than one solution"
    else:
        count = lambda cells: maze.shortest_paths(cells, kind.height, kind.width)[1]
        what = "the maze has more than one shortest path from S to G"
    wrong: list[int] = []
    with progress(f"checking {path.name} for second solutions", "puzzles") as watch:
        for start in range(0, len(lines), LANES):
            counts = count(cells[start : start + LANES])
            wrong += lines[start : start + LANES][counts > 1].tolist()
            watch(start + len(counts), len(lines), start + len(counts))
    if wrong:
        others = f"; so do {len(wrong) - 1:,} more of {len(lines):,}" if len(wrong) > 1 else ""
        raise _bad_line(path, wrong[0], f"{what}{others}")


# Data source


def _kind_of_file(path: Path) -> Kind:
    """Return the kind of a file, by its first line alone."""
    with reading(f"--dataset {path}"), _opened(path) as (_, text):
        first = next(_lines(path, text), None)
    if first is None:
        raise _no_puzzles(path)
    return kind_of_text(first.question)


def _open(request: OpenRequest) -> RowSource:
    cfg, share = request.cfg, request.cfg.validation_fraction
    return CsvRows(cfg.dataset, seed=request.seed, split=request.split, validation_fraction=share, cache_dir=cfg.cache_dir)


FILES = DataSource(
    takes=lambda dataset, form: (
        form == "puzzle" or (form == "auto" and dataset.endswith((".csv", ".csv.gz")) and Path(dataset).is_file())
    ),
    open=_open,
    infers=lambda values: puzzle_settings(_kind_of_file(Path(values["data.dataset"])), values),
)
