"""What a source of rows is, and several of them read as one, by weight."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.order import BLOCK, counts_before, dealt, shares, shuffled
from nash_mhc.data.pack import Rows
from nash_mhc.storage.files import digest_of


class NothingHeldOut(ConfigError):
    """There are no rows to evaluate on, because none were asked for (--validation-fraction 0)."""


def passes(epochs: Mapping[str, float]) -> str:
    """`reads 35% of notes/`, `reads notes/ 3.2 times over`: what a run reads of each finite dataset."""
    parts = [f"{share:.0%} of {name}" if share <= 1 else f"{name} {share:.3g} times over" for name, share in epochs.items()]
    return f"reads {', '.join(parts)}" if parts else ""


# Fields that the examples of a source have after those of `Rows`, by name: dtype and shape for one example. A source
# that has some says so in an attribute `extras`; they become `Batch.extras`.
Extras = Mapping[str, tuple[str, tuple[int, ...]]]


@runtime_checkable
class RowSource(Protocol):
    endless: bool  # fresh rows for ever: no epochs, no shuffling
    most_documents: int | None  # in a row, padding counted as one; None: not known ahead
    room: int | None  # slots that a row needs for its documents to start at multiples of the alignment; None: they do

    @property
    def name(self) -> str:
        """As the user calls it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Rows: ...
    def take(self, indices: np.ndarray | list[int]) -> Rows: ...

    @property
    def identity(self) -> str:
        """Changes when the rows do."""

    @property
    def held_out(self) -> str:
        """What of the data is held out, in words; empty where the data has a split for that."""

    def epochs(self, position: int) -> dict[str, float]:
        """How often each finite dataset has been read before that position of a run."""


@runtime_checkable
class ShowsRows(Protocol):
    """A source whose rows are not text in their order."""

    def show(self, index: int) -> str:
        """A row for people, in lines."""


class Mixture:
    """Endless rows of several sources, each by its weight;
    finite ones are read again and again, in a new order each time."""

    endless = True

    def __init__(self, names: Sequence[str], sources: Sequence[RowSource], weights: Sequence[str], *, seed: int) -> None:
        self.names, self._sources, self._seed = list(names), list(sources), seed
        if not sum(map(float, weights)) or min(shares(weights)) * BLOCK < 1:
            raise ConfigError(f"--dataset {names[0]}:{weights[0]} ...: every weight must be at least 1/{BLOCK} of their sum")
        if len(set(names)) < len(names):
            raise ConfigError(f"--dataset: {max(names, key=list(names).count)} is given twice; add up its weights")
        self._parts = shares(weights)
        most = [source.most_documents for source in sources]
        self.most_documents = None if None in most else max(n for n in most if n is not None)
        self.room = max((source.room for source in sources if source.room is not None), default=None)

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def held_out(self) -> str:
        parts = [(source.name, source.held_out) for source in self._sources]
        return "; ".join(f"{name}: {text}" for name, text in parts if text)

    @property
    def identity(self) -> str:
        return digest_of([[source.identity for source in self._sources], [str(part) for part in self._parts]])

    def epochs(self, position: int) -> dict[str, float]:
        counts = counts_before(position, self._parts)
        return {
            name: count / len(source)
            for name, source, count in zip(self.names, self._sources, counts, strict=True)
            if not source.endless
        }

    def __len__(self) -> int:
        """Rows before any source would repeat itself."""
        finite = [(s, part) for s, part in zip(self._sources, self._parts, strict=True) if not s.endless]
        return min((int(len(source) / part) for source, part in finite), default=sys.maxsize)

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        """Whether each position is the first one of its row: no source has come to its end before."""
        owners, inner = dealt(positions, self._parts, seed=self._seed)
        return inner < np.array([sys.maxsize if source.endless else len(source) for source in self._sources])[owners]

    def __getitem__(self, index: int) -> Rows:
        return Rows(*(a[0] for a in self.take([index])))

    def locate(self, position: int) -> tuple[RowSource, int]:
        """The source that a position belongs to, and the row of it."""
        owners, inner = dealt(np.array([position]), self._parts, seed=self._seed)
        number, source = int(owners[0]), self._sources[int(owners[0])]
        return source, int(inner[0] if source.endless else shuffled(inner, len(source), seed=self._seed, source=number)[0])

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        """Rows at these positions of the mixture, in that order."""
        owners, inner = dealt(np.asarray(indices), self._parts, seed=self._seed)
        found: list[Rows] = []
        order: list[np.ndarray] = []
        for number, source in enumerate(self._sources):
            at = np.flatnonzero(owners == number)
            if len(at):
                mine = inner[at]
                wanted = mine if source.endless else shuffled(mine, len(source), seed=self._seed, source=number)
                found.append(source.take(wanted))
                order.append(at)
        back = np.argsort(np.concatenate(order), kind="stable")
        return Rows(*(np.concatenate(arrays)[back] for arrays in zip(*found, strict=True)))
