"""Which documents are held out, for evaluations or for a test: whole ones, by a hash of their text, so that all copies
of a text lie in the same part.

In a corpus of many documents each is held out or not by itself, whoever reads it. Of a few, the hash only says in what
order they are asked, until the wanted share of the text is reached: a single long one shall not be most of the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from nash_mhc.config.schema import ConfigError

PARTS = TRAINED_ON, EVALUATED, TESTED = range(3)
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
    test_below: int = 0  # those between are for the test
    test_chosen: frozenset[int] = frozenset()

    def part_of(self, key: int) -> int:
        if key < self.below or key in self.chosen:
            return EVALUATED
        return TESTED if key < self.test_below or key in self.test_chosen else TRAINED_ON

    def __contains__(self, key: int) -> bool:
        return self.part_of(key) != TRAINED_ON


def by_share(fraction: float, test: float = 0.0) -> HeldOut:
    return HeldOut(below=int(fraction * _KEYS), test_below=int((fraction + test) * _KEYS))


def survey(documents: Iterable[tuple[int, int]], fraction: float, test: float = 0.0) -> HeldOut:
    """The rule for these (key, bytes) of documents, of which no more are read than it takes to choose one."""
    sizes: dict[int, int] = {}
    shares = [share for share in (fraction, test) if share]
    for key, size in documents if shares else ():
        sizes[key] = sizes.get(key, 0) + size
        if len(sizes) >= min(math.ceil(_ENOUGH / min(shares)), _MOST):
            return by_share(fraction, test)
    if test and len(sizes) <= len(shares):
        raise ConfigError(
            f"--test-fraction {test:g}: there are only {len(sizes)} different documents to divide into {len(shares) + 1} parts"
            "; leave it out, or add some"
        )
    if len(sizes) < 2:
        return dataclasses.replace(by_share(fraction), by_piece=bool(fraction))
    total = sum(sizes.values())
    chosen = _chosen(sizes, fraction * total, leaving=len(shares)) if fraction else frozenset()
    rest = {key: size for key, size in sizes.items() if key not in chosen}
    return HeldOut(chosen=chosen, test_chosen=_chosen(rest, test * total, leaving=1) if test else frozenset())


def _chosen(sizes: Mapping[int, int], wanted: float, *, leaving: int) -> frozenset[int]:
    """Documents of about that many bytes, or else the smallest; so many at least are left for others."""
    chosen: set[int] = set()
    taken = 0
    for key in sorted(sizes):
        if taken < wanted and taken + sizes[key] <= 2 * wanted and len(chosen) < len(sizes) - leaving:
            chosen.add(key)
            taken += sizes[key]
    return frozenset(chosen or {min(sizes, key=lambda key: (sizes[key], key))})
