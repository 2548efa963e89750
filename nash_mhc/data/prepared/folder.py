"""A prepared folder: manifest.json, with counts, settings and a hash of every file, and files of rows.

A row is a record of fixed size: the number of used slots, T + 1 tokens, and two bits per slot (a piece starts here; the
target is in the loss), about 2.25 bytes per token. Memory does not grow with the files. Records of fixed size need no
index, as ArrayRecord has.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.files import counted_endings
from nash_mhc.data.pack import NothingHeldOut, Rows, RowSource, StoredRows, unpack
from nash_mhc.storage.files import check_types, digest_of, digests_of_files, read_json, reading, write_atomic

FILE = "manifest.json"
VERSION = 3  # of the file format; other versions cannot be read
_AGAIN = "prepare the data again"


class Damaged(ConfigError):
    """A file that has changed since it was written."""


@dataclass(frozen=True)
class Shard:
    """A file of rows, and a file of origins, which has the source of each piece."""

    name: str  # without .rows and .origins
    rows: int
    sha256: str
    origins_sha256: str


@dataclass(frozen=True)
class Split:
    shards: tuple[Shard, ...]
    tokens: int  # targets in the loss
    slots: int  # filled with text; the rest is padding and alignment
    documents: int
    most_documents: int  # in one row
    room: int | None  # longest row once its documents are moved to multiples of the alignment; None: they start there

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    recipe: dict[str, Any]  # everything that the rows depend on
    files: tuple[str, ...]  # source files, by the number that origins use
    splits: dict[str, Split]
    bytes: int  # of text
    empty: int  # skipped documents without text
    about: dict[str, Any]  # metadata that does not affect the rows: dataset, ignored files, held-out documents

    @property
    def identity(self) -> str:
        """A digest of the rows."""
        return digest_of({k: v for k, v in self.to_dict().items() if k != "about"})

    @property
    def held_out(self) -> str:
        """A description of the held-out documents; empty if there are none."""
        return self.about.get("held_out") or ""

    def padding(self, split: str) -> float:
        """Return the share of slots without text."""
        return 1 - self.splits[split].slots / max(1, self.splits[split].rows * self.recipe["seq_len"])

    def summary(self) -> str:
        empty = f", {counted(self.empty, 'empty document')} skipped" if self.empty else ""
        ignored = self.about.get("left_out")
        left_out = f"; not read: {counted_endings(ignored)} (--extensions)" if ignored else ""
        lines = [f"{self.bytes:,} bytes of text in {counted(len(self.files), 'file')}{empty}{left_out}"]
        for name, split in self.splits.items():
            lines.append(
                f"{name}: {counted(split.documents, 'document')}, {split.tokens:,} tokens in the loss, "
                f"{counted(split.rows, 'sequence')} of {self.recipe['seq_len']}, {self.padding(name):.1%} padding, "
                f"{counted(len(split.shards), 'shard')}"
            )
        return "\n".join([*lines, *filter(None, [self.held_out])])

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Manifest:
        splits = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in values["splits"].items()
        }
        rest = {key: values[key] for key in ("recipe", "bytes", "empty", "about")}
        manifest = Manifest(files=tuple(values["files"]), splits=splits, **rest)
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        """Raise KeyError, TypeError or ValueError for values that no version wrote."""
        check_types(vars(self), recipe=dict, bytes=int, empty=int, about=dict)
        check_types(self.recipe, seq_len=int, align=int, content=str, split=str, eval_split=str, validation_fraction=float)
        check_types(self.recipe["tokenizer"], fingerprint=str, vocab_size=int, end=int)
        for split in self.splits.values():
            check_types(vars(split), tokens=int, slots=int, documents=int, most_documents=int)
            for shard in split.shards:
                check_types(vars(shard), name=str, rows=int, sha256=str, origins_sha256=str)
                if Path(shard.name).name != shard.name:
                    raise ValueError(f"{shard.name!r} is not in this folder")
        if not all(isinstance(name, str) for name in self.files):
            raise TypeError("files must be names")
        kinds = {"held_out": str, "dataset": str, "left_out": dict}
        check_types(self.about, **{name: kind for name, kind in kinds.items() if self.about.get(name) is not None})

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, json.dumps(self.to_dict(), indent=1, sort_keys=True).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        values = read_json(folder / FILE, _AGAIN, Damaged)
        with reading(folder / FILE, _AGAIN, Damaged):
            if (version := values["version"]) != VERSION:
                remedy = "update nash_mhc" if version > VERSION else "remove the folder and prepare the data again"
                raise ConfigError(f"{folder / FILE}: has format version {version}, not {VERSION}; {remedy}")
            return Manifest.from_dict(values)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically. It may be lost with power; its hash, which is checked, then shows that."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a leftover process may be writing the same file
    write_atomic(path, data, part=part, durable=False)


def check_files(folder: Path, expected: dict[str, tuple[int | None, str]]) -> None:
    """Compare files with their (size, hash); raise Damaged naming the first that differs."""
    remedy = "remove the folder and prepare the data again"
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{folder / name}: is missing; {remedy}") from None
        if size is not None and found != size:
            raise Damaged(f"{folder / name}: has {found:,} bytes instead of {size:,}; {remedy}")
    digests = digests_of_files(folder / name for name in expected)
    for (name, (_, digest)), found_digest in zip(expected.items(), digests, strict=True):
        if digest != found_digest:
            raise Damaged(f"{folder / name}: the content has changed since preparation; {remedy}")


# --- rows -------------------------------------------------------------------------------------------------------------


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
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "fd" in self.__dict__:
            os.close(self.fd)


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
        for at, index in enumerate(map(int, indices)):
            number, row = self.locate(index)
            file = self._open(number)  # a local reference: the cache may drop it while another thread reads
            if os.preadv(file.fd, [buffer[at]], row * self.size) != self.size:
                raise Damaged(f"{self.place(index)}: the file is truncated; prepare the data again")
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
            raise kind(f"--dataset {self.name}: has no rows of split {split!r} (splits: {present}); {remedy}")
        self.identity, self.held_out = self.manifest.identity, self.manifest.held_out
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
            raise ConfigError(
                f"{self.records.place(int(indices[row]))}: {problem}; prepare the data with the run's --tokenizer"
            )
        return unpack(stored, self.form.end)
