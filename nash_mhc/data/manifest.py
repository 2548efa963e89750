"""What a folder of prepared rows holds, with a hash of every file: a changed or cut file is found when it is opened."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError

FILE = "manifest.json"
VERSION = 2  # of the files' form; another one cannot be read


@dataclass(frozen=True)
class Shard:
    """One file of rows, and the file beside it that says which document each piece is from."""

    name: str  # without the endings .rows and .origins
    rows: int
    sha256: str
    origins_sha256: str


@dataclass(frozen=True)
class Split:
    shards: tuple[Shard, ...]
    tokens: int  # targets that count
    slots: int  # that text fills; the rest is padding and alignment
    documents: int
    most_documents: int  # in one row

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """`recipe` is everything that the rows follow from; `identity` stands for the rows themselves."""

    recipe: dict[str, Any]
    files: tuple[str, ...]  # that documents came from, by the number that origins use
    splits: dict[str, Split]
    bytes: int  # of text
    empty: int  # documents without text, left out

    @property
    def identity(self) -> str:
        return digest_of(self.to_dict())

    def padding(self, split: str) -> float:
        """Share of the slots that hold no text."""
        found = self.splits[split]
        return 1 - found.slots / max(1, found.rows * self.recipe["seq_len"])

    def summary(self) -> str:
        left_out = f", {counted(self.empty, 'empty document')} left out" if self.empty else ""
        lines = [f"{self.bytes:,} bytes of text in {counted(len(self.files), 'file')}{left_out}"]
        for name, split in self.splits.items():
            lines.append(
                f"{name}: {counted(split.documents, 'document')}, {split.tokens:,} tokens that count, "
                f"{counted(split.rows, 'row')} of {self.recipe['seq_len']}, {self.padding(name):.1%} padding, "
                f"{counted(len(split.shards), 'shard')}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Manifest:
        splits = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in values["splits"].items()
        }
        return Manifest(values["recipe"], tuple(values["files"]), splits, values["bytes"], values["empty"])

    def write(self, folder: Path) -> None:
        write_whole(folder / FILE, json.dumps(self.to_dict(), indent=1, sort_keys=True).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        again = "prepare the data again"
        try:
            values = json.loads((folder / FILE).read_text())
            if values["version"] != VERSION:
                raise ConfigError(f"{folder / FILE}: form {values['version']}, this version reads {VERSION}; {again}")
            return Manifest.from_dict(values)
        except OSError as error:
            raise ConfigError(f"{folder / FILE}: cannot be read ({error.strerror}); {again}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{folder / FILE}: damaged ({type(error).__name__}: {error}); {again}") from error


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def digest_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """All of the file or nothing of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a process that was left over may be writing the same file
    part.write_bytes(data)
    part.replace(path)


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(paths: Iterable[Path]) -> list[str]:
    """Many files at once: hashing lets other threads run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest_of_file, paths))


@functools.lru_cache(maxsize=1 << 16)
def _digest_of_state(path: Path, size: int, modified_ns: int) -> str:
    return digest_of_file(path)


def digests_of_sources(paths: Iterable[Path]) -> list[str]:
    """The same for a user's files, which a run opens for each split: each is read once in a process, unless it changes."""
    states = [(path, path.stat()) for path in paths]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: _digest_of_state(s[0].absolute(), s[1].st_size, s[1].st_mtime_ns), states))


def check_files(folder: Path, expected: dict[str, tuple[int | None, str]]) -> None:
    """Compares files with their (size, hash); ConfigError names the first that differs."""
    again = "the data must be prepared again (remove the folder first)"
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ConfigError(f"{folder / name}: is missing; {again}") from None
        if size is not None and found != size:
            raise ConfigError(f"{folder / name}: has {found:,} bytes instead of {size:,}; {again}")
    found_digests = digests_of_files(folder / name for name in expected)
    for (name, (_, digest)), found_digest in zip(expected.items(), found_digests, strict=True):
        if digest != found_digest:
            raise ConfigError(f"{folder / name}: its content has changed since it was prepared; {again}")
