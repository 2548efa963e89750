"""Prepared rows on disk: records of fixed size, read by number with `pread` and checked.

A record has the number of used slots, T + 1 tokens, and two bits per slot (a piece starts here; the target is in the
loss): about 2.25 bytes per token. Memory does not grow with the files.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import NothingHeldOut, Rows, RowSourceBase, StoredRows, unpack
from nash_mhc.data.prepared.manifest import Damaged, Manifest, check_files


@dataclass(frozen=True)
class RowFormat:
    seq_len: int
    vocab_size: int
    end: int

    @property
    def record(self) -> np.dtype:
        token = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        tokens, bits = (self.seq_len + 1,), (-(-self.seq_len // 8),)
        return np.dtype([("used", "<u4"), ("tokens", token, tokens), ("starts", "u1", bits), ("scored", "u1", bits)])

    def encode(self, stored: StoredRows) -> bytes:
        records = np.empty(len(stored.used), self.record)
        records["used"], records["tokens"] = stored.used, stored.tokens
        records["starts"], records["scored"] = (np.packbits(a, axis=1) for a in (stored.starts, stored.scored))
        return records.tobytes()

    def decode(self, buffer: np.ndarray) -> StoredRows:
        """Decode bytes [rows, record size]."""
        records = buffer.view(self.record)[:, 0]
        starts, scored = (np.unpackbits(records[name], axis=1, count=self.seq_len) for name in ("starts", "scored"))
        used, tokens = records["used"].astype(np.int32), records["tokens"].astype(np.int32)
        return StoredRows(tokens, starts.view(bool), scored.view(bool), used)


class _File:
    """An open file that closes when its last user, in any thread, releases it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


def few_open_files(paths: list[Path], at_once: int = 256) -> Callable[[int], _File]:
    """Return a function that opens these files by number; at most `at_once` stay open, for corpora of many shards."""
    return functools.lru_cache(maxsize=at_once)(lambda number: _File(paths[number]))


class PreparedRows(RowSourceBase):
    """The rows of one split of a prepared folder, whose files are hashed when it is opened."""

    endless = False

    def __init__(self, folder: Path, split: str, *, vocab_size: int | None = None, name: str = "") -> None:
        self.folder, self.manifest, self.name = folder, Manifest.read(folder), name or str(folder)
        recipe, splits = self.manifest.recipe, self.manifest.splits
        if split not in splits or not splits[split].rows:
            present = " and ".join(name for name in splits if splits[name].rows) or "none"
            kind = NothingHeldOut if split == recipe["eval_split"] and not recipe["validation_fraction"] else ConfigError
            raise kind(
                f"--dataset {self.name}: has no rows of split {split!r}, there is {present}; add text, lower --seq-len, raise "
                f"--validation-fraction, or choose another --split or --eval-split"
            )
        self.form = RowFormat(recipe["seq_len"], recipe["tokenizer"]["vocab_size"], recipe["tokenizer"]["end"])
        self.shards = splits[split].shards
        self.most_documents = splits[split].most_documents + 1  # padding counts as one
        self.padded_length = splits[split].room
        self.held_out = "; ".join(self.manifest.notes)
        self._vocab_size = self.form.vocab_size if vocab_size is None else vocab_size
        self._paths = [folder / f"{shard.name}.rows" for shard in self.shards]
        self._ends = list(accumulate(shard.rows for shard in self.shards))
        self._open = few_open_files(self._paths)
        size = self.form.record.itemsize
        check_files(folder, {f"{s.name}.rows": (s.rows * size, s.sha256) for s in self.shards})

    @property
    def identity(self) -> str:
        return self.manifest.identity

    def epochs(self, position: int) -> dict[str, float]:
        return {self.name: position / len(self)}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, object]:  # worker processes open the files themselves
        return {k: v for k, v in self.__dict__.items() if k != "_open"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open = few_open_files(self._paths)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (shard number, row in the shard) of a row."""
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard] - self.shards[shard].rows)

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        """Return rows by number, in that order."""
        size = self.form.record.itemsize
        buffer = np.empty((len(indices), size), np.uint8)
        for at, index in enumerate(indices):
            shard, row = self.locate(int(index))
            file = self._open(shard)  # a local reference: the cache may drop it while another thread reads
            if os.preadv(file.number, [buffer[at]], row * size) != size:
                raise Damaged(f"{self._place(index)}: the file is truncated; prepare the data again")
        stored = self.form.decode(buffer)
        self._check(stored, indices)
        return unpack(stored, self.form.end)

    def _place(self, index: int | np.integer) -> str:
        """Name a row by the user's dataset: the folder may be one of the cache."""
        shard, row = self.locate(int(index))
        return f"--dataset {self.name}: row {row} of its prepared {self.shards[shard].name}.rows"

    def _check(self, stored: StoredRows, indices: np.ndarray | list[int]) -> None:
        """ConfigError for an id outside the vocabulary, which would silently read another embedding."""
        bad = (stored.tokens >= self._vocab_size).any(axis=1) | (stored.used > self.form.seq_len)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ConfigError(
                f"{self._place(indices[row])}: token {stored.tokens[row].max()} is outside the vocabulary of "
                f"{self._vocab_size}; prepare the data with the run's --tokenizer"
            )
