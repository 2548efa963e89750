"""Compute which row is read at each position of a run: keyed permutations and mixtures, without state or tables.

Step k reads the next `batch` positions, so the position is all that a checkpoint stores. The arithmetic is exact
(64-bit integers) and independent of processes, workers and library versions. Grain's shuffle and mix would tie the
order of old runs to grain's version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

_ROUNDS = 8


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """Hash 64-bit numbers with a key (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine(*numbers: int) -> int:
    """Hash a sequence of numbers to one 64-bit key."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key, number + 1)
    return int(key[0])


def draw(numbers: np.ndarray, key: int, below: np.ndarray | int) -> np.ndarray:
    """Map each 64-bit number to an almost uniform integer in [0, below)."""
    high = mix(numbers, key) >> np.uint64(32)
    return (high * np.asarray(below, np.uint64) >> np.uint64(32)).astype(np.int64)


def permuted(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """Apply the keyed permutation of 0 .. count - 1 to these positions, in constant memory.

    A Feistel network on the smallest even number of bits that holds `count`; results outside the range are permuted
    again until they fall inside (cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [combine(key, number) for number in range(_ROUNDS)]

    def permute_all(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & low
        for round_key in keys:
            left, right = right, left ^ (mix(right, round_key) & low)
        return (left << shift) | right

    out = permute_all(positions.astype(np.uint64))
    while (outside := out >= count).any():
        out[outside] = permute_all(out[outside])
    return out.astype(np.int64)


BLOCK = 4096  # positions computed together; a mixture has its exact shares (to one row) in each block


@functools.lru_cache(maxsize=64)
def _shuffled_block(number: int, count: int, seed: int, source: int) -> np.ndarray:
    """Return the rows of one block; computing all of it is cheaper in numpy than a few positions per step."""
    epochs, inside = np.divmod(np.arange(number * BLOCK, (number + 1) * BLOCK, dtype=np.int64), count)
    rows = np.empty_like(inside)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        at = slice(*np.searchsorted(epochs, (epoch, epoch + 1)))
        rows[at] = permuted(inside[at], count, combine(seed, source, epoch))
    return rows


def shuffled(positions: np.ndarray, count: int, *, seed: int, source: int = 0) -> np.ndarray:
    """Return the rows at these positions when `count` rows are read epoch after epoch, each epoch in a new order."""
    blocks, inside = np.divmod(positions.astype(np.int64), BLOCK)
    numbers, at = np.unique(blocks, return_inverse=True)
    tables = [_shuffled_block(int(number), count, seed, source) for number in numbers]
    return np.array(tables, np.int64).reshape(-1, BLOCK)[at, inside]


def exact_shares(weights: Sequence[str]) -> tuple[Fraction, ...]:
    """Normalize weights exactly; they are decimal text, because 0.1 has no exact binary form."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def counts_before(position: int, parts: Sequence[Fraction]) -> list[int]:
    """Return how many of the positions before this one (the first of a block) belong to each source."""
    total, bounds = Fraction(0), [0]
    for part in parts:
        total += part
        bounds.append(position * total.numerator // total.denominator)
    return [b - a for a, b in pairwise(bounds)]


@functools.lru_cache(maxsize=16)
def _assigned_block(number: int, parts: tuple[Fraction, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, position in that source) of every position of a block."""
    before, after = (np.array(counts_before((number + i) * BLOCK, parts)) for i in (0, 1))
    places = permuted(np.arange(BLOCK), BLOCK, combine(seed, number, BLOCK))
    owners = np.searchsorted(np.cumsum(after - before), places, side="right")
    inner = np.empty(BLOCK, np.int64)
    for source, count in enumerate(before):
        mine = owners == source
        inner[mine] = count + np.arange(mine.sum())  # in order, so that each epoch of a source ends before the next
    return owners, inner


def assign_sources(positions: np.ndarray, parts: tuple[Fraction, ...], *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, position in that source) of positions in a mixture.

    Each block holds every source's share in a keyed order, so the counts before a block follow from its number alone.
    """
    blocks, inside = np.divmod(positions.astype(np.int64), BLOCK)
    numbers, at = np.unique(blocks, return_inverse=True)
    tables = [_assigned_block(int(number), parts, seed) for number in numbers]
    owners, inner = np.array(tables, np.int64).reshape(-1, 2, BLOCK)[at, :, inside].T
    return owners, inner
