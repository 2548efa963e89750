"""Choose which documents are held out for validation or test: whole documents, by a hash of their text.

All copies of a text land in the same part. In a large corpus the hash alone decides about each document. In a small one
it sets the order in which documents are chosen until the requested share of the text is reached, so that a single long
document does not become most of the held-out text.
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
_ENOUGH = 100  # expected held-out documents from which chance alone gives about the requested share of the text
_MOST_SURVEYED = 1 << 16  # documents


def key_of(parts: Iterable[bytes]) -> int:
    """Return the key of a document, given its text in parts: equal texts have equal keys."""
    digest = sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


@dataclass(frozen=True)
class HeldOut:
    """A rule that assigns keys to parts."""

    below: int = 0
    chosen: frozenset[int] = frozenset()
    by_piece: bool = False  # keys are those of pieces: there is only one document
    test_below: int = 0  # keys from `below` up to here are the test part
    test_chosen: frozenset[int] = frozenset()

    def part_of(self, key: int) -> int:
        if key < self.below or key in self.chosen:
            return EVALUATED
        return TESTED if key < self.test_below or key in self.test_chosen else TRAINED_ON


def by_share(fraction: float, test: float = 0.0) -> HeldOut:
    """Return the rule that holds out these shares of all keys."""
    return HeldOut(below=int(fraction * _KEYS), test_below=int((fraction + test) * _KEYS))


def choose_held_out(documents: Iterable[tuple[int, int]], fraction: float, test: float = 0.0) -> HeldOut:
    """Choose which documents to hold out, given the (key, size in bytes) of each.

    Stop reading once there are enough documents to split by hash alone.
    """
    sizes: dict[int, int] = {}
    shares = [share for share in (fraction, test) if share]
    for key, size in documents if shares else ():
        sizes[key] = sizes.get(key, 0) + size
        if len(sizes) >= min(math.ceil(_ENOUGH / min(shares)), _MOST_SURVEYED):
            return by_share(fraction, test)
    if test and len(sizes) <= len(shares):
        parts = f"{len(sizes)} different documents cannot be divided into {len(shares) + 1} splits"
        raise ConfigError(f"--test-fraction {test:g}: {parts}; leave it out, or add documents")
    if len(sizes) < 2:
        return dataclasses.replace(by_share(fraction), by_piece=bool(fraction))
    total = sum(sizes.values())
    chosen = _choose(sizes, fraction * total, leaving=len(shares)) if fraction else frozenset()
    rest = {key: size for key, size in sizes.items() if key not in chosen}
    return HeldOut(chosen=chosen, test_chosen=_choose(rest, test * total, leaving=1) if test else frozenset())


def _choose(sizes: Mapping[int, int], wanted: float, *, leaving: int) -> frozenset[int]:
    """Choose documents of about `wanted` bytes, or else the smallest one; at least `leaving` documents remain."""
    chosen: set[int] = set()
    total = 0
    for key in sorted(sizes):
        if total < wanted and total + sizes[key] <= 2 * wanted and len(chosen) < len(sizes) - leaving:
            chosen.add(key)
            total += sizes[key]
    return frozenset(chosen or {min(sizes, key=lambda key: (sizes[key], key))})
