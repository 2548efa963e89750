"""Puzzles have one answer, symmetries preserve it, no class is in both splits, a row is a function of its number."""

import gzip
import itertools
import pickle
import re
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.loader import batches
from nash_mhc.data.order import mix
from nash_mhc.data.pack import NothingHeldOut, RowSource
from nash_mhc.data.sources import Mixture
from nash_mhc.data.stories import StoryRows
from nash_mhc.data.tokenizer import ByteTokenizer, Tokenizer
from nash_mhc.kits.recursive.puzzles import csv_file, maze, sudoku
from nash_mhc.kits.recursive.puzzles import rows as puzzle_rows
from nash_mhc.kits.recursive.puzzles.csv_file import CsvRows
from nash_mhc.kits.recursive.puzzles.rows import CellTokenizer, PuzzleRows, find_kind, is_held_out
from nash_mhc.kits.recursive.puzzles.sudoku import random_symmetries, solve, symmetry_class, transform

KINDS = ("sudoku4", "sudoku9", "maze9x9", "maze9x13")


def numbers(count: int, key: int = 0) -> np.ndarray:
    return mix(np.arange(count), key)


# --- independent of the tested code: simple, one puzzle at a time ----------------------------------------------------


def peers(n: int) -> list[set[int]]:
    box, cells = int(n**0.5), [divmod(i, n) for i in range(n * n)]
    near = lambda a, b: a[0] == b[0] or a[1] == b[1] or (a[0] // box, a[1] // box) == (b[0] // box, b[1] // box)
    return [{j for j, b in enumerate(cells) if j != i and near(a, b)} for i, a in enumerate(cells)]


PEERS = {16: peers(4), 81: peers(9)}


def solutions(puzzle: list[int], most: int = 2) -> list[list[int]]:
    """Solve by backtracking at the cell with the fewest options."""
    grid, found, near = list(puzzle), [], PEERS[len(puzzle)]
    digits = set(range(1, int(len(grid) ** 0.5) + 1))
    if any(d and any(grid[j] == d for j in near[i]) for i, d in enumerate(grid)):
        return []

    def go() -> None:
        options = [(len(o := digits - {grid[j] for j in near[i]}), i, o) for i, d in enumerate(grid) if not d]
        if not options:
            found.append(list(grid))
            return
        _, cell, choices = min(options, key=lambda option: option[:2])
        for digit in choices:
            grid[cell] = digit
            go()
            grid[cell] = 0
            if len(found) >= most:
                return

    go()
    return found


def singles_solve(puzzle: list[int]) -> bool:
    """Return whether naked and hidden singles alone solve the puzzle."""
    grid, near, n = list(puzzle), PEERS[len(puzzle)], int(len(puzzle) ** 0.5)
    box = int(n**0.5)
    units = [[r * n + c for c in range(n)] for r in range(n)] + [[r * n + c for r in range(n)] for c in range(n)]
    units += [[(a + r) * n + b + c for r in range(box) for c in range(box)] for a in range(0, n, box) for b in range(0, n, box)]
    while True:
        may = [set() if d else set(range(1, n + 1)) - {grid[j] for j in near[i]} for i, d in enumerate(grid)]
        found = {i: min(o) for i, o in enumerate(may) if len(o) == 1}
        for unit, digit in itertools.product(units, range(1, n + 1)):
            places = [i for i in unit if digit in may[i]]
            found |= {places[0]: digit} if len(places) == 1 else {}
        if not found:
            return all(grid)
        for i, digit in found.items():
            grid[i] = digit


def shortest_ways(cells: np.ndarray, width: int) -> tuple[int, int, set[int], set[int]]:
    """Return (number, length, cells of one between start and goal, all reachable cells)."""
    start, goal = (int(np.flatnonzero(cells == symbol)[0]) for symbol in (maze.START, maze.GOAL))
    steps, ways, before, queue = {start: 0}, Counter({start: 1}), {}, deque([start])
    while queue:
        here = queue.popleft()
        for there in (here - 1, here + 1, here - width, here + width):  # walls all around: none leads off the grid
            if cells[there] != maze.WALL:
                if there not in steps:
                    steps[there], before[there] = steps[here] + 1, here
                    queue.append(there)
                if steps[there] == steps[here] + 1:
                    ways[there] += ways[here]
    way, here = set(), before[goal]
    while here != start:
        way.add(here)
        here = before[here]
    return ways[goal], steps[goal], way, set(steps)


# --- sudoku ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nine() -> tuple[np.ndarray, np.ndarray]:
    """Generated 9x9 puzzles and their answers."""
    return sudoku.generate(numbers(300), 3, 1)


def test_a_made_sudoku_has_one_solution_and_no_clue_too_many(nine: tuple[np.ndarray, np.ndarray]) -> None:
    assert len(np.unique(nine[1], axis=0)) == 300
    for made, tried in ((sudoku.generate(numbers(40), 2, 1), 40), (nine, 10)):
        for puzzle, answer in zip(*(a[:10].tolist() for a in made), strict=True):
            assert solutions(puzzle) == [answer]
        cells = made[0][:30]
        size = cells.shape[1]
        less = np.where(np.eye(size, dtype=bool)[None], 0, cells[:, None]).astype(np.uint8)[cells != 0]  # a clue each
        assert (solve(less).solutions == 2).all()
        assert all(len(solutions(each)) == 2 for each in less[:tried].tolist())


def test_a_puzzle_does_not_depend_on_its_batch(nine: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    small = sudoku.generate(numbers(60), 2, 1)
    wide = solve(nine[0][:40])
    monkeypatch.setattr(sudoku, "LANES", 7)  # fewer lanes than puzzles: each lane is reused
    for box, made in ((2, small), (3, nine)):
        for got, want in zip(sudoku.generate(numbers(60)[25:37], box, 1), made, strict=True):
            assert got.tolist() == want[25:37].tolist()
    for a, b in zip(solve(nine[0][:40]), wide, strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("size", [16, 81])
def test_solutions_are_counted_as_by_backtracking(size: int, nine: tuple[np.ndarray, np.ndarray]) -> None:
    """Minimal puzzles, some with a clue less, some with a wrong one: one solution, several or none."""
    cells, answers = (a[:15].copy() for a in (nine if size == 81 else sudoku.generate(numbers(15), 2, 3)))
    for row, puzzle in enumerate(cells):
        clues = np.flatnonzero(puzzle)
        if row % 3 == 1:
            puzzle[clues[0]] = 0
        if row % 3 == 2:
            puzzle[clues[row % len(clues)]] = puzzle[clues[row % len(clues)]] % 4 + 1
    found = solve(cells)
    tried = [solutions(puzzle) for puzzle in cells.tolist()]
    assert found.solutions.tolist() == [len(each) for each in tried]
    assert {0, 1, 2} == set(found.solutions.tolist())
    is_solved = found.solutions > 0
    assert (sudoku.is_solution(found.answers) == is_solved).all()
    assert ((cells == 0) | (cells == found.answers))[is_solved].all()
    assert not found.answers[~is_solved].any()
    assert found.answers[::3].tolist() == answers[::3].tolist()


def test_every_grid_of_four_by_four_is_counted() -> None:
    assert solve(np.zeros((1, 16), np.uint8), most=1000).solutions.tolist() == [288]
    assert solve(np.zeros((2, 81), np.uint8)).solutions.tolist() == [2, 2]


def test_the_rating_is_zero_if_singles_are_enough(nine: tuple[np.ndarray, np.ndarray]) -> None:
    cells = nine[0][:60]
    guesses = solve(cells).guesses
    assert (guesses == 0).tolist() == [singles_solve(puzzle) for puzzle in cells.tolist()]
    assert 0.3 < (guesses > 0).mean() < 0.9


# --- symmetries and classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [2, 3])
def test_symmetries_preserve_the_solution_and_the_class(box: int, nine: tuple[np.ndarray, np.ndarray]) -> None:
    cells, answers = (a[:50] for a in (nine if box == 3 else sudoku.generate(numbers(50), 2, 1)))
    classes = symmetry_class(cells)
    for key in range(20):
        chosen = random_symmetries(numbers(50, key), box)
        moved, solved = transform(cells, chosen), transform(answers, chosen)
        assert sudoku.is_solution(solved).all()
        assert ((moved == 0) | (moved == solved)).all()
        assert ((moved != 0).sum(axis=1) == (cells != 0).sum(axis=1)).all()
        assert (symmetry_class(moved) == classes).all()
        assert (moved != cells).any(axis=1).mean() > 0.9
    assert (solve(moved).solutions == 1).all()


def test_every_symmetry_of_a_small_grid_comes_equally_often() -> None:
    """A puzzle without a symmetry has 128 (cells) x 24 (digits) forms."""
    puzzle = np.array([[1, 2, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 0, 0, 0, 4]], np.uint8)
    forms = transform(np.repeat(puzzle, 60_000, axis=0), random_symmetries(numbers(60_000), 2))
    counts = np.unique(forms, axis=0, return_counts=True)[1]
    assert len(counts) == 128 * 24
    assert ((counts - counts.mean()) ** 2 / counts.mean()).mean() == pytest.approx(1, abs=0.15)


def test_different_puzzles_have_different_classes(nine: tuple[np.ndarray, np.ndarray]) -> None:
    cells, answers = nine
    assert len(np.unique(symmetry_class(cells))) == 300
    changed = cells.copy()
    for puzzle, answer in zip(changed, answers, strict=True):  # a clue in another place, as many in all
        first, last = np.flatnonzero(puzzle)[0], np.flatnonzero(puzzle == 0)[-1]
        puzzle[first], puzzle[last] = 0, answer[last]
    assert not np.isin(symmetry_class(changed), symmetry_class(cells)).any()
    swapped = cells.copy()  # the same pattern with two digits exchanged in the first band alone
    band = swapped[:, :27]
    band[:] = np.array([0, 2, 1, 3, 4, 5, 6, 7, 8, 9], np.uint8)[band]
    differs = (swapped != cells).any(axis=1)
    assert (symmetry_class(swapped) != symmetry_class(cells))[differs].mean() > 0.95


def test_the_number_of_4x4_classes_is_the_published_one() -> None:
    """13 puzzles have four clues, the minimum; 13, 22 and 1 minimal puzzles have 4, 5 and 6 clues."""
    small = puzzle_rows.make_pool(find_kind("sudoku4"), puzzle_rows.SIZES["sudoku4"])
    cells = np.concatenate([part.cells for part in small])
    assert Counter((cells != 0).sum(axis=1).tolist()) == {4: 13, 5: 96, 6: 376, 7: 711, 8: 1040}
    less = np.where(np.eye(16, dtype=bool)[None], 0, cells[:, None]).astype(np.uint8)  # each without one of its cells
    is_needed = (solve(less.reshape(-1, 16)).solutions == 2).reshape(-1, 16)
    minimal = cells[(is_needed | (cells == 0)).all(axis=1)]
    assert Counter((minimal != 0).sum(axis=1).tolist()) == {4: 13, 5: 22, 6: 1}


# --- mazes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "count"), [(9, 9, 60), (15, 15, 30), (9, 21, 20), (29, 29, 3)])
def test_a_maze_has_one_shortest_path_and_the_answer_marks_it(height: int, width: int, count: int) -> None:
    made = maze.generate(numbers(count), height, width, 1)
    circles = 0
    for cells, answer, length in zip(made.cells, made.answers, made.lengths, strict=True):
        grid = cells.reshape(height, width)
        border = np.concatenate([grid[0], grid[-1], grid[:, 0], grid[:, -1]])
        assert (border == maze.WALL).all()
        ways, steps, way, reached = shortest_ways(cells, width)
        assert (ways, steps) == (1, length)
        assert reached == set(np.flatnonzero(cells != maze.WALL).tolist())
        assert set(np.flatnonzero(answer == maze.PATH).tolist()) == way
        assert (answer[answer != maze.PATH] == cells[answer != maze.PATH]).all()
        assert (cells[answer == maze.PATH] == maze.OPEN).all()
        rooms = (height // 2) * (width // 2)
        circles += len(reached) - rooms - (rooms - 1)  # openings that a tree does not need
    assert circles >= count
    assert made.lengths.mean() > (height + width) / 2
    alone = maze.generate(numbers(count)[2:3], height, width, 1)
    assert [a.tolist() for a in alone] == [a[2:3].tolist() for a in made]


@pytest.mark.parametrize(("height", "width", "forms"), [(9, 9, 8), (9, 13, 4)])
def test_a_maze_and_its_images_are_one_class(height: int, width: int, forms: int) -> None:
    kind = find_kind(f"maze{height}x{width}")
    made = maze.generate(numbers(200), height, width, 1)
    classes = kind.classes(made.cells)
    assert len(np.unique(classes)) == 200
    seen = set()
    for key in range(60):
        cells, answers = kind.transform(made.cells, made.answers, numbers(200, key))
        assert (kind.classes(cells) == classes).all()
        seen.add(cells[0].tobytes())
    assert len(seen) == forms
    for puzzle, answer in zip(cells[:20], answers[:20], strict=True):
        ways, _, way, _ = shortest_ways(puzzle, width)
        assert ways == 1
        assert set(np.flatnonzero(answer == maze.PATH).tolist()) == way
    turned = [np.rot90(made.cells[0].reshape(height, width), k) for k in (2, 1)]
    assert kind.classes(turned[0].reshape(1, -1))[0] == classes[0]
    if height == width:
        assert kind.classes(turned[1].reshape(1, -1))[0] == classes[0]


# --- pools -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("puzzles")


def opened(kind: str, cache: Path, split: str = "train", seed: int = 0) -> PuzzleRows:
    return PuzzleRows(kind, seed=seed, split=split, cache_dir=cache, sizes=(60, 5))


@pytest.mark.parametrize("name", KINDS)
def test_no_class_is_in_both_splits(name: str, cache: Path) -> None:
    kind, train, held_out = find_kind(name), opened(name, cache), opened(name, cache, "validation")
    trained_on = set(kind.classes(train.take(np.arange(1000)).inputs.astype(np.uint8)).tolist())
    evaluated = kind.classes(held_out.take(np.arange(5)).inputs.astype(np.uint8))
    assert (len(trained_on), len(set(evaluated.tolist()))) == (60, 5)
    assert not trained_on & set(evaluated.tolist())
    assert is_held_out(evaluated, puzzle_rows.SHARE).all()
    assert not is_held_out(np.array(list(trained_on), np.uint64), puzzle_rows.SHARE).any()


@pytest.mark.parametrize("name", ["sudoku9", "maze9x9"])
def test_a_smaller_pool_is_the_beginning_of_a_larger_one(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = puzzle_rows.open_pool(find_kind(name), (60, 5), cache)
    monkeypatch.setattr(puzzle_rows, "_LARGEST_BATCH", 50)
    small = puzzle_rows.make_pool(find_kind(name), (20, 2))
    for few, many in zip(small, large, strict=True):
        for a, b in zip(few, many, strict=True):
            assert a.tolist() == b[: len(a)].tolist()
    assert not set(find_kind(name).classes(large.train.cells)) & set(find_kind(name).classes(large.validation.cells))


def test_held_out_puzzles_are_sound_and_hard(cache: Path) -> None:
    rows = opened("sudoku9", cache, "validation")
    for row, puzzle in enumerate(rows.take(np.arange(5)).inputs.tolist()):
        assert solutions(puzzle) == [rows[row].targets.tolist()]
        assert not singles_solve(puzzle)


def test_the_puzzles_are_the_same_on_every_machine(cache: Path) -> None:
    """Runs resume, and are compared, on other machines: if these change, `_VERSION` must."""
    found = {name: puzzle_rows.open_pool(find_kind(name), (60, 5), cache).digest[:16] for name in KINDS}
    assert found == GOLDEN_POOLS


GOLDEN_POOLS = {
    "sudoku4": "e2891bd5c46f0ac0",
    "sudoku9": "dc4cfe1ce4e3e4a6",
    "maze9x9": "a9ad2fad537cc743",
    "maze9x13": "e8fa87e1147abd8d",
}


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "changed":
        content[len(content) // 2] ^= 1
    path.write_bytes({"changed": content, "cut": content[:-7], "empty": b""}[how])


@pytest.mark.parametrize("how", ["changed", "cut", "empty"])
def test_a_damaged_file_is_made_again(how: str, tmp_path: Path, messages: list[str]) -> None:
    before = opened("maze9x9", tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    damage(file, how)
    after = opened("maze9x9", tmp_path)
    assert any(str(file) in text and "damaged" in text for text in messages)
    assert file.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert after.identity == before.identity
    assert after.take(np.arange(9)).inputs.tolist() == before.take(np.arange(9)).inputs.tolist()


def test_an_intact_file_is_read_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened("maze9x9", tmp_path)
    monkeypatch.setattr(puzzle_rows, "make_pool", lambda *_: pytest.fail("made again"))
    assert pickle.dumps(opened("maze9x9", tmp_path)) == pickle.dumps(before)


# --- rows ------------------------------------------------------------------------------------------------------------


def as_lists(rows: object) -> list[list[object]]:
    return [array.tolist() for array in rows]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_a_function_of_its_number(name: str, cache: Path) -> None:
    for split in ("train", "validation"):
        source = opened(name, cache, split)
        far = [10**15, 10**15 + 1] if source.endless else []
        wanted = np.array([3, 0, 4, 1, 3, *far])
        together = source.take(wanted)
        for other in (source, pickle.loads(pickle.dumps(source)), opened(name, cache, split)):
            assert as_lists(other.take(wanted)) == as_lists(together)
            one_by_one = [other[int(i)] for i in wanted]
            assert [as_lists(row) for row in one_by_one] == [as_lists(a[k] for a in together) for k in range(len(wanted))]
            assert other.take(wanted[::-1]).targets.tolist() == together.targets[::-1].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_each_pass_reads_every_puzzle_once_in_another_form_and_order(name: str, cache: Path) -> None:
    source = opened(name, cache)
    rows = source.take(np.arange(180))
    assert ((rows.inputs == rows.targets) | (rows.inputs == (0 if "sudoku" in name else maze.OPEN))).all()
    if "sudoku" in name:
        assert sudoku.is_solution(rows.targets).all()
    passes = source.kind.classes(rows.inputs.astype(np.uint8)).reshape(3, 60)
    assert len({tuple(sorted(each)) for each in passes.tolist()}) == 1
    assert len({tuple(each) for each in passes.tolist()}) == 3
    assert len(np.unique(rows.inputs, axis=0)) > (150 if "9x13" not in name else 100)  # which has only four forms


def test_the_seed_changes_what_is_trained_on_and_not_what_is_held_out(cache: Path) -> None:
    for name in KINDS:
        one, two = (opened(name, cache, seed=seed) for seed in (1, 2))
        assert (one.take(np.arange(50)).inputs != two.take(np.arange(50)).inputs).any(axis=1).mean() > 0.8
        classes = [source.kind.classes(source.take(np.arange(50)).inputs.astype(np.uint8)).tolist() for source in (one, two)]
        assert classes[0] != classes[1]
        held = [opened(name, cache, "validation", seed=seed).take(np.arange(5)) for seed in (1, 2)]
        assert as_lists(held[0]) == as_lists(held[1])
        assert one.identity == two.identity


def test_rows_have_the_form_of_every_other_source(cache: Path) -> None:
    stories = StoryRows(ByteTokenizer(), seed=0, split="train", seq_len=64).take([0, 1])
    for name, size in zip(KINDS, (16, 81, 81, 117), strict=True):
        source = opened(name, cache)
        rows = source.take([5, 6])
        assert isinstance(source, RowSource)
        assert source.kind.size == size
        assert [(a.dtype, a.shape) for a in rows] == [(a.dtype, (2, size)) for a in stories]
        assert (rows.segments == 1).all()
        assert (rows.weights == 1).all()
        assert source.endless
        assert source.epochs(10**6) == {}
        held_out = opened(name, cache, "validation")
        assert (held_out.endless, len(held_out)) == (False, 5)
        assert held_out.epochs(10) == {name: 2.0}
        for index in (5, -1):
            with pytest.raises(IndexError, match="has rows 0 to 4"):
                held_out.take([0, index])
        assert len({opened(other, cache).identity for other in KINDS}) == len(KINDS)


def test_the_loader_and_mixtures_take_them(cache: Path) -> None:
    source = opened("sudoku9", cache)
    first = next(batches(source, batch_size=4, grad_accum=2, seed=0))
    assert first.inputs.reshape(8, 81).tolist() == source.take(np.arange(8)).inputs.tolist()
    mixed = Mixture(["a", "b"], [source, opened("maze9x9", cache)], ["1", "1"], seed=0)
    assert mixed.take(np.arange(64)).inputs.shape == (64, 81)


def test_rows_are_made_faster_than_a_device_reads_them(cache: Path) -> None:
    source = opened("sudoku9", cache)
    source.take(np.arange(4096))
    began = time.process_time()
    source.take(np.arange(4096, 8192))
    assert 4096 / (time.process_time() - began) > 20_000


@pytest.mark.parametrize(
    ("kind", "split", "says"),
    [
        ("sudoku5", "train", "--dataset sudoku5: unknown puzzle"),
        ("maze10x9", "train", "use maze11x9"),
        ("maze7x99", "train", "use maze9x39"),
        ("maze", "test", "split 'test': use train or validation"),
    ],
)
def test_a_mistake_is_one_line(kind: str, split: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        opened(kind, tmp_path, split)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--cache-dir .*file/x: cannot be written .*; choose another"):
        opened("sudoku4", tmp_path / "file" / "x")


# --- files of others -------------------------------------------------------------------------------------------------


def lines_of(rows: PuzzleRows, count: int, empty: str = ".") -> list[tuple[str, str]]:
    text, taken = rows.kind.tokenizer(), rows.take(np.arange(count))
    return [(text.decode(a).replace(".", empty), text.decode(b)) for a, b in zip(taken.inputs, taken.targets, strict=True)]


def write(path: Path, lines: list[tuple[str, ...]], header: str = "question,answer") -> Path:
    content = "\n".join([header, *(",".join(line) for line in lines), ""]).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def both(path: Path, fraction: float = 0.3) -> tuple[CsvRows, CsvRows]:
    train, held = (CsvRows(path, seed=0, split=split, validation_fraction=fraction) for split in ("train", "validation"))
    return train, held


@pytest.mark.parametrize(
    ("file", "header", "empty"),
    [("a.csv", "question,answer", "."), ("b.csv.gz", "Quizzes,SOLUTIONS", "0"), ("c.csv", "\ufeffpuzzle, solution", ".")],
)
def test_every_form_of_a_puzzle_in_a_file_is_on_one_side(
    file: str, header: str, empty: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_file, "_BLOCK", 7)
    given = lines_of(opened("sudoku4", cache), 180, empty)  # each of 60 in three forms
    train, held = both(write(tmp_path / file, given, header))
    assert train.puzzles + held.puzzles == 180
    assert 9 < held.puzzles < 120
    assert (train.endless, held.endless, len(held)) == (True, False, held.puzzles)
    assert (train.kind.size, train.kind.symbols) == (16, ".1234")
    texts = {tuple(line) for line in given}
    text = held.kind.tokenizer()
    for row in (held[i] for i in range(len(held))):
        assert (text.decode(row.inputs).replace(".", empty), text.decode(row.targets)) in texts
    rows = train.take(np.arange(600))
    assert sudoku.is_solution(rows.targets).all()
    trained_on, evaluated = (
        set(symmetry_class(each.inputs.astype(np.uint8)).tolist()) for each in (rows, held.take(np.arange(len(held))))
    )
    assert not trained_on & evaluated
    assert len(trained_on | evaluated) == 60
    assert held.held_out == f"held out: {held.puzzles} of 180 puzzles, with all of their symmetric forms"
    assert as_lists(pickle.loads(pickle.dumps(train)).take([7, 100])) == as_lists(train.take([7, 100]))


def test_other_grids_are_read_as_they_are(cache: Path, tmp_path: Path) -> None:
    given = lines_of(opened("maze9x9", cache), 50)
    train, held = both(write(tmp_path / "mazes.csv", given + given[:20]))
    assert (train.endless, train.kind.width, train.kind.symbols) == (False, 9, maze.SYMBOLS)
    text = train.kind.tokenizer()
    got = [[text.decode(row.inputs) for row in (part[i] for i in range(len(part)))] for part in (train, held)]
    assert sorted(got[0] + got[1]) == sorted(question for question, _ in given + given[:20])
    assert not set(got[0]) & set(got[1])
    assert train.epochs(len(train)) == {str(tmp_path / "mazes.csv"): 1.0}
    train, _ = both(write(tmp_path / "digits.csv", [(f"{i:02}..1", f"{i:02}331") for i in range(10, 99)]))
    assert (train.kind.size, train.kind.width, train.kind.symmetry) == (5, 5, "none")


def test_other_columns_are_ignored(cache: Path, tmp_path: Path) -> None:
    given = lines_of(opened("sudoku9", cache), 60)
    path = write(tmp_path / "a.csv", [("me", *line, "hard") for line in given], "source,question,answer,rating")
    train = CsvRows(path, seed=0, split="train", validation_fraction=0.0)
    assert train.puzzles == 60 and sudoku.is_solution(train.take(np.arange(30)).targets).all()
    with pytest.raises(NothingHeldOut, match="raise --validation-fraction"):
        CsvRows(path, seed=0, split="validation", validation_fraction=0.0)


def test_the_rows_of_a_file_are_known_by_its_content(cache: Path, tmp_path: Path) -> None:
    given = lines_of(opened("sudoku4", cache), 60)
    one, same = (both(write(tmp_path / name, given))[0] for name in ("a.csv", "b.csv"))
    assert one.identity == same.identity
    assert one.identity != both(write(tmp_path / "a.csv", given[1:]))[0].identity
    assert one.identity != both(tmp_path / "b.csv", 0.4)[0].identity
    assert both(tmp_path / "a.csv")[0].puzzles + both(tmp_path / "a.csv")[1].puzzles == 59  # and not what it was before


@pytest.mark.parametrize(
    ("lines", "header", "says"),
    [
        (["{q},{a}", "{q}.,{a}"], "question,answer", ":3: the question has 17 cells, but the first line has 16"),
        (["{q},{a}", "{q},{a}1"], "question,answer", ":3: the answer has 17 cells, but the question has 16"),
        (["{q},{a}", "", "{x}{q1},{a}"], "question,answer", ":4: its question has 'x' in cell 1; valid are . or 0 (empty)"),
        (["{q},{a}", "{q},15{a2}"], "question,answer", ":3: its answer has '5' in cell 2"),
        (["{q},{a}", "{q},1\u00e9{a2}"], "question,answer", ":3: its answer has '\u00e9' in cell 2"),
        (["{q},{a}", "{q},1\u4e00{a2}"], "question,answer", ":3: its answer has '\u4e00' in cell 2"),
        (["{q},{a}", "{q},{b}"], "question,answer", ":3: its answer has '2' in cell 1, where the question has '1'"),
        (["{q},{a}", "................,{c}"], "question,answer", ":3: its answer is not a solution"),
        (["{q},{a}", "{q}"], "question,answer", ":3: has 1 fields, but the header has 2"),
        (["{q},{a}"], "question,text", ":1: no column is named answer or solution or solutions (found question, text)"),
        (["{q},{a},{a}"], "question,answer,solution", ":1: more than one column is named answer"),
        ([], "question,answer", ": has no puzzles"),
        (["{one},{a}", "{q},{a}", "{q},{a}"], "question,answer", ":3: the puzzle has more than one solution; so do 1 more"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_line(lines: list[str], header: str, says: str, tmp_path: Path) -> None:
    answer = "1234341221434321"
    words = {"q": "1" + "." * 15, "a": answer, "x": "x", "q1": "." * 15, "a2": answer[2:], "one": answer}
    words |= {"b": "2143341212344321", "c": answer[:-1] + "2"}
    path = tmp_path / "bad.csv"
    path.write_text("\n".join([header, *(line.format(**words) for line in lines), ""]), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"{path}{says}")) as error:
        CsvRows(path, seed=0, split="train", validation_fraction=0.1)
    assert "\n" not in str(error.value)


def test_a_file_is_checked_for_second_solutions_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, noted = write(tmp_path / "a.csv", lines_of(opened("sudoku4", cache), 5)), tmp_path / "noted"
    opened_ = lambda: CsvRows(path, seed=0, split="train", validation_fraction=0.0, cache_dir=noted)
    opened_()
    csv_file._check_solutions.cache_clear()  # as in another process
    monkeypatch.setattr(csv_file, "solve", lambda *_: pytest.fail("they are known to have one solution each"))
    opened_()
    write(path, [("." * 16, "1234341221434321")])
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=re.escape(f"{path}:2: the puzzle has more than one solution; correct the line")):
        opened_()


def test_a_maze_with_a_second_shortest_path_is_refused(tmp_path: Path) -> None:
    """In a square both ways around are equally short; one wall makes one of them the shortest."""
    one = ("######S  ##   ##  G######", "######Soo##  o##  G######")
    blocked = tuple(text[:11] + "##" + text[13:16] + "##" + text[18:] for text in one)
    far = ("######SG ##   ##   ######",) * 2  # other ways are longer
    for lines, says in (
        (
            [blocked, one, far, one],
            ":3: the maze has more than one shortest path from S to G; so do 1 more of 4; correct the line",
        ),
        ([blocked, far, tuple(text.replace("S", "#") for text in blocked)], None),
    ):
        path = write(tmp_path / "mazes.csv", lines)
        if says is None:
            assert CsvRows(path, seed=0, split="train", validation_fraction=0.0).puzzles == 3
        else:
            with pytest.raises(ConfigError, match=re.escape(f"{path}{says}")):
                CsvRows(path, seed=0, split="train", validation_fraction=0.1)


def test_a_file_that_is_cut_or_not_there_is_one_line(cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", lines_of(opened("sudoku4", cache), 60))
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "plain.csv.gz").write_text("question,answer\n")
    (tmp_path / "bytes.csv").write_bytes(b"question,answer\n1.......\xff\xfe......,1234341221434321\n")
    for file, says in (
        (path, "cannot be unpacked"),
        (tmp_path / "plain.csv.gz", "cannot be read"),
        (tmp_path / "bytes.csv", ":2: its question has '\ufffd' in cell 9"),
        (tmp_path / "none.csv", "cannot be read (No such file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)) as error:
            CsvRows(file, seed=0, split="train", validation_fraction=0.1)
        assert "\n" not in str(error.value)
        assert str(file) in str(error.value)


def test_a_split_that_nothing_falls_into_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [("..34341221434321", "1234341221434321")])
    for split, fraction, says in (
        ("validation", 1e-9, "or raise --validation-fraction"),
        ("train", 1.0, "or lower --validation"),
    ):
        with pytest.raises(ConfigError, match=says):
            CsvRows(path, seed=0, split=split, validation_fraction=fraction)


# --- cells as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_grid_is_read_back_from_its_text(name: str, cache: Path) -> None:
    source = opened(name, cache)
    text, row = source.kind.tokenizer(), source[3]
    assert isinstance(text, Tokenizer)
    shown = text.grid_text(row.inputs, source.kind.width)
    assert [len(line) for line in shown.split("\n")] == [source.kind.width] * source.kind.height
    assert text.encode(shown).tolist() == row.inputs.tolist()
    assert text.encode(shown).dtype == np.int32
    assert text.decode(np.append(row.targets, text.end)) == text.decode(row.targets)
    assert row.targets.max() < text.end == text.begin == text.vocab_size - 1
    assert text.byte_lengths.tolist() == [1] * text.end + [0]


def test_tokens_are_the_numbers_of_cells() -> None:
    text = CellTokenizer(".1234")
    assert text.encode("0.12\n34..").tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert [each.tolist() for each in text.encode_batch(["1", "", "43"])] == [[1], [], [4, 3]]
    assert text.fingerprint == CellTokenizer(".1234").fingerprint != CellTokenizer(".1243").fingerprint
    assert text.split_special("12") == ["12"]
    mistakes = (
        lambda: text.encode("1 2"),
        lambda: text.render_chat([]),
        text.chat_form,
        *(lambda symbols=symbols: CellTokenizer(symbols) for symbols in ("", "aa", "a\n", "a\u00e9")),
    )
    for mistake in mistakes:
        with pytest.raises(ConfigError) as error:
            mistake()
        assert "\n" not in str(error.value)
