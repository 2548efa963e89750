"""The recall task of `bench quality`: sequences of key-value pairs that repeat at all distances.

The first occurrence of a key is a fact, which the loss ignores. Later occurrences have the same value, and only these
count. Keys are random in each sequence, so only looking back can answer.
"""

from __future__ import annotations

import bisect
import math

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows, RowSource

_NEAREST = 10  # smallest distance between a fact and its question, in tokens
_ROWS = 1 << 40
_HELD_OUT = 1 << 14


class RecallRows(RowSource):
    """Unlimited training sequences, or a fixed held-out set."""

    most_documents: int | None = 1
    name = "recall"

    def __init__(self, seq_len: int, vocab_size: int, *, seed: int, is_held_out: bool = False) -> None:
        half = vocab_size // 2
        if half - 1 < seq_len // 4 or seq_len < 4 * _NEAREST:
            raise ConfigError(
                f"--task recall: --seq-len {seq_len} needs {seq_len // 4} keys, but a vocabulary of {vocab_size} allows "
                f"{half - 1}; "
                f"set --seq-len between {4 * _NEAREST} and {4 * half - 4}"
            )
        self._T, self._V, self._seed = seq_len, vocab_size, (seed, int(is_held_out))
        self.endless = not is_held_out
        self.identity = f"recall-1 {seq_len} {vocab_size} {self._seed}"

    def __len__(self) -> int:
        return _ROWS if self.endless else _HELD_OUT

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        return Rows(*map(np.stack, zip(*(self[int(i)] for i in indices), strict=True)))

    def __getitem__(self, index: int) -> Rows:
        rng = np.random.default_rng((*self._seed, index))
        T, half = self._T, self._V // 2
        pairs = -(-(T + 1) // 2)
        keys, values = rng.permutation(np.arange(1, half)), rng.integers(half, self._V, half)
        # Distances are uniform on a logarithmic scale, so every octave is equally frequent.
        back = np.exp(rng.uniform(math.log(_NEAREST), math.log(T), pairs)) / 2
        asks = rng.random(pairs) < 0.5
        facts = 0
        seen: list[tuple[int, int]] = []  # (last pair, number) of every fact, the oldest first
        tokens, weights = np.zeros((pairs, 2), np.int32), np.zeros((pairs, 2), np.float32)
        for pair in range(pairs):
            # Choose the fact that was last seen at about the sampled distance, but not more recently than _NEAREST.
            known = bisect.bisect_right(seen, (pair - _NEAREST // 2, half))
            if known and (asks[pair] or facts == T // 4):
                at = min(bisect.bisect_left(seen, (pair - int(back[pair]), 0)), known - 1)
                _, fact = seen.pop(at)
                weights[pair, 0] = 1.0
            else:
                fact, facts = facts, facts + 1
            seen.append((pair, fact))
            tokens[pair] = keys[fact], values[fact]
        line = tokens.reshape(-1)[: T + 1]
        return Rows(line[:-1], line[1:], np.ones(T, np.int32), weights.reshape(-1)[:T])


def distances(inputs: np.ndarray) -> np.ndarray:
    """Return how many tokens ago each token [..., T] last occurred, or 0 if never."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    found = np.zeros(flat.shape, np.int64)
    for row, tokens in enumerate(flat):
        last: dict[int, int] = {}
        for t, token in enumerate(tokens.tolist()):
            if token in last:
                found[row, t] = t - last[token]
            last[token] = t
    return found.reshape(inputs.shape)
