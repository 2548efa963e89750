"""Files -> raw documents, one after the other, in an order that follows from their names alone.

Reading is all that happens here; decoding, parsing and tokenizing are done by many processes (prepare.py). A document's
place is a file and a line (or row) in it, for messages and for `inspect`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import FORMATS, ending_of, find_files, kind_of, open_unpacked
from nash_mhc.data.documents.holdout import key_of
from nash_mhc.data.documents.templates import both
from nash_mhc.data.stories.corpus import SPLITS, StoryCorpus
from nash_mhc.storage.files import digest_of, digests_of_sources
from nash_mhc.storage.json_files import MALFORMED, parse_json

BLOCK = 4 << 20  # bytes of a text file that are handled at once: a document may be larger than memory


_MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8 text


class Unreachable(ConfigError):
    """Data that could not be read this time, such as over a network: what has been prepared of it is kept."""


class Raw(NamedTuple):
    file: int  # its number in the corpus
    line: int  # where it begins in the file, from 1
    content: Any  # bytes of a text block or a JSON line; of a table, the text or the whole record
    size: int
    kind: str
    opens: bool = True  # does the document begin here, and does it end here?
    closes: bool = True
    key: int | None = None  # of the whole document's text, where this is only a part of it


@runtime_checkable
class Content(Protocol):
    """What is known of documents before they are read."""

    content: str  # changes when they do
    format: str  # what a record is: text, prompt, chat or fields
    names: tuple[str, ...]  # of the files, as a message calls them
    total: int  # bytes, for the progress bar and the size of chunks
    splits: tuple[str, ...]  # that the data has itself; empty: one part, of which some is held out


@runtime_checkable
class Corpus(Content, Protocol):
    files: tuple[str, ...]  # the names that a manifest keeps
    left_out: dict[str, int]  # files that are none of it, by their ending

    def read(self, split: str) -> Iterator[Raw]: ...


def format_of(cfg: DataConfig, fields: Collection[str] | None) -> str:
    """What records with these fields are: as --format says or, where it says `auto`, as the fields do."""
    if cfg.format != "auto" or fields is None or cfg.text_field in fields:
        return "text" if cfg.format == "auto" else cfg.format
    return "chat" if "messages" in fields else "prompt" if {"prompt", "response"} <= set(fields) else "text"


class Columns(NamedTuple):
    """Those of a table that a document is made of."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    is_record: bool = True  # a document is a record of them, not the text of the only one

    def among(self, names: Collection[str], where: str) -> list[str]:
        """Those of them that are there; ConfigError where one is not that must be."""
        for name in self.needed:
            if name not in names:
                there = ", ".join(names) or "none"
                remedy = "they are what --format asks for" if self.is_record else "name the text's with --text-field"
                raise ConfigError(f"{where}:1: no column {name!r}, there are {there}; {remedy}")
        return [*self.needed, *(name for name in self.optional if name in names)]


def columns_of(cfg: DataConfig, form: str) -> Columns:
    if form == "fields":
        templates = both(cfg.prompt_template, cfg.response_template)
        needed = tuple(dict.fromkeys(name for template in templates for name in template.needed))
        optional = dict.fromkeys(name for template in templates for name in template.optional if name not in needed)
        return Columns(needed, tuple(optional))
    named = {"text": (cfg.text_field,), "prompt": ("prompt", "response"), "chat": ("messages",)}
    return Columns(named[form], is_record=form != "text")


class Files:
    """Text files (a document each), JSON lines (a document a line) and Parquet tables (a document a row)."""

    splits: tuple[str, ...] = ()

    def __init__(self, dataset: str, cfg: DataConfig) -> None:
        self._paths, self.left_out = find_files(dataset, cfg.extensions)
        root = Path(dataset)
        self.names = tuple(str(p) for p in self._paths)
        # Where the folder lies does not matter, what is in it and how it is called there does.
        self.files = tuple(p.relative_to(root).as_posix() if root.is_dir() else p.name for p in self._paths)
        try:
            self.total = sum(p.stat().st_size for p in self._paths)
            hashes = digests_of_sources(self._paths)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error
        versions = {end: FORMATS[end].version for p in self._paths if (end := ending_of(p)) in FORMATS}
        self.content = digest_of([self.files, hashes, *([versions] if versions else [])])
        records = next((p for p in self._paths if kind_of(p) != "text"), None)
        self.format = format_of(cfg, None if records is None else first_fields(records))
        self._columns = columns_of(cfg, self.format)

    def read(self, split: str) -> Iterator[Raw]:
        for number, path in enumerate(self._paths):
            kind = kind_of(path)
            with _readable(path):
                if kind == "parquet":
                    yield from _read_parquet(number, path, self._columns)
                elif kind == "registered":
                    yield from _read_registered(number, path, self._columns)
                elif kind == "jsonl":
                    with open_unpacked(path) as file:
                        yield from _read_lines(number, file)
                else:
                    yield from _read_whole(number, path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); make it again if it was cut") from error


