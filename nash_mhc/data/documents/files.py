"""Read documents from files, in an order that follows from the file names alone.

Decoding, parsing and tokenizing happen later, in many processes (prepared/prepare.py).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.holdout import key_of
from nash_mhc.data.documents.records import Raw, parse_both
from nash_mhc.storage.errors import first_line
from nash_mhc.storage.files import MALFORMED, digest_of, digests_of_sources, parse_json, reading

BLOCK = 4 << 20  # bytes of a text file that are read at once: a document may be larger than memory
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Unreachable(ConfigError):
    """Data that cannot be read now, for example because the network is down; prepared chunks stay on disk."""


class Corpus:
    """Documents, and their properties that are known before they are read."""

    content: str  # a digest that changes with the documents
    format: str  # record format: text, prompt, chat or fields
    names: tuple[str, ...]  # file names, for messages
    files: tuple[str, ...]  # names that the manifest records
    total: int  # bytes, for the progress bar and the chunk size
    splits: tuple[str, ...] = ()  # empty if the data is not divided
    left_out: dict[str, int] = {}  # number of ignored files by extension

    def read(self, split: str) -> Iterator[Raw]:
        """Yield the documents from beginning to end."""
        raise NotImplementedError


class Format(NamedTuple):
    """A registered file format."""

    read: Callable[[BinaryIO], Iterator[str | dict[str, Any]]]  # yields a text or a record per document
    version: str  # part of the data's identity


FORMATS: dict[str, Format] = {}

_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# Extensions of prose and source code, which are read from a folder without --extensions.
_TEXT = frozenset(
    ".txt .text .md .markdown .mdx .rst .adoc .org .tex .py .pyi .pyx .js .mjs .jsx .ts .tsx .c .h .cc .cpp .cxx .hh .hpp .hxx "
    ".cu .cuh .m .mm .java .kt .scala .groovy .go .rs .rb .php .pl .pm .lua .r .jl .swift .cs .fs .hs .ml .mli .clj .ex .exs "
    ".erl .lisp .el .scm .f .f90 .zig .nim .d .dart .v .sv .vhd .sh .bash .zsh .fish .ps1 .sql .proto .cmake".split()
)
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_RESTORE = "restore it if it is truncated"


def register_format(ending: str, read: Callable[[BinaryIO], Iterator[str | dict[str, Any]]], *, version: str = "1") -> None:
    """Register a reader for files with this extension (`.fasta`), compressed ones (`.fasta.gz`) included.

    `read(file)` yields a text, or a record with the fields of a JSON line, per document. Raise `version` when it
    returns other documents for the same file, so that data prepared before is not reused.
    """
    ending = ending.lower()
    if not ending.startswith(".") or "." in ending[1:] or ending in {*_KINDS, *_TEXT, *_COMPRESSIONS}:
        raise ConfigError(f"{ending!r}: must be an extension without a registered format, such as .fasta")
    FORMATS[ending] = Format(read, version)


def _extension(path: Path) -> str:
    """Return `.txt` for a.txt and for a.txt.gz."""
    return (path.suffix if path.suffix not in _COMPRESSIONS else Path(path.stem).suffix).lower()


def kind_of(path: Path) -> str:
    """Return `jsonl`, `parquet`, `registered` or `text`."""
    return "registered" if _extension(path) in FORMATS else _KINDS.get(_extension(path), "text")


def _parse_extensions(text: str) -> frozenset[str]:
    """Parse `.md,py` to .md and .py."""
    words = [word.strip().lower() for word in text.replace(" ", ",").split(",") if word.strip()]
    if not words or any(not word.strip(".") or set(word) & set("/*?") for word in words):
        raise ConfigError(f"--extensions {text!r}: must be comma-separated file extensions, such as .md,.py")
    return frozenset("." + word.lstrip(".") for word in words)


def counted_endings(endings: dict[str, int], most: int = 6) -> str:
    """Return `12 .png, 1 without an extension and 3 others`."""
    named = [f"{count} {ending or 'without an extension'}" for ending, count in list(endings.items())[:most]]
    rest = sum(list(endings.values())[most:])
    return ", ".join(named) + (f" and {rest} others" if rest else "")


def find_files(dataset: str, extensions: str | None = None) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a file name, a folder or a glob, sorted by name, and the ignored ones counted by extension.

    Raise ConfigError if there is no file with text. Hidden files are skipped.
    """
    path = Path(dataset)
    if path.is_file():
        return [path], {}
    if not path.is_dir():
        if not (files := [file for name in glob.glob(dataset, recursive=True) if (file := Path(name)).is_file()]):
            raise ConfigError(f"--dataset {dataset}: no file matches; check the path and the pattern")
        return sorted(files, key=Path.as_posix), {}
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
    present = [file for file in path.rglob("*") if not hidden(file) and not file.is_dir()]
    wanted = _TEXT | set(FORMATS) | (set(_KINDS) - {".json"}) if extensions is None else _parse_extensions(extensions)
    files = [file for file in present if _extension(file) in wanted]
    if not files and extensions is None:  # next to other files, a .json usually holds settings, not text
        files = [file for file in present if _extension(file) == ".json"]
    ignored = Counter(_extension(file) for file in {*present} - {*files})
    left_out = dict(sorted(ignored.items(), key=lambda entry: (-entry[1], entry[0])))
    if not files:
        found = f"; it has {counted_endings(left_out)}" if left_out else ""
        remedy = "name the extensions of its text files with --extensions" if left_out else "check the path"
        raise ConfigError(f"--dataset {dataset}: no text files in this folder{found}; {remedy}")
    return sorted(files, key=Path.as_posix), left_out


