"""Hugging Face datasets as a corpus: by name, from a folder that `save_to_disk` left,
or from one that `load_dataset` reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.readers import Raw, Unreachable, columns_of, format_of
from nash_mhc.storage.files import digest_of, digests_of_sources

_UNKNOWN_SIZE = 1 << 30  # bytes that a dataset is taken for when it does not say: its chunks are large


def is_saved(path: Path) -> bool:
    """Has `save_to_disk` left this folder?"""
    return (path / "dataset_dict.json").exists() or ((path / "dataset_info.json").exists() and (path / "state.json").exists())


class Hub:
    """Documents of a dataset, always read as a stream: nothing is copied to a second place on the way."""

    def __init__(self, name: str, cfg: DataConfig) -> None:
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"--dataset {name}: needs the datasets library; pip install 'nash_mhc[hf]'") from None
        datasets.disable_progress_bars()
        self._library, self._name, self._variant = datasets, name, cfg.dataset_name
        self._path = Path(name) if Path(name).exists() else None
        self.names: tuple[str, ...] = (name,)
        self.files: tuple[str, ...] = (name if self._path is None else self._path.name,)
        self.left_out: dict[str, int] = {}
        self._saved: Any = None
        try:
            self._open(cfg)
            if self.splits and cfg.split not in self.splits:
                there = ", ".join(self.splits)
                raise ConfigError(f"--dataset {name}: no split {cfg.split!r}, there are {there}; choose --split")
            columns = self._stream(cfg.split).column_names if cfg.format == "auto" else None
        except ConfigError:
            raise
        except Exception as error:  # the library raises whatever its many readers raise
            self._check_variant()
            if self._path is not None:
                raise Unreachable(f"--dataset {name}: the datasets library cannot read it ({_first_line(error)})") from error
            raise Unreachable(
                f"--dataset {name}: the datasets library cannot read it ({_first_line(error)}); without a network, "
                f"load_dataset('{name}').save_to_disk(FOLDER) where there is one, and --dataset FOLDER here"
            ) from error
        self.format = format_of(cfg, columns)
        self._columns = columns_of(cfg, self.format)

    def _open(self, cfg: DataConfig) -> None:
        library = self._library
        if self._path is not None and is_saved(self._path):
            if self._variant is not None:
                raise ConfigError(f"--dataset-name {self._variant}: {self._name} has no variants; leave it out")
            self._saved = library.load_from_disk(str(self._path))
            self.splits: tuple[str, ...] = tuple(self._saved) if isinstance(self._saved, library.DatasetDict) else ()
            marks: Any = None
        else:
            self.splits = tuple(library.get_dataset_split_names(self._name, self._variant))
            builder = library.load_dataset_builder(self._name, self._variant)
            marks = [self._name, self._variant, builder.hash]
            size = builder.info.dataset_size
            self.total = int(size or _UNKNOWN_SIZE)
        if self._path is not None:
            files = sorted(p for p in self._path.rglob("*") if p.is_file())
            self.total = sum(p.stat().st_size for p in files)
            marks = [[p.relative_to(self._path).as_posix() for p in files], digests_of_sources(files)]
        self.content = digest_of(marks)

    def _check_variant(self) -> None:
        """ConfigError with the names of all variants, where the one that is asked for is not among them.

        The library names them as well, in a line that is not its first.
        """
        names: list[str] = []
        with contextlib.suppress(Exception):  # what cannot be listed has another fault, which the caller reports
            names = self._library.get_dataset_config_names(self._name)
        if self._variant in names or (self._variant is None and len(names) < 2):
            return
        if names:
            wrong = "has several variants" if self._variant is None else f"has no variant {self._variant!r}"
            raise ConfigError(f"--dataset {self._name}: {wrong}; choose one with --dataset-name: {', '.join(names)}")

    def _stream(self, split: str, least: int = 1) -> Any:
        if self._saved is None:
            return self._library.load_dataset(self._name, self._variant, split=split, streaming=True)
        found = self._saved[split] if self.splits else self._saved
        return found.to_iterable_dataset(num_shards=max(1, min(len(found) // least, 16)))

    def table(self, split: str, least: int = 1) -> Any:
        """The library's own stream of one split, with the wanted columns;
        in shards of at least so many records, if it can."""
        stream = self._stream(split, least)
        if stream.column_names is None:  # not known before it is read: what must be there, then
            return stream.select_columns(list(self._columns.needed))
        return stream.select_columns(self._columns.among(stream.column_names, self.names[0]))

    def record(self, number: int, record: dict[str, Any]) -> Raw:
        """One record as a document; `number` is its row, from 1."""
        content = record if self._columns.is_record else record[self._columns.needed[0]]
        size = len(content) if isinstance(content, str) else len(str(content))
        return Raw(0, number, content, size, "table")

    def read(self, split: str) -> Iterator[Raw]:
        try:
            for number, record in enumerate(self.table(split), start=1):
                yield self.record(number, record)
        except ConfigError:
            raise
        except Exception as error:
            raise Unreachable(
                f"--dataset {self._name}: reading stopped ({_first_line(error)}); start it again to continue"
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