def first_fields(path: Path) -> list[str] | None:
    """The names in the first record of a file; None where there is none, or none that could be read:
    whoever reads it tells."""
    with _readable(path):
        if kind_of(path) == "parquet":
            with open_parquet(path) as table:
                return list(table.schema_arrow.names)
        with open_unpacked(path) as file, contextlib.suppress(ValueError):
            if kind_of(path) == "registered":
                record = next(iter(FORMATS[ending_of(path)].read(file)), None)
            else:
                record = parse_json(next((line for line in file if line.strip()), b"null"))
            return list(record) if isinstance(record, dict) else None
    return None


def _read_lines(number: int, file: io.BufferedReader) -> Iterator[Raw]:
    for line, content in enumerate(file, start=1):
        if content.strip():
            yield Raw(number, line, content, len(content), "jsonl")


def _read_whole(number: int, path: Path) -> Iterator[Raw]:
    """A document. Where it is read in several parts, each of them knows whose part it is."""
    key: int | None = None
    with open_unpacked(path) as file:
        for raw in _read_text(number, file):
            if raw.opens and not raw.closes:
                with open_unpacked(path) as again:
                    first = again.read(len(_MARK)).removeprefix(_MARK)
                    key = key_of(itertools.chain([first], iter(functools.partial(again.read, BLOCK), b"")))
            yield raw._replace(key=key)


def _read_text(number: int, file: io.BufferedReader) -> Iterator[Raw]:
    """Blocks that end with a line, or at least with a character; the last one closes the document."""
    line, kept, first = 1, b"", True
    while True:
        new = file.read(BLOCK)
        data = kept + new
        whole = len(data) if not new else _line_end(data)
        block, kept = data[:whole], data[whole:]
        last = not new or (not kept and not (ahead := file.read(1)))
        if new and not last and not kept:
            kept = ahead
        if block or last:
            yield Raw(number, line, block, len(block), "text", first, last)
            line, first = line + block.count(b"\n"), False
        if last:
            return


def _line_end(data: bytes) -> int:
    """Bytes up to the last end of a line, else up to the last whole character."""
    if end := data.rfind(b"\n") + 1:
        return end
    end = len(data)
    while end and len(data) - end < 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end and data[end - 1] >= 0xC0 else end or len(data)


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a table; ConfigError where it is damaged, also while it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            yield table
    except ConfigError:
        raise
    except (OSError, MemoryError, pa.ArrowException, *MALFORMED) as error:  # each of its decoders has errors of its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: not a whole Parquet file ({why}); make it again") from error


def parquet_batches(path: Path, columns: Columns, groups: list[int] | None = None) -> Iterator[list[Any]]:
    """Lists of texts, or of records; of some row groups or of all."""
    with open_parquet(path) as table:
        names = columns.among(table.schema_arrow.names, str(path))
        for batch in table.iter_batches(batch_size=1024, columns=names, row_groups=groups):
            yield batch.to_pylist() if columns.is_record else batch.column(0).to_pylist()


def _read_parquet(number: int, path: Path, columns: Columns) -> Iterator[Raw]:
    contents = itertools.chain.from_iterable(parquet_batches(path, columns))
    for row, content in enumerate(contents, start=1):
        yield Raw(number, row, content, len(content) if isinstance(content, str) else len(str(content)), "table")


def _documents(path: Path, file: io.BufferedReader) -> Iterator[Any]:
    """By the user's own function, whose mistakes are told with the file."""
    count = 0
    try:
        for document in FORMATS[ending_of(path)].read(file):
            yield document
            count += 1
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise ConfigError(f"{path}: its format cannot read document {count + 1} ({type(error).__name__}: {error})") from error


def _read_registered(number: int, path: Path, columns: Columns) -> Iterator[Raw]:
    with open_unpacked(path) as file:
        for row, document in enumerate(_documents(path, file), start=1):
            content: Any = document
            if isinstance(document, dict) and not columns.is_record:
                if (name := columns.needed[0]) not in document:
                    there = ", ".join(document) or "none"
                    remedy = "name the text's with --text-field"
                    raise ConfigError(f"{path}:{row}: no field {name!r}, there are {there}; {remedy}")
                content = document[name]
            yield Raw(number, row, content, len(content) if isinstance(content, str) else len(str(content)), "table")


class Stories:
    """So many of the embedded stories, as a corpus like any other."""

    files: tuple[str, ...] = ("stories",)
    names: tuple[str, ...] = files
    splits: tuple[str, ...] = SPLITS
    format = "text"

    def __init__(self, cfg: DataConfig) -> None:
        self.left_out: dict[str, int] = {}
        if cfg.max_documents is None:
            raise ConfigError("--dataset stories: there is no end to them; say how many to prepare with --max-documents")
        self._corpus = StoryCorpus()
        self.total = int(cfg.max_documents * self._corpus.mean_bytes)
        self.content = digest_of(["stories", self._corpus.story(0, SPLITS[0], 0).text])

    def read(self, split: str) -> Iterator[Raw]:
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}: there are {' and '.join(SPLITS)}")
        for number in itertools.count():
            text = self._corpus.story(0, split, number).text
            yield Raw(0, number + 1, text, len(text), "table")
