"""Hugging Face datasets as a corpus: by name, from a `save_to_disk` folder, or from one that `load_dataset` reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import Corpus, Unreachable, columns_of, format_of
from nash_mhc.data.documents.records import Raw
from nash_mhc.storage.errors import first_line
from nash_mhc.storage.files import digest_of, digests_of_sources

_UNKNOWN_SIZE = 1 << 30  # bytes assumed for a dataset that does not state its size


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").exists() or ((path / "dataset_info.json").exists() and (path / "state.json").exists())


class Hub(Corpus):
    """Documents of a dataset, read as a stream, without a second copy on disk."""

    def __init__(self, name: str, cfg: DataConfig) -> None:
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"--dataset {name}: needs the datasets library; pip install 'nash_mhc[hf]'") from None
        datasets.disable_progress_bars()
        self._library, self._name, self._subset = datasets, name, cfg.dataset_name
        self._path = Path(name) if Path(name).exists() else None
        self.names, self.files = (name,), (name if self._path is None else self._path.name,)
        self._saved: Any = None
        try:
            self._open(cfg)
            if self.splits and cfg.split not in self.splits:
                present = ", ".join(self.splits)
                raise ConfigError(f"--dataset {name}: no split {cfg.split!r} (splits: {present}); choose one with --split")
            columns = self._stream(cfg.split).column_names if cfg.format == "auto" else None
        except ConfigError:
            raise
        except Exception as error:  # each reader of the library raises its own
            self._check_subset()
            save = f"load_dataset('{name}').save_to_disk(FOLDER)"
            remedy = f"without network access, run {save} on another machine and use --dataset FOLDER here"
            problem = f"the datasets library cannot read it ({type(error).__name__}: {first_line(error)})"
            raise Unreachable(f"--dataset {name}: {problem}{'' if self._path else f'; {remedy}'}") from error
        self.format = format_of(cfg, columns)
        self._columns = columns_of(cfg, self.format)

    def _open(self, cfg: DataConfig) -> None:
        library = self._library
        if self._path is not None and is_saved(self._path):
            if self._subset is not None:
                raise ConfigError(f"--dataset-name {self._subset}: {self._name} has no subsets; leave it out")
            self._saved = library.load_from_disk(str(self._path))
            self.splits = tuple(self._saved) if isinstance(self._saved, library.DatasetDict) else ()
            version: Any = None
        else:
            self.splits = tuple(library.get_dataset_split_names(self._name, self._subset))
            builder = library.load_dataset_builder(self._name, self._subset)
            version = [self._name, self._subset, builder.hash]
            self.total = int(builder.info.dataset_size or _UNKNOWN_SIZE)
        if self._path is not None:
            files = sorted(p for p in self._path.rglob("*") if p.is_file())
            self.total = sum(p.stat().st_size for p in files)
            version = [[p.relative_to(self._path).as_posix() for p in files], digests_of_sources(files)]
        self.content = digest_of(version)

    def _check_subset(self) -> None:
        """Raise ConfigError, with a list of the subsets, if the requested one is not among them."""
        names: list[str] = []
        with contextlib.suppress(Exception):  # then the subset is not the problem; the caller reports it
            names = self._library.get_dataset_config_names(self._name)
        if names and self._subset not in names and not (self._subset is None and len(names) == 1):
            wrong = "has several subsets" if self._subset is None else f"has no subset {self._subset!r}"
            raise ConfigError(f"--dataset {self._name}: {wrong}; choose one with --dataset-name: {', '.join(names)}")

    def _stream(self, split: str, least: int = 1) -> Any:
        if self._saved is None:
            return self._library.load_dataset(self._name, self._subset, split=split, streaming=True)
        table = self._saved[split] if self.splits else self._saved
        return table.to_iterable_dataset(num_shards=max(1, min(len(table) // least, 16)))

    def table(self, split: str, least: int = 1) -> Any:
        """Return the library's stream of one split with the needed columns, in shards of at least `least` records."""
        stream = self._stream(split, least)
        if stream.column_names is None:  # unknown before reading
            return stream.select_columns(list(self._columns.needed))
        return stream.select_columns(self._columns.among(stream.column_names, f"{self.names[0]}:1"))

    def record(self, row: int, record: dict[str, Any]) -> Raw:
        """Return one record as a document; `row` counts from 1."""
        return Raw.of_table(0, row, self._columns.pick(record, self.names[0]))

    def read(self, split: str) -> Iterator[Raw]:
        try:
            for row, record in enumerate(self.table(split), start=1):
                yield self.record(row, record)
        except ConfigError:
            raise
        except Exception as error:
            problem = f"reading stopped ({type(error).__name__}: {first_line(error)})"
            raise Unreachable(f"--dataset {self._name}: {problem}; start it again to continue") from error