def format_of(cfg: DataConfig, fields: Collection[str] | None) -> str:
    """Return the format of records with these fields: --format, or for `auto` the one that the fields suggest."""
    if cfg.format != "auto" or fields is None or cfg.text_field in fields:
        return "text" if cfg.format == "auto" else cfg.format
    return "chat" if "messages" in fields else "prompt" if {"prompt", "response"} <= set(fields) else "text"


class Columns(NamedTuple):
    """The columns of a table that documents are made from."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    is_record: bool = True  # a document is a record of these columns, not the text of a single one

    def among(self, names: Collection[str], where: str) -> list[str]:
        """Return the columns that are present; raise ConfigError if a needed one is missing."""
        for name in self.needed:
            if name not in names:
                remedy = "--format requires it" if self.is_record else "name the text column with --text-field"
                raise ConfigError(f"{where}: no column {name!r} (columns: {', '.join(names) or 'none'}); {remedy}")
        return [*self.needed, *(name for name in self.optional if name in names)]

    def pick(self, document: Any, where: str) -> Any:
        """Return the document's record, or the text in its only column."""
        return document if self.is_record or not isinstance(document, dict) else document[self.among(document, where)[0]]


def columns_of(cfg: DataConfig, form: str) -> Columns:
    """Return the columns that a format reads."""
    if form == "fields":
        templates = parse_both(cfg.prompt_template, cfg.response_template)
        needed = tuple(dict.fromkeys(name for template in templates for name in template.needed))
        optional = dict.fromkeys(name for template in templates for name in template.optional if name not in needed)
        return Columns(needed, tuple(optional))
    named = {"text": (cfg.text_field,), "prompt": ("prompt", "response"), "chat": ("messages",)}
    return Columns(named[form], is_record=form != "text")


class Files(Corpus):
    """Text files (one document each), JSON lines (one per line), Parquet tables (one per row), registered formats."""

    def __init__(self, dataset: str, cfg: DataConfig) -> None:
        self._paths, self.left_out = find_files(dataset, cfg.extensions)
        root = Path(dataset)
        self.names = tuple(str(p) for p in self._paths)
        # Relative names: moving the folder does not change the data.
        self.files = tuple(p.relative_to(root).as_posix() if root.is_dir() else p.name for p in self._paths)
        try:
            self.total = sum(p.stat().st_size for p in self._paths)
            hashes = digests_of_sources(self._paths)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error
        versions = {end: FORMATS[end].version for p in self._paths if (end := _extension(p)) in FORMATS}
        self.content = digest_of([self.files, hashes, *([versions] if versions else [])])
        records = next((p for p in self._paths if kind_of(p) != "text"), None)
        self.format = format_of(cfg, None if records is None else first_fields(records))
        self._columns = columns_of(cfg, self.format)

    def read(self, split: str) -> Iterator[Raw]:
        for number, path in enumerate(self._paths):
            kind = kind_of(path)
            with reading(path, _RESTORE):
                if kind == "parquet":
                    contents = enumerate(read_parquet(path, self._columns), start=1)
                    yield from (Raw.of_table(number, row, content) for row, content in contents)
                elif kind == "text":
                    yield from _read_text_file(number, path)
                else:
                    with _decompressed(path) as file:
                        if kind == "registered":
                            yield from _read_registered(number, path, file, self._columns)
                        else:
                            lines = enumerate(file, start=1)
                            yield from (Raw(number, line, data, len(data), "jsonl") for line, data in lines if data.strip())


