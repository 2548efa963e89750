"""Other people's puzzles: a CSV file with a question and its answer in each line, a character a cell.

What is wrong is told with the file and the line. Sudoku of 4x4 and 9x9 cells are known by their size and trained on in
all of their forms; other grids of digits, and mazes (`#`, a space, S, G, and o for the way), as they are. Refused are
lines with mistakes, sudokus with a second solution and mazes with a second shortest way.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.pack import NothingHeldOut
from nash_mhc.data.prepared.manifest import write_file
from nash_mhc.data.stories.corpus import SPLITS
from nash_mhc.data.workers import progress
from nash_mhc.kits.recursive.puzzles import maze
from nash_mhc.kits.recursive.puzzles.kinds import Grids, Kind, is_held_out, sudoku
from nash_mhc.kits.recursive.puzzles.rows import GridRows
from nash_mhc.kits.recursive.puzzles.sudoku import is_solution
from nash_mhc.kits.recursive.puzzles.sudoku_search import BOXES, LANES, solve
from nash_mhc.storage.files import digest_of, digests_of_sources

_VERSION = 1  # of the rows that are made of a file
_QUESTIONS, _ANSWERS, _RATINGS = ("question", "puzzle", "quizzes"), ("answer", "solution", "solutions"), ("rating",)
_BLOCK = 16_384  # lines that are checked together
_UNKNOWN = 255


class _Line(NamedTuple):
    number: int
    question: str
    answer: str
    rating: float


class _Read(NamedTuple):
    kind: Kind
    grids: Grids
    classes: np.ndarray
    lines: np.ndarray  # of the file: where each puzzle ends


def is_puzzle_file(dataset: str, form: str) -> bool:
    """Whether a dataset is a file of puzzles: by `--format puzzle`, or by its ending."""
    return form == "puzzle" or (form == "auto" and dataset.endswith((".csv", ".csv.gz")) and Path(dataset).is_file())


def kind_of_file(path: str | Path) -> Kind:
    """By its first line alone. ConfigError."""
    path = Path(path)
    try:
        with _opened(path) as (_, text):
            first = next(_lines(path, text), None)
    except OSError as error:
        raise ConfigError(f"--dataset {path}: cannot be read ({error.strerror or error})") from error
    if first is None:
        raise ConfigError(f"--dataset {path}: has no puzzles, only a header; add some")
    return kind_of_text(first.question)


class CsvRows(GridRows):
    """The puzzles of a file. Held out are those whose class (of a sudoku), or whose question itself, has such a hash:
    no puzzle is on both sides, however often and in whatever form it is in the file.

    `cache_dir`: stores a note that each puzzle of the file has one solution, so that the next start skips the check.
    """

    def __init__(
        self, path: str | Path, *, seed: int, split: str, validation_fraction: float, cache_dir: str | Path | None = None
    ) -> None:
        path = Path(path)
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}: there are {' and '.join(SPLITS)}")
        is_training = split == SPLITS[0]
        if not is_training and not validation_fraction:
            raise NothingHeldOut(f"--dataset {path}: nothing is held out for split {split!r}; raise --validation-fraction")
        try:
            (digest,), state = digests_of_sources([path]), path.stat()
            version = (path.absolute(), state.st_size, state.st_mtime_ns)
            kind, grids, classes, _ = _read(*version)
        except OSError as error:
            raise ConfigError(f"--dataset {path}: cannot be read ({error.strerror or error})") from error
        note = None if cache_dir is None else Path(cache_dir) / "puzzles" / f"{digest}.one-solution"
        if _counter_of(kind) and not (note is not None and note.exists()):
            _check_solutions(path, *version)
            if note is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                write_file(note, b"")
        held_out = is_held_out(classes, validation_fraction)
        mine = grids.at(held_out != is_training)
        if not len(mine.cells):
            remedy = "lower" if is_training else "raise"
            raise ConfigError(
                f"--dataset {path}: none of its {len(classes):,} puzzles is in split {split!r}; add some, or {remedy} "
                "--validation-fraction"
            )
        by = "with all of their symmetric forms" if kind.symmetry == "sudoku" else "with all of their copies"
        super().__init__(
            kind,
            mine,
            name=str(path),
            seed=seed,
            endless=is_training and kind.symmetry != "none",
            identity=digest_of(["puzzle file", _VERSION, digest, validation_fraction]),
            held_out=f"held out: {held_out.sum():,} of {len(classes):,} puzzles, {by}" if validation_fraction else "",
        )


@functools.lru_cache(maxsize=1)
def _read(path: Path, size: int, modified_ns: int) -> _Read:
    """A run opens a file for each split, and reads it once, unless it changes."""
    parts: list[Grids] = []
    classes: list[np.ndarray] = []
    numbers: list[int] = []
    kind: Kind | None = None
    with _opened(path) as (file, text), progress(f"reading {path.name}", "puzzles") as watch:
        lines, count = _lines(path, text), 0
        while block := list(itertools.islice(lines, _BLOCK)):
            kind = kind or kind_of_text(block[0].question)
            parts.append(_checked(path, kind, block))
            classes.append(kind.classes(parts[-1].cells))
            numbers += [line.number for line in block]
            count += len(block)
            watch(file.tell(), size, count)
    if kind is None:
        raise ConfigError(f"--dataset {path}: has no puzzles, only a header; add some")
    grids = Grids(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return _Read(kind, grids, np.concatenate(classes), np.array(numbers))


class _Counter(NamedTuple):
    """Counts a puzzle's solutions, up to 2."""

    of: Callable[[np.ndarray], np.ndarray]
    two: str  # what a puzzle with two is told


