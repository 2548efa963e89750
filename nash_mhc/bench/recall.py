"""The recall task of `bench quality`: what a row said once, it asks for again, from nearby to the whole row away.

A row is pairs of a key and a value. A key that comes for the first time is a fact to remember, and costs nothing; one
that has come before has the value that it had, and that is all the loss counts. No key means anything from row to row,
so that only looking back can tell.
"""

from __future__ import annotations

import bisect
import math

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows

_NEAREST = 10  # tokens between a fact and the question for it, at least
_ROWS = 1 << 40
_HELD_OUT = 1 << 14


class RecallRows:
    """Endless rows to learn from, or some thousand others to be asked."""

    most_documents: int | None = 1
    padded_length: int | None = None
    name, held_out = "recall", ""

    def __init__(self, seq_len: int, vocab_size: int, *, seed: int, is_held_out: bool = False) -> None:
        half = vocab_size // 2
        if half - 1 < seq_len // 4 or seq_len < 4 * _NEAREST:
            raise ConfigError(
                f"--task recall: rows of {seq_len} tokens need {seq_len // 4} keys, and half of {vocab_size} tokens are keys; "
                f"set --seq-len between {4 * _NEAREST} and {4 * half - 4}"
            )
        self._T, self._V, self._seed = seq_len, vocab_size, (seed, int(is_held_out))
        self.endless = not is_held_out

    @property
    def identity(self) -> str:
        return f"recall-1 {self._T} {self._V} {self._seed}"

    def __len__(self) -> int:
        return _ROWS if self.endless else _HELD_OUT

    def epochs(self, position: int) -> dict[str, float]:
        return {}

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        return Rows(*map(np.stack, zip(*(self[int(i)] for i in indices), strict=True)))

    def __getitem__(self, index: int) -> Rows:
        rng = np.random.default_rng((*self._seed, index))
        T, half = self._T, self._V // 2
        pairs = -(-(T + 1) // 2)
        keys, values = rng.permutation(np.arange(1, half)), rng.integers(half, self._V, half)
        # How far back is drawn evenly on a logarithmic scale, so that every octave is asked for alike.
        back = np.exp(rng.uniform(math.log(_NEAREST), math.log(T), pairs)) / 2
        asks = rng.random(pairs) < 0.5
        facts = 0
        seen: list[tuple[int, int]] = []  # every fact's (last pair, number), the one that was longest unseen first
        tokens, weights = np.zeros((pairs, 2), np.int32), np.zeros((pairs, 2), np.float32)
        for pair in range(pairs):
            # The fact that was last seen as long ago as was drawn, or nearly so, but not just now.
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
    """[..., T]: how many tokens ago each token was last there, 0 where it never was."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    found = np.zeros(flat.shape, np.int64)
    for row, tokens in enumerate(flat):
        last: dict[int, int] = {}
        for t, token in enumerate(tokens.tolist()):
            if token in last:
                found[row, t] = t - last[token]
            last[token] = t
    return found.reshape(inputs.shape)