def _decompressed(path: Path) -> io.BufferedReader:
    """Open a file with Arrow's decompression, which reports truncated files; zstandard's own reader ends silently."""
    import pyarrow as pa

    if compression := _COMPRESSIONS.get(path.suffix):
        return io.BufferedReader(pa.input_stream(str(path), compression=compression), 1 << 20)
    return path.open("rb")


def first_fields(path: Path) -> list[str] | None:
    """Return the field names of the first record; None if there is none or it is invalid, which reading will report."""
    with reading(path, _RESTORE):
        if kind_of(path) == "parquet":
            with open_parquet(path) as table:
                return list(table.schema_arrow.names)
        with _decompressed(path) as file, contextlib.suppress(ValueError):
            if kind_of(path) == "registered":
                record = next(iter(FORMATS[_extension(path)].read(file)), None)
            else:
                record = parse_json(next((line for line in file if line.strip()), b"null"))
            return list(record) if isinstance(record, dict) else None
    return None


def _read_text_file(number: int, path: Path) -> Iterator[Raw]:
    """Yield a document; if it is read in several blocks, each has the key of the whole document."""
    key: int | None = None
    with _decompressed(path) as file:
        for raw in _read_blocks(number, file):
            if raw.opens and not raw.closes:
                with _decompressed(path) as again:
                    first = again.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
                    key = key_of(itertools.chain([first], iter(functools.partial(again.read, BLOCK), b"")))
            yield raw._replace(key=key)


def _read_blocks(number: int, file: io.BufferedReader) -> Iterator[Raw]:
    """Yield blocks that end at a line or at least at a character; the last one closes the document."""
    line, carry, first = 1, b"", True
    while True:
        new = file.read(BLOCK)
        data = carry + new
        whole = len(data) if not new else _line_end(data)
        block, carry = data[:whole], data[whole:]
        last = not new or (not carry and not (ahead := file.read(1)))
        if new and not last and not carry:
            carry = ahead
        if block or last:
            yield Raw(number, line, block, len(block), "text", first, last)
            line, first = line + block.count(b"\n"), False
        if last:
            return


def _line_end(data: bytes) -> int:
    """Return the number of bytes up to the last line end, or else up to the last whole character."""
    if end := data.rfind(b"\n") + 1:
        return end
    end = len(data)
    while end and len(data) - end < 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end and data[end - 1] >= 0xC0 else end or len(data)


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a table; raise ConfigError if it is damaged, even if only reading it shows that."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            yield table
    except ConfigError:
        raise
    except (OSError, MemoryError, pa.ArrowException, *MALFORMED) as error:  # each decoder raises its own
        raise ConfigError(f"{path}: not a complete Parquet file ({first_line(error)}); write it again") from error


def read_parquet(path: Path, columns: Columns, groups: list[int] | None = None) -> Iterator[Any]:
    """Yield texts or records, from some row groups or from all."""
    with open_parquet(path) as table:
        names = columns.among(table.schema_arrow.names, f"{path}:1")
        for batch in table.iter_batches(batch_size=1024, columns=names, row_groups=groups):
            yield from batch.to_pylist() if columns.is_record else batch.column(0).to_pylist()


def _read_registered(number: int, path: Path, file: io.BufferedReader, columns: Columns) -> Iterator[Raw]:
    row = 0
    try:
        for row, document in enumerate(FORMATS[_extension(path)].read(file), start=1):
            yield Raw.of_table(number, row, columns.pick(document, f"{path}:{row}"))
    except (OSError, ConfigError):
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{path}: the reader of this format failed at document {row + 1} ({type(error).__name__}: {error})"
        ) from error
