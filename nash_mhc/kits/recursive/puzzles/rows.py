"""Puzzles as rows: the cells as given are the inputs, the solution's cells the targets, in the same places."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from nash_mhc.config.fields import ConfigError
from nash_mhc.data.order import combine, mix, shuffled
from nash_mhc.data.pack import Rows
from nash_mhc.data.stories.corpus import SPLITS
from nash_mhc.kits.recursive.puzzles.kinds import Grids, Kind, find_kind
from nash_mhc.kits.recursive.puzzles.pool import VERSION, open_pool, sizes_of
from nash_mhc.storage.files import digest_of

_SYMMETRY = 3  # what random numbers are for
_QUESTION, _ANSWER = "question", "solution"


class GridRows:
    """Rows of these puzzles, each one document without padding.

    Endless, where the puzzles have symmetries: each pass reads every puzzle once, in an order of its own, and each time
    by another symmetry, which follows from the seed and the row's number. Otherwise every puzzle once, as it is.
    """

    examples = "puzzles"
    most_documents: int | None = 1
    room: int | None = None

    def __init__(self, kind: Kind, grids: Grids, *, name: str, seed: int, endless: bool, identity: str, held_out: str) -> None:
        self.kind, self.name, self.endless, self.identity, self.held_out = kind, name, endless, identity, held_out
        self._grids, self._seed = grids, seed

    @property
    def seq_len(self) -> int:
        return self.kind.size

    @property
    def puzzles(self) -> int:
        """How many there are, each counted once."""
        return len(self._grids.cells)

    def __len__(self) -> int:
        return sys.maxsize if self.endless else self.puzzles

    def epochs(self, position: int) -> dict[str, float]:
        return {} if self.endless else {self.name: position / len(self)}

    def __getitem__(self, index: int) -> Rows:
        return Rows(*(a[0] for a in self.take([index])))

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        at = np.asarray(indices, np.int64)
        cells, answers, _ = self._grids.at(self._puzzles(at))
        if self.endless:
            cells, answers = self.kind.moved(cells, answers, mix(at, combine(self._seed, _SYMMETRY)))
        inputs, targets = cells.astype(np.int32), answers.astype(np.int32)
        return Rows(inputs, targets, np.ones_like(inputs), np.ones(inputs.shape, np.float32))

    def show(self, index: int) -> str:
        """The cells as given, and beside them the solution."""
        row = self[index]
        given, answer = (self.kind.tokenizer().grid_text(a, self.kind.width).split("\n") for a in (row.inputs, row.targets))
        width = max(len(_QUESTION), self.kind.width)
        pairs = zip([_QUESTION, *given], [_ANSWER, *answer], strict=True)
        return "\n".join(f"{left:<{width}}   {right}" for left, right in pairs)

    def ratings(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """How hard these rows are: guesses that a sudoku needs, steps of a maze's way, or what the file says."""
        return self._grids.ratings[self._puzzles(np.asarray(indices, np.int64))]

    def _puzzles(self, at: np.ndarray) -> np.ndarray:
        """Which puzzle each row is made of."""
        if len(at) and not 0 <= at.min() <= at.max() < len(self):
            raise IndexError(f"{self.name} has rows 0 to {len(self) - 1}, not {at.min()} to {at.max()}")
        return shuffled(at, self.puzzles, seed=self._seed) if self.endless else at


class PuzzleRows(GridRows):
    """Made puzzles: sudoku4, sudoku9, maze, or a maze of another size (maze21x21).

    Those to train on never end; those held out are a fixed number, each of a class of which none is trained on.
    """

    def __init__(
        self,
        kind: str,
        *,
        seed: int,
        split: str,
        cache_dir: str | Path,
        train_puzzles: int | None = None,
        validation_puzzles: int | None = None,
    ) -> None:
        found = find_kind(kind)
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}: there are {' and '.join(SPLITS)}")
        asked = (train_puzzles, validation_puzzles)
        sizes = tuple(own if given is None else given for given, own in zip(asked, sizes_of(found), strict=True))
        if min(sizes) < 1:
            raise ConfigError(f"--dataset {kind}: {sizes[0]} puzzles to train on and {sizes[1]} held out; ask for at least 1")
        pool = open_pool(found, (sizes[0], sizes[1]), Path(cache_dir))
        super().__init__(
            found,
            pool.train if split == SPLITS[0] else pool.validation,
            name=kind,
            seed=seed,
            endless=split == SPLITS[0],
            identity=digest_of(["puzzles", VERSION, found.name, pool.digest]),
            held_out="",
        )
