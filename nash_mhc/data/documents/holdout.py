"""Which documents are held out: whole ones, by a hash of their text, so that all copies of a text lie on the same side.

In a corpus of many documents each is held out or not by itself, whoever reads it. Of a few, the hash only says in what
order they are asked, until the wanted share of the text is reached: a single long one shall not be most of the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

_KEYS = 1 << 64
_ENOUGH = 100  # documents held out, as many as one may expect: from there on chance gives their share of the text
_MOST = 1 << 16  # documents that are looked at beforehand


def key_of(parts: Iterable[bytes]) -> int:
    """Of a document by its text, whose parts these are: equal texts have equal keys."""
    digest = sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


@dataclass(frozen=True)
class HeldOut:
    """A rule that needs nothing but the key: every process follows it alike."""

    below: int = 0
    chosen: frozenset[int] = frozenset()
    by_piece: bool = False  # the keys are those of rows of text: there is only one document

    def __contains__(self, key: int) -> bool:
        return key < self.below or key in self.chosen


def by_share(fraction: float) -> HeldOut:
    return HeldOut(below=int(fraction * _KEYS))


def survey(documents: Iterable[tuple[int, int]], fraction: float) -> HeldOut:
    """The rule for these (key, bytes) of documents, of which no more are read than it takes to choose one."""
    sizes: dict[int, int] = {}
    for key, size in documents if fraction else ():
        sizes[key] = sizes.get(key, 0) + size
        if len(sizes) >= min(math.ceil(_ENOUGH / fraction), _MOST):
            return by_share(fraction)
    if len(sizes) < 2:
        return dataclasses.replace(by_share(fraction), by_piece=bool(fraction))
    wanted, total = fraction * sum(sizes.values()), sum(sizes.values())
    chosen: set[int] = set()
    taken = 0
    for key in sorted(sizes):
        if taken < wanted and taken + sizes[key] <= 2 * wanted and taken + sizes[key] < total:
            chosen.add(key)
            taken += sizes[key]
    return HeldOut(chosen=frozenset(chosen or {min(sizes, key=lambda key: (sizes[key], key))}))