def _counter_of(kind: Kind) -> _Counter | None:
    """None for grids of which only the symbols are known."""
    if kind.symmetry == "sudoku":
        return _Counter(lambda cells: solve(cells).solutions, "the puzzle has more than one solution")
    if kind.symbols == maze.SYMBOLS:
        ways = functools.partial(maze.count_shortest_ways, height=kind.height, width=kind.width)
        return _Counter(ways, "the maze has more than one shortest way from S to G")
    return None


@functools.lru_cache(maxsize=1)
def _check_solutions(path: Path, *version: Any) -> None:
    """ConfigError for puzzles with a second solution: training would count it as wrong."""
    kind, grids, _, lines = _read(*version)
    counter = _counter_of(kind)
    assert counter is not None
    wrong: list[int] = []
    with progress(f"looking for second solutions in {path.name}", "puzzles") as watch:
        for at in range(0, len(lines), LANES):
            found = counter.of(grids.cells[at : at + LANES])
            wrong += lines[at : at + LANES][found > 1].tolist()
            watch(at + len(found), len(lines), at + len(found))
    if wrong:
        among = f"; so do {len(wrong) - 1:,} more of {len(lines):,}" if len(wrong) > 1 else ""
        raise _mistake(path, wrong[0], f"{counter.two}{among}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, TextIO]]:
    """The file, which knows how far it has been read, and the text in it. What is no text is no known symbol either."""
    with contextlib.ExitStack() as closing:
        file = closing.enter_context(path.open("rb"))
        unpacked = closing.enter_context(gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
        yield file, closing.enter_context(io.TextIOWrapper(unpacked, "utf-8-sig", errors="replace", newline=""))


def _lines(path: Path, text: TextIO) -> Iterator[_Line]:
    """Questions and answers as they are written, by the columns that the header names."""
    reader = csv.reader(text)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        question, answer = _column(path, header, _QUESTIONS), _column(path, header, _ANSWERS)
        rating = header.index(_RATINGS[0]) if _RATINGS[0] in header else None
        for record in reader:
            if not record:
                continue
            if len(record) != len(header):
                raise _mistake(path, reader.line_num, f"has {len(record)} fields, the header {len(header)}")
            value = 0.0 if rating is None else _rating(path, reader.line_num, record[rating])
            yield _Line(reader.line_num, record[question], record[answer], value)
    except csv.Error as error:
        raise _mistake(path, reader.line_num, f"is no CSV ({error})") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be unpacked ({error}); make it again") from error


def _mistake(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {what}; correct the line or remove it")


def _column(path: Path, header: list[str], names: tuple[str, ...]) -> int:
    found = [number for number, name in enumerate(header) if name in names]
    if len(found) != 1:
        there = ", ".join(header) or "none"
        many = "more than one" if found else "no"
        raise ConfigError(f"{path}:1: {many} column is called {' or '.join(names)} (there are {there}); name one so")
    return found[0]


def _rating(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _mistake(path, line, f"its rating {text!r} is no number")
    return value


def kind_of_text(question: str) -> Kind:
    """By a puzzle's size, and whether it is made of walls."""
    size = len(question)
    if set(question) & set("#SG"):
        symbols = maze.SYMBOLS
    elif size in BOXES:
        return sudoku(BOXES[size])
    else:
        symbols = ".123456789"
    side = math.isqrt(size)
    height, width = (side, side) if side * side == size else (1, size)
    return Kind("grid", height, width, symbols, "none")


def _checked(path: Path, kind: Kind, block: list[_Line]) -> Grids:
    """Cells of these lines; ConfigError for the first that is wrong."""
    for line in block:
        for name, text in (("question", line.question), ("answer", line.answer)):
            if len(text) != kind.size:
                whose = "the question" if name == "answer" and len(line.question) == kind.size else "the first line"
                raise _mistake(path, line.number, f"its {name} has {len(text)} cells, {whose} has {kind.size}")
    numbers = np.full(256, _UNKNOWN, np.uint8)
    numbers[list(kind.symbols.encode())] = np.arange(len(kind.symbols))
    if kind.symbols[0] == ".":
        numbers[ord("0")] = 0

    def cells_of(text: Callable[[_Line], str]) -> np.ndarray:
        joined = "".join(text(line) for line in block).encode("latin-1", errors="replace")
        return numbers[np.frombuffer(joined, np.uint8)].reshape(len(block), kind.size)

    cells, answers = cells_of(lambda line: line.question), cells_of(lambda line: line.answer)
    empty = kind.symbols.index(" ") if " " in kind.symbols else 0
    wrong = {
        "question": cells == _UNKNOWN,
        "answer": answers == _UNKNOWN,
        "clue": (cells != answers) & (cells != empty),
        "solution": ~is_solution(answers)[:, None] if kind.symmetry == "sudoku" else np.zeros((len(block), 1), bool),
    }
    rows = np.logical_or.reduce([where.any(axis=1) for where in wrong.values()])
    if rows.any():
        row = int(rows.argmax())
        what = next(name for name, where in wrong.items() if where[row].any())
        raise _mistake(path, block[row].number, _in_words(kind, block[row], what, int(wrong[what][row].argmax())))
    return Grids(cells, answers, np.array([line.rating for line in block], np.float32))


def _in_words(kind: Kind, line: _Line, what: str, cell: int) -> str:
    here = f"cell {cell + 1}"
    if what in ("question", "answer"):
        symbol = (line.question if what == "question" else line.answer)[cell]
        known = ". or 0 (empty) and 1 to " + kind.symbols[-1] if kind.symbols[0] == "." else ", ".join(map(repr, kind.symbols))
        return f"its {what} has {symbol!r} in {here}, there may be {known}"
    if what == "clue":
        return f"its answer has {line.answer[cell]!r} in {here}, where the question has {line.question[cell]!r}"
    return "its answer is no solution: a row, a column or a box does not have every digit once"
