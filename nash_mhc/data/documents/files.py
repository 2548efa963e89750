"""Which files a dataset's name stands for, and what kind of document each of them holds."""

from __future__ import annotations

import glob
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nash_mhc.config.schema import ConfigError


class Format(NamedTuple):
    """What files of an ending of the user's own hold."""

    read: Callable[[BinaryIO], Iterator[str | dict[str, Any]]]  # a text or a record a document, from a file's bytes
    version: str  # part of the data's identity: another one makes other data of the same files


FORMATS: dict[str, Format] = {}


def register_format(ending: str, read: Callable[[BinaryIO], Iterator[str | dict[str, Any]]], *, version: str = "1") -> None:
    """Files with this ending (`.fasta`), packed ones (`.fasta.gz`) too, hold the documents that `read(file)` yields.

    A record has the fields that a JSON line would have. Raise the `version` when `read` makes other documents of the
    same file: what was prepared before is then not taken for it.
    """
    ending = ending.lower()  # as the endings of files are compared
    if not ending.startswith(".") or "." in ending[1:] or ending in {*_KINDS, *_TEXT, *_PACKED}:
        raise ConfigError(f"{ending!r}: must be an ending such as .fasta that has no format yet")
    FORMATS[ending] = Format(read, version)


_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# Files of a folder that are a document each, unless --extensions says otherwise: prose, and source code.
_TEXT = frozenset(
    ".txt .text .md .markdown .mdx .rst .adoc .org .tex .py .pyi .pyx .js .mjs .jsx .ts .tsx .c .h .cc .cpp .cxx .hh .hpp .hxx "
    ".cu .cuh .m .mm .java .kt .scala .groovy .go .rs .rb .php .pl .pm .lua .r .jl .swift .cs .fs .hs .ml .mli .clj .ex .exs "
    ".erl .lisp .el .scm .f .f90 .zig .nim .d .dart .v .sv .vhd .sh .bash .zsh .fish .ps1 .sql .proto .cmake".split()
)
_PACKED = {".gz": "gzip", ".zst": "zstd"}


def ending_of(path: Path) -> str:
    """`.txt` of a.txt and of a.txt.gz."""
    return (path.suffix if path.suffix not in _PACKED else Path(path.stem).suffix).lower()


def kind_of(path: Path) -> str:
    """`jsonl`, `parquet`, `registered`, or else `text`."""
    return "registered" if ending_of(path) in FORMATS else _KINDS.get(ending_of(path), "text")


def parsed_endings(text: str) -> frozenset[str]:
    """`.md,py` -> .md and .py; ConfigError for what is no list of endings."""
    found = [word.strip().lower() for word in text.replace(" ", ",").split(",") if word.strip()]
    if not found or any(not word.strip(".") or set(word) & set("/*?") for word in found):
        raise ConfigError(f"--extensions {text!r}: must be the endings of files, such as .md,.py")
    return frozenset("." + word.lstrip(".") for word in found)


class Found(NamedTuple):
    paths: list[Path]
    left_out: dict[str, int]  # files of a folder by their ending, the most frequent first


def counted_endings(endings: dict[str, int], most: int = 6) -> str:
    """`12 .png, 1 without an ending and 3 others`"""
    named = [f"{count} {ending or 'without an ending'}" for ending, count in list(endings.items())[:most]]
    rest = sum(list(endings.values())[most:])
    return ", ".join(named) + (f" and {rest} others" if rest else "")


def _most_first(endings: Counter[str]) -> dict[str, int]:
    return dict(sorted(endings.items(), key=lambda entry: (-entry[1], entry[0])))


def _in_folder(folder: Path) -> Iterable[Path]:
    """Every file in it, but what is hidden."""
    for path in folder.rglob("*"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and not path.is_dir():
            yield path


def find_files(dataset: str, extensions: str | None = None) -> Found:
    """The files that a file name, a folder or a glob stands for, sorted by name; ConfigError when there is none."""
    wanted = _TEXT | frozenset(FORMATS) | (frozenset(_KINDS) - {".json"}) if extensions is None else parsed_endings(extensions)
    path, left_out = Path(dataset), Counter[str]()
    if path.is_file():
        return Found([path], {})
    if path.is_dir():
        there_are = list(_in_folder(path))
        found = [file for file in there_are if ending_of(file) in wanted]
        if not found and extensions is None:  # beside other files, a .json is rarely text: settings of a program, most likely
            found = [file for file in there_are if ending_of(file) == ".json"]
        left_out.update(ending_of(file) for file in {*there_are} - {*found})
        if not found:
            there = f"; there are {counted_endings(_most_first(left_out))}" if left_out else ""
            remedy = "name the endings of its text files with --extensions" if left_out else "is it the right one?"
            raise ConfigError(f"--dataset {dataset}: no file with text in this folder{there}; {remedy}")
    else:
        found = [Path(p) for p in glob.glob(dataset, recursive=True) if Path(p).is_file()]
        if not found:
            raise ConfigError(f"--dataset {dataset}: no file matches")
    return Found(sorted(found, key=lambda p: p.as_posix()), _most_first(left_out))


def open_unpacked(path: Path) -> io.BufferedReader:
    """Arrow's decompression, as it also says when the file is cut; zstandard's own reader would just end there."""
    import pyarrow as pa

    if packing := _PACKED.get(path.suffix):
        return io.BufferedReader(pa.input_stream(str(path), compression=packing), 1 << 20)
    return path.open("rb")
