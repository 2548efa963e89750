"""Prepared rows on disk: records of one size, read by number, checked on the way in.

A record is the number of slots in use, T + 1 tokens, and two bits a slot (a document starts here; the target counts):
about 2.25 bytes a token. Reading is by `pread`:
memory does not grow with the files, and processes and threads share a descriptor.
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
from nash_mhc.data.mixture import NothingHeldOut
from nash_mhc.data.pack import Laid, Rows, unfold
from nash_mhc.data.prepared.manifest import Damaged, Manifest, check_files


@dataclass(frozen=True)
class RowFormat:
    seq_len: int
    vocab_size: int
    end: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Where tokens, starts and counts begin in a record, and where it ends."""
        bits = -(-self.seq_len // 8)
        tokens = 4 + (self.seq_len + 1) * self.dtype.itemsize
        return 4, tokens, tokens + bits, tokens + 2 * bits

    @property
    def record_bytes(self) -> int:
        return self._bounds[-1]

    def encode(self, laid: Laid) -> bytes:
        used = np.ascontiguousarray(laid.used.astype("<u4")).view(np.uint8).reshape(-1, 4)
        tokens = np.ascontiguousarray(laid.tokens.astype(self.dtype)).view(np.uint8).reshape(len(used), -1)
        bits = [np.packbits(a, axis=1) for a in (laid.starts, laid.counts)]
        return np.concatenate([used, tokens, *bits], axis=1).tobytes()

    def decode(self, records: np.ndarray) -> Laid:
        """From bytes [rows, record_bytes]."""
        a, b, c, d = self._bounds
        used = np.ascontiguousarray(records[:, :a]).view("<u4")[:, 0]
        tokens = np.ascontiguousarray(records[:, a:b]).view(self.dtype)
        starts, counts = (np.unpackbits(records[:, i:j], axis=1, count=self.seq_len) for i, j in ((b, c), (c, d)))
        return Laid(tokens.astype(np.int32), starts.view(bool), counts.view(bool), used.astype(np.int32))


class _File:
    """An open file that closes when the last reader has let go of it, in whichever thread that is."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


def few_open_files(paths: list[Path], at_once: int = 256) -> Callable[[int], _File]:
    """Files by their number. A corpus may have more shards than a process may have open files."""
    return functools.lru_cache(maxsize=at_once)(lambda number: _File(paths[number]))


class PreparedRows:
    """The rows of one split of a prepared folder. Its files are hashed when it is opened."""

    endless = False

    def __init__(self, folder: Path, split: str, *, vocab_size: int | None = None, name: str = "") -> None:
        self.folder, self.manifest, self.name = folder, Manifest.read(folder), name or str(folder)
        recipe, splits = self.manifest.recipe, self.manifest.splits
        if split not in splits or not splits[split].rows:
            there = " and ".join(name for name in splits if splits[name].rows) or "none"
            kind = NothingHeldOut if split == recipe["eval_split"] and not recipe["validation_fraction"] else ConfigError
            raise kind(
                f"--dataset {self.name}: has no rows of split {split!r}, there is {there}; add text, lower --seq-len or raise "
                f"--validation-fraction, or choose another --split or --eval-split"
            )
        self.form = RowFormat(recipe["seq_len"], recipe["tokenizer"]["vocab_size"], recipe["tokenizer"]["end"])
        self.shards = splits[split].shards
        self.most_documents: int | None = splits[split].most_documents + 1  # padding counts as one
        self.room = splits[split].room
        self._vocab_size = self.form.vocab_size if vocab_size is None else vocab_size
        self._paths = [folder / f"{shard.name}.rows" for shard in self.shards]
        self._ends = list(accumulate(shard.rows for shard in self.shards))
        self._open = few_open_files(self._paths)
        size = self.form.record_bytes
        check_files(folder, {f"{s.name}.rows": (s.rows * size, s.sha256) for s in self.shards})

    @property
    def identity(self) -> str:
        return self.manifest.identity

    @property
    def held_out(self) -> str:
        return "; ".join(filter(None, (self.manifest.about.get(what) for what in ("held_out", "near_identical"))))

    def epochs(self, position: int) -> dict[str, float]:
        return {self.name: position / len(self)}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Rows:
        found = self.take([index])
        return type(found)(*(a[0] for a in found))

    def __getstate__(self) -> dict[str, object]:  # worker processes open the files for themselves
        return {k: v for k, v in self.__dict__.items() if k != "_open"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open = few_open_files(self._paths)

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the shard, row in it) of a row."""
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard] - self.shards[shard].rows)

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        """Rows by their numbers, in that order."""
        size = self.form.record_bytes
        buffer = np.empty((len(indices), size), np.uint8)
        for at, index in enumerate(indices):
            shard, row = self.locate(int(index))
            file = self._open(shard)  # held here: the cache may let go of it while another thread reads
            if os.preadv(file.number, [buffer[at]], row * size) != size:
                raise Damaged(f"{self._place(index)}: its file has become shorter; the data must be prepared again")
        laid = self.form.decode(buffer)
        self._check(laid, indices)
        return unfold(laid, self.form.end)

    def _place(self, index: int | np.integer) -> str:
        """As the user calls it: the folder may be one of a cache, whose name says nothing."""
        shard, row = self.locate(int(index))
        return f"--dataset {self.name}: row {row} of its prepared {self.shards[shard].name}.rows"

    def _check(self, laid: Laid, indices: np.ndarray | list[int]) -> None:
        """An id outside the vocabulary would read another parameter's memory, or silently the last one's."""
        if laid.tokens.max() >= self._vocab_size or laid.used.max() > self.form.seq_len:
            bad = (laid.tokens >= self._vocab_size).any(axis=1) | (laid.used > self.form.seq_len)
            row = int(np.flatnonzero(bad)[0])
            raise ConfigError(
                f"{self._place(indices[row])}: token {laid.tokens[row].max()} is outside the vocabulary of {self._vocab_size}; "
                f"prepare the data with the run's own --tokenizer"
            )
