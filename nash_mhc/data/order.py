"""Which row comes when: permutations and mixtures as functions of a position, with no state and no table.

A run's rows have positions 0, 1, 2, ...; step k reads the next `batch` of them. The position is all there is to
restore, and nothing here depends on processes, workers or the version of a library:
the arithmetic is exact, on 64-bit integers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

_ROUNDS = 8


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """Every bit of a 64-bit number and of the key moves every bit of the result (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine(*numbers: int) -> int:
    """One 64-bit key from several numbers, in their order."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key, number + 1)
    return int(key[0])


def draw(numbers: np.ndarray, key: int, below: np.ndarray | int) -> np.ndarray:
    """For each 64-bit number one of 0 .. below - 1, all but equally likely."""
    high = mix(numbers, key) >> np.uint64(32)
    return (high * np.asarray(below, np.uint64) >> np.uint64(32)).astype(np.int64)


def permuted(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """Images of positions 0..count-1 under a permutation of them that `key` chooses.

    A Feistel network on the smallest even number of bits that holds `count`, walked until it is back inside the range:
    a permutation by construction, for any round function, in constant memory.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [combine(key, turn) for turn in range(_ROUNDS)]

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & low
        for round_key in keys:
            left, right = right, left ^ (mix(right, round_key) & low)
        return (left << shift) | right

    out = once(positions.astype(np.uint64))
    while (outside := out >= count).any():
        out[outside] = once(out[outside])
    return out.astype(np.int64)


BLOCK = 4096  # positions that are looked up together; a mixture keeps its shares exactly (to one row) in each


@functools.lru_cache(maxsize=64)
def _shuffled_block(number: int, count: int, seed: int, source: int) -> np.ndarray:
    """Rows at the positions of a block: numpy is slow on a few numbers and fast on many, and steps ask for a few."""
    epochs, inside = np.divmod(np.arange(number * BLOCK, (number + 1) * BLOCK, dtype=np.int64), count)
    rows = np.empty_like(inside)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        at = slice(*np.searchsorted(epochs, (epoch, epoch + 1)))
        rows[at] = permuted(inside[at], count, combine(seed, source, epoch))
    return rows


def shuffled(positions: np.ndarray, count: int, *, seed: int, source: int = 0) -> np.ndarray:
    """Rows at these positions of an endless reading of `count` rows:
    each once an epoch, in an order of its own each epoch."""
    blocks, inside = np.divmod(positions.astype(np.int64), BLOCK)
    rows = np.empty_like(inside)
    for number in np.unique(blocks):
        at = blocks == number
        rows[at] = _shuffled_block(int(number), count, seed, source)[inside[at]]
    return rows


def shares(weights: Sequence[str]) -> tuple[Fraction, ...]:
    """Weights as exact shares of one; decimal text, because 0.1 is no binary number."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def counts_before(position: int, parts: Sequence[Fraction]) -> list[int]:
    """How many of the positions before a block's first one belong to each source; they add up to `position`."""
    total, bounds = Fraction(0), [0]
    for part in parts:
        total += part
        bounds.append(position * total.numerator // total.denominator)
    return [b - a for a, b in pairwise(bounds)]


@functools.lru_cache(maxsize=16)
def _block(number: int, parts: tuple[Fraction, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, position in that source's own reading) of every position of a block."""
    before, after = (np.array(counts_before((number + i) * BLOCK, parts)) for i in (0, 1))
    places = permuted(np.arange(BLOCK), BLOCK, combine(seed, number, BLOCK))
    owners = np.searchsorted(np.cumsum(after - before), places, side="right")
    inner = np.empty(BLOCK, np.int64)
    for source, count in enumerate(before):
        mine = owners == source
        inner[mine] = count + np.arange(mine.sum())  # in their order, so that a source's epochs come one after the other
    return owners, inner


def dealt(positions: np.ndarray, parts: tuple[Fraction, ...], *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, position within that source's own reading) of positions in a mixture.

    Every block deals each source its share, in an order of its own; so a source's count before a block follows from the
    block's number alone, and any position can be looked up at once.
    """
    blocks, inside = np.divmod(positions.astype(np.int64), BLOCK)
    owners, inner = np.empty_like(inside), np.empty_like(inside)
    for number in np.unique(blocks):
        at = blocks == number
        owners[at], inner[at] = (a[inside[at]] for a in _block(int(number), parts, seed))
    return owners, inner
