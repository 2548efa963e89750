"""Documents -> rows of equal length: short ones share a row (best fit), long ones are cut into several."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np


class Rows(NamedTuple):
    """Row r, slot t. Segments number the documents of a row from 1; 0 is padding. Only real targets have a weight."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray


class Taught(NamedTuple):
    """Rows, and what a teacher knows of every slot."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    ids: np.ndarray  # [.., T, K]: its likeliest tokens
    logits: np.ndarray  # [.., T, K]: theirs, less the largest
    lse: np.ndarray  # [.., T]: log-sum-exp over all tokens at the run's temperature, less the largest logit


AnyRows = TypeVar("AnyRows", Rows, Taught)


def best_fit(lengths: Sequence[int], capacity: int, most_rows: int | None = None) -> list[list[int]]:
    """Puts items into rows, longest first, each where it leaves the least room; returns item numbers by row.

    With `most_rows`, items that fit nowhere any more are left out.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (slots left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[item], -1))
        if at < len(room):
            left, row = room.pop(at)
        elif most_rows is None or len(rows) < most_rows:
            left, row = capacity, len(rows)
            rows.append([])
        else:
            continue
        rows[row].append(item)
        bisect.insort(room, (left - lengths[item], row))
    return rows


class Piece(NamedTuple):
    """The part of a document that lies in one row: a token a slot, the token after the last slot, and what counts.

    The target of a slot is the token after it. Where a piece does not fill its row, that is the document's end, or the
    last slot does not count.
    """

    tokens: np.ndarray
    counts: np.ndarray  # a slot: has its target a weight?
    document: int = 0
    offset: int = 0  # slots of the document before this piece


class Laid(NamedTuple):
    """Rows as they are kept on disk; `unfold` makes Rows of them."""

    tokens: np.ndarray  # [rows, T + 1]
    starts: np.ndarray  # [rows, T]: does a piece begin in this slot?
    counts: np.ndarray  # [rows, T]
    used: np.ndarray  # [rows]: slots before the padding


def cut(
    tokens: np.ndarray,
    end: int,
    seq_len: int,
    *,
    opens: bool = True,
    closes: bool = True,
    counts: np.ndarray | None = None,
    document: int = 0,
    begin: int | None = None,
) -> list[Piece]:
    """A document read as [begin, tokens...] that predicts [tokens..., end], in pieces of at most a row.

    Without a token of its own, what begins a document is the one that ends it.

    `opens` and `closes` say whether these tokens are the document's first and last; without a begin token, a document
    is like what follows on another part. `counts` has an entry for each token and one for the end.
    """
    whole = np.concatenate([np.full(int(opens), end if begin is None else begin), tokens, np.full(int(closes), end)]).astype(
        np.int32
    )
    weighs = np.ones(len(whole), bool) if counts is None else np.append(counts[: len(tokens)], counts[-1:] if closes else [])
    weighs = weighs.astype(bool)[-(len(whole) - 1) :] if len(whole) > 1 else np.zeros(0, bool)
    pieces = []
    for start in range(0, len(whole) - 1, seq_len):
        stop = min(start + seq_len, len(whole) - 1)
        part, weigh = whole[start : stop + 1], weighs[start:stop]
        if stop - start < seq_len and not closes:
            # What comes next is not known here:
            # the last token gets a slot, so that it is a target, but predicts nothing.
            part, weigh = np.append(part, np.int32(end)), np.append(weigh, False)
        pieces.append(Piece(part, weigh, document, start))
    return pieces


def lay(
    pieces: Sequence[Piece], end: int, seq_len: int, most_rows: int | None = None, *, align: int = 1
) -> tuple[Laid, list[list[int]]]:
    """Puts pieces into rows, best fit, each at a multiple of `align`; returns the rows and the pieces of each."""
    slots_of = [-(-len(piece.counts) // align) * align for piece in pieces]
    rows = best_fit(slots_of, seq_len, most_rows)
    count = len(rows) if most_rows is None else most_rows
    tokens = np.full((count, seq_len + 1), end, np.int32)
    starts, counts = (np.zeros((count, seq_len), bool) for _ in range(2))
    used = np.zeros(count, np.int32)
    for r, items in enumerate(rows):
        at = 0
        for item in items:
            piece = pieces[item]
            stop = at + len(piece.counts)
            tokens[r, at : stop + 1] = piece.tokens  # the next piece overwrites the token after the last slot
            starts[r, at] = True
            counts[r, at:stop] = piece.counts
            at += slots_of[item]
        used[r] = at
    return Laid(tokens, starts, counts, used), rows


def room_of(laid: Laid, stride: int) -> int:
    """Slots that the fullest of these rows would need for its pieces to start at multiples of `stride`,
    padding included."""
    most = 0
    for starts, used in zip(laid.starts, laid.used, strict=True):
        borders = [*np.flatnonzero(starts).tolist(), int(used)]
        gaps = sum(-(b - a) % stride for a, b in pairwise(borders))
        most = max(most, len(starts) + gaps)
    return most


def unfold(laid: Laid, end: int) -> Rows:
    """Inputs, targets, segments and weights of laid rows.
    The target of a slot before a start is `end`, never its token."""
    tokens, starts, counts, used = laid
    targets = tokens[:, 1:].copy()
    targets[:, :-1][starts[:, 1:]] = end
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    segments *= np.arange(starts.shape[1]) < used[:, None]
    return Rows(np.ascontiguousarray(tokens[:, :-1]), targets, segments, counts.astype(np.float32))


def positions(segments: np.ndarray) -> np.ndarray:
    """Slots since the start of the document, for each slot [.., T];
    attention by rotation needs only their differences."""
    slots = np.arange(segments.shape[-1])
    begins = np.diff(segments, axis=-1, prepend=-1) != 0
    return slots - np.maximum.accumulate(np.where(begins, slots, 0), axis=-1)


def pack(
    documents: Sequence[np.ndarray],
    end: int,
    seq_len: int,
    most_rows: int | None = None,
    *,
    align: int = 1,
    begins: bool = True,
    begin: int | None = None,
) -> Rows:
    """Packs token arrays. Each document is read as [begin, tokens...] and predicts [tokens..., end]; without `begins`,
    it is read as [tokens...] and predicts all but its first token.

    Documents start at multiples of `align`, which divides `seq_len`. The gap up to the next start belongs to the
    document before it and weighs nothing, so that every aligned block of `align` slots lies in one document.
    """
    pieces = [piece for document in documents for piece in cut(document, end, seq_len, opens=begins, begin=begin)]
    return unfold(lay(pieces, end, seq_len, most_rows, align=align)[0], end)
