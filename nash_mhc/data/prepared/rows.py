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
from nash_mhc.data.pack import NothingHeldOut, Rows, RowSource, StoredRows, unpack
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


@dataclass(frozen=True)
class Records:
    """Records of fixed size in several files, read by number. Few files stay open, for corpora of many shards."""

    dataset: str  # as the user named it: the files may be in the cache
    files: tuple[Path, ...]
    counts: tuple[int, ...]  # records of each file
    size: int
    most_open: int = 256

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts))

    @functools.cached_property
    def _open(self) -> Callable[[int], _File]:
        return functools.lru_cache(maxsize=self.most_open)(lambda number: _File(self.files[number]))

    def __getstate__(self) -> dict[str, object]:  # worker processes open the files themselves
        return {k: v for k, v in self.__dict__.items() if k != "_open"}

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (file number, record in the file) of a record."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.counts[number])

    def place(self, index: int) -> str:
        """Name a record for an error message."""
        number, row = self.locate(index)
        return f"--dataset {self.dataset}: row {row} of its prepared {self.files[number].name}"

    def read(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """Return bytes [records, size]. Not by memory map: a truncated file would end the process."""
        buffer = np.empty((len(indices), self.size), np.uint8)
        for record, index in zip(buffer, map(int, indices), strict=True):
            number, row = self.locate(index)
            file = self._open(number)  # a local reference: the cache may drop it while another thread reads
            if os.preadv(file.number, [record], row * self.size) != self.size:
                raise Damaged(f"{self.place(index)}: the file is truncated; prepare it again")
        return buffer


class PreparedRows(RowSource):
    """The rows of one split of a prepared folder, whose files are hashed when it is opened."""

    endless = False

    def __init__(self, folder: Path, split: str, *, vocab_size: int | None = None, name: str = "") -> None:
        self.folder, self.manifest, self.name = folder, Manifest.read(folder), name or str(folder)
        recipe, splits = self.manifest.recipe, self.manifest.splits
        if split not in splits or not splits[split].rows:
            present = " and ".join(name for name in splits if splits[name].rows) or "none"
            kind = NothingHeldOut if split == recipe["eval_split"] and not recipe["validation_fraction"] else ConfigError
            remedy = "add text, lower --seq-len, raise --validation-fraction or choose another split"
            raise kind(f"--dataset {self.name}: has no rows of split {split!r}, there is {present}; {remedy}")
        self.identity, self.held_out = self.manifest.identity, "; ".join(self.manifest.notes)
        self.form = RowFormat(recipe["seq_len"], recipe["tokenizer"]["vocab_size"], recipe["tokenizer"]["end"])
        self.shards = splits[split].shards
        self.most_documents = splits[split].most_documents + 1  # padding counts as one
        self.padded_length = splits[split].room
        self._vocab_size = self.form.vocab_size if vocab_size is None else vocab_size
        self.records = self.records_of("rows", self.form.record.itemsize)
        check_files(folder, {f"{s.name}.rows": (s.rows * self.records.size, s.sha256) for s in self.shards})

    def records_of(self, extension: str, size: int) -> Records:
        """Return the records in the files of this extension, one per row."""
        files = tuple(self.folder / f"{shard.name}.{extension}" for shard in self.shards)
        return Records(self.name, files, tuple(shard.rows for shard in self.shards), size)

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        stored = self.form.decode(self.records.read(indices))
        # An id outside the vocabulary would silently read another embedding.
        bad = (stored.tokens >= self._vocab_size).any(axis=1) | (stored.used > self.form.seq_len)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            problem = f"token {stored.tokens[row].max()} is outside the vocabulary of {self._vocab_size}"
            raise ConfigError(f"{self.records.place(int(indices[row]))}: {problem}; prepare it with the run's --tokenizer")
        return unpack(stored, self.form.end)
