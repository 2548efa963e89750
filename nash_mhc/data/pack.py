"""Pack documents into rows of equal length: short documents share a row (best fit), long ones are split."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.order import shuffled


class Rows(NamedTuple):
    """Sequences of a batch. Segments number the documents of a row from 1; 0 is padding."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray  # 0 for padding and for targets that are not in the loss


# Fields that a source adds to those of `Rows`: dtype and shape per example, by name. They become `Batch.extras`.
Extras = Mapping[str, tuple[str, tuple[int, ...]]]


class NothingHeldOut(ConfigError):
    """No validation data, because none was requested (--validation-fraction 0)."""


class RowSource:
    """Rows by number, for training or evaluation. Subclasses implement `take`; defaults suit endless text."""

    name: str  # the dataset as the user named it
    identity: str  # a digest that changes when the rows change
    endless: bool = True  # generates new rows forever: no epochs, no shuffling
    examples: str = "text"  # objectives say which kind they need
    extras: Extras = {}
    held_out: str = ""  # description of what is held out; empty if the data has its own validation split
    most_documents: int | None = None  # maximum per row, padding counted as one; None: unknown
    padded_length: int | None = None  # row length once documents are moved to multiples of `align`; None: they start there

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        """Return rows by number, in that order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Rows:
        rows = self.take([index])
        return type(rows)(*(a[0] for a in rows))

    def epochs(self, position: int) -> dict[str, float]:
        """Return the epochs of each finite dataset that are read before this position."""
        return {} if self.endless else {self.name: position / len(self)}

    def rows_at(self, positions: np.ndarray, seed: int, number: int = 0) -> np.ndarray:
        """Return the rows at these positions of a run. Finite sources are read in a new order each epoch; `number` is
        that of the source in a mixture."""
        return positions if self.endless else shuffled(positions, len(self), seed=seed, source=number)

    def locate(self, position: int, seed: int) -> tuple[RowSource, int]:
        """Return the source and its row that a position of a run reads."""
        return self, int(self.rows_at(np.array([position]), seed)[0])

    def show(self, index: int) -> str:
        """Render a row that is not text; empty for text."""
        return ""


def best_fit(lengths: Sequence[int], capacity: int, most_rows: int | None = None) -> list[list[int]]:
    """Assign items to rows, longest first, each to the fullest row that can hold it; return item numbers by row.

    With `most_rows`, items that do not fit are dropped. Grain's packing works on a stream, where rows have no numbers.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free slots, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(free, (lengths[item], -1))
        if at < len(free):
            left, row = free.pop(at)
        elif most_rows is None or len(rows) < most_rows:
            left, row = capacity, len(rows)
            rows.append([])
        else:
            continue
        rows[row].append(item)
        bisect.insort(free, (left - lengths[item], row))
    return rows


class Piece(NamedTuple):
    """A piece of a document that fits in a row. Slot t reads `tokens[t]` and predicts `tokens[t + 1]`."""

    tokens: np.ndarray  # one more than there are slots
    scored: np.ndarray  # [slots]: is the target in the loss?
    document: int = 0
    offset: int = 0  # slots of the document before this piece


class StoredRows(NamedTuple):
    """Rows as they are stored on disk; `unpack` turns them into Rows."""

    tokens: np.ndarray  # [rows, T + 1]
    starts: np.ndarray  # [rows, T]: does a piece begin in this slot?
    scored: np.ndarray  # [rows, T]
    used: np.ndarray  # [rows]: slots before the padding


def split_document(
    tokens: np.ndarray, end: int, seq_len: int, *, begin: int | None, closes: bool = True, scored: np.ndarray | None = None,
    document: int = 0,
) -> list[Piece]:  # fmt: skip
    """Split a document, read as [begin, tokens...] to predict [tokens..., end], into pieces of at most `seq_len` slots.

    Without `begin`, it is read as [tokens...] and predicts all but its first token. `closes` says whether the document
    ends with these tokens. `scored` has one entry per token; the end token has that of the last one.
    """
    first, last = [] if begin is None else [begin], [end] if closes else []
    whole = np.concatenate([np.array(first, np.int32), tokens, np.array(last, np.int32)]).astype(np.int32)
    slots = max(0, len(whole) - 1)
    scored = np.ones(slots, bool) if scored is None else np.append(scored, scored[-1:])[: len(tokens) + closes][-slots:]
    pieces = []
    for start in range(0, slots, seq_len):
        stop = min(start + seq_len, slots)
        part, part_scored = whole[start : stop + 1], scored[start:stop]
        if stop - start < seq_len and not closes:
            # The document continues in another block: the target of the last token is unknown and gets no weight.
            part, part_scored = np.append(part, np.int32(end)), np.append(part_scored, False)
        pieces.append(Piece(part, part_scored, document, start))
    return pieces


def pack_pieces(
    pieces: Sequence[Piece], end: int, seq_len: int, most_rows: int | None = None, *, align: int = 1
) -> tuple[StoredRows, list[list[int]]]:
    """Pack pieces into rows, best fit; return the rows and the piece numbers of each.

    Pieces start at multiples of `align`, which divides `seq_len`. The gap up to the next start belongs to the document
    before it and has no weight, so every aligned block of `align` slots holds one document.
    """
    slots_of = [-(-len(piece.scored) // align) * align for piece in pieces]
    rows = best_fit(slots_of, seq_len, most_rows)
    count = len(rows) if most_rows is None else most_rows
    tokens = np.full((count, seq_len + 1), end, np.int32)
    starts, scored = (np.zeros((count, seq_len), bool) for _ in range(2))
    used = np.zeros(count, np.int32)
    for r, items in enumerate(rows):
        at = 0
        for item in items:
            piece = pieces[item]
            stop = at + len(piece.scored)
            tokens[r, at : stop + 1] = piece.tokens  # the next piece overwrites the token after the last slot
            starts[r, at] = True
            scored[r, at:stop] = piece.scored
            at += slots_of[item]
        used[r] = at
    return StoredRows(tokens, starts, scored, used), rows


def aligned_length(stored: StoredRows, stride: int) -> int:
    """Return the longest row, padding included, once all its pieces are moved to multiples of `stride`."""
    longest = 0
    for starts, used in zip(stored.starts, stored.used, strict=True):
        borders = [*np.flatnonzero(starts).tolist(), int(used)]
        longest = max(longest, len(starts) + sum(-(b - a) % stride for a, b in pairwise(borders)))
    return longest


def unpack(stored: StoredRows, end: int) -> Rows:
    """Return the inputs, targets, segments and weights of stored rows.

    The slot before a piece has the target `end`, never the first token of that piece.
    """
    tokens, starts, scored, used = stored
    targets = tokens[:, 1:].copy()
    targets[:, :-1][starts[:, 1:]] = end
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    segments *= np.arange(starts.shape[1]) < used[:, None]
    return Rows(np.ascontiguousarray(tokens[:, :-1]), targets, segments, scored.astype(np.float32))
