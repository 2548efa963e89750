"""Documents -> rows of equal length: short ones share a row (best fit), long ones are cut into several."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Row r, slot t. Segments number the documents of a row from 1; 0 is padding. Only real targets have a weight."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray


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


def pack(documents: Sequence[np.ndarray], end: int, seq_len: int, most_rows: int | None = None, *, align: int = 1) -> Rows:
    """Packs token arrays. Each document is read as [end, tokens...] and predicts [tokens..., end].

    Documents start at multiples of `align`, which divides `seq_len`. The gap up to the next start belongs to the document
    before it and weighs nothing, so that every aligned block of `align` slots lies in one document.
    """
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    for document in documents:
        whole = np.concatenate([[end], document, [end]]).astype(np.int32)
        for start in range(0, len(whole) - 1, seq_len):
            stop = min(start + seq_len, len(whole) - 1)
            pieces.append((whole[start:stop], whole[start + 1 : stop + 1]))
    slots_of = [-(-len(inputs) // align) * align for inputs, _ in pieces]
    rows = best_fit(slots_of, seq_len, most_rows)
    count = len(rows) if most_rows is None else most_rows
    inputs, targets = (np.full((count, seq_len), end, np.int32) for _ in range(2))
    segments = np.zeros((count, seq_len), np.int32)
    weights = np.zeros((count, seq_len), np.float32)
    for r, items in enumerate(rows):
        at = 0
        for segment, item in enumerate(items, start=1):
            slots = slice(at, at + len(pieces[item][0]))
            inputs[r, slots], targets[r, slots] = pieces[item]
            weights[r, slots] = 1.0
            segments[r, at : at + slots_of[item]] = segment
            at += slots_of[item]
    return Rows(inputs, targets, segments, weights)
