"""Rows packed while training, from data too large to prepare: Parquet files and Hugging Face datasets.

The data is divided into lanes; row i of the run is the next row of lane i mod lanes. A lane is read from beginning to
end and then again, in volumes of some text, each packed and shuffled on its own. So a row follows from its number and
the data alone. An index on disk stores the row count and the reader's state after each volume; without it, a lane is
read again from its beginning. The shuffle buffer of the datasets library is lost at a restart.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.files import (
    Corpus,
    columns_of,
    find_files,
    first_fields,
    format_of,
    kind_of,
    open_parquet,
    read_parquet,
)
from nash_mhc.data.documents.holdout import EVALUATED, TRAINED_ON, HeldOut, by_share
from nash_mhc.data.documents.hub import Hub
from nash_mhc.data.documents.records import Raw
from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import NothingHeldOut, Rows, RowSource, StoredRows, pack_pieces, unpack
from nash_mhc.data.prepared.folder import VERSION
from nash_mhc.data.recipe import Document, document_of, make_recipe, pieces_of
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.files import MALFORMED, digest_of, parse_json

LANES = 16  # at most; divisible by common process counts
LEAST_DOCUMENTS = 1000  # per lane on average: a shorter lane would repeat long before the others


def text_of_volume(seq_len: int) -> int:
    """Return the bytes of text in a volume: enough to pack well for any sequence length."""
    return max(1 << 20, 256 * seq_len)


# A document, and a function that returns the reader's position after it, as plain JSON values. The function is called
# before the next document is read, if at all, because the position of a Hugging Face dataset is slow to compute.
Positioned = tuple[Raw, Callable[[], Any]]


class ParquetLanes(Corpus):
    """Row groups of Parquet files, dealt to lanes."""

    def __init__(self, dataset: str, cfg: DataConfig) -> None:
        self._paths, _ = find_files(dataset, cfg.extensions)
        self.names = tuple(str(p) for p in self._paths)
        is_table = kind_of(self._paths[0]) == "parquet"
        self.format = format_of(cfg, first_fields(self._paths[0]) if is_table and cfg.format == "auto" else None)
        self._columns = columns_of(cfg, self.format)
        self.units: list[tuple[int, int, int]] = []  # file, row group, rows of the file before it
        shapes, self.total, self._documents = [], 0, 0
        for number, path in enumerate(self._paths):
            if kind_of(path) != "parquet":
                raise ConfigError(f"{path}: --streaming reads only Parquet and Hugging Face data; leave out --streaming")
            with open_parquet(path) as table:
                self._columns.among(table.schema_arrow.names, f"{path}:1")
                counts = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
            self._documents += sum(counts)
            self.units += [(number, i, sum(counts[:i])) for i in range(len(counts))]
            shapes.append([path.name, path.stat().st_size, counts])
            self.total += path.stat().st_size
        # Hashing all data would require reading it, so only names, sizes and row counts are hashed.
        self.content = digest_of(shapes)

    def lanes_of(self, split: str) -> int:
        return max(1, min(LANES, len(self.units), self._documents // LEAST_DOCUMENTS))

    def read_lane(self, lane: int, lanes: int, split: str, state: Any) -> Iterator[Positioned]:
        """Yield the documents of a lane from a position on: finished units, rows read of the next one."""
        units = self.units[lane::lanes]
        first, skip = state or (0, 0)
        for unit in range(first, len(units)):
            file, group, before = units[unit]
            contents = read_parquet(self._paths[file], self._columns, [group])
            for row, content in enumerate(itertools.islice(contents, skip, None), start=skip + 1):
                yield Raw.of_table(file, before + row, content), functools.partial(list, (unit, row))
            skip = 0


class HubLanes(Hub):
    """Shards of a Hugging Face dataset, dealt to lanes by the library."""

    def __init__(self, name: str, cfg: DataConfig) -> None:
        super().__init__(name, cfg)
        self._sharded = functools.cache(lambda split: self.table(split, least=LEAST_DOCUMENTS))  # opening is slow

    def lanes_of(self, split: str) -> int:
        return max(1, min(LANES, self._sharded(split).num_shards))

    def read_lane(self, lane: int, lanes: int, split: str, state: Any) -> Iterator[Positioned]:
        """Yield the documents of a lane from a position on."""
        table, row = self._sharded(split).shard(lanes, lane), 0
        if state is not None:
            row = state["documents"]
            table.load_state_dict(state["table"])
        position = lambda: {"documents": row, "table": table.state_dict()}
        for record in table:
            row += 1
            yield self.record(row, record), position


class Lane:
    """The volumes of one lane: their index, stored in a file, and the last few volumes."""

    def __init__(self, file: Path) -> None:
        self.file, self.ends = file, [0]  # rows before volume v
        self.states: list[list[Any]] = [[0, None]]  # epoch and reader's state before volume v
        self.volumes: OrderedDict[int, tuple[StoredRows, np.ndarray]] = OrderedDict()
        self.reader: tuple[int, Iterator[Positioned]] | None = None  # positioned at the volume of this number
        if file.exists():
            for line in file.read_bytes().splitlines():
                with contextlib.suppress(*MALFORMED):  # truncated or damaged: this volume is read again
                    *entry, digest = parse_json(line)
                    volume, rows, after = entry
                    if volume == len(self.ends) - 1 and digest == digest_of(entry):
                        self._append(rows, after)

    def _append(self, rows: int, after: Any) -> None:
        self.ends.append(self.ends[-1] + rows)
        self.states.append(after)

    def add(self, rows: int, after: Any) -> None:
        entry = [len(self.ends) - 1, rows, after]
        self._append(rows, after)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as out:
            out.write("\n" + json.dumps([*entry, digest_of(entry)]))  # first a new line: a crash may have left half a line


class StreamRows(RowSource):
    """Endless rows of a stream. Not for worker processes: each would read all lanes."""

    endless = True

    def __init__(
        self, lanes: ParquetLanes | HubLanes, cfg: DataConfig, tokenizer: Tokenizer, *, split: str, seed: int, align: int
    ) -> None:
        recipe = make_recipe(cfg, tokenizer, lanes, align)
        own, parts = split in lanes.splits, [cfg.split, cfg.eval_split, *filter(None, [recipe.get("test_split")])]
        self._lanes, self._seed, self._tokenizer = lanes, seed, tokenizer
        if not own and split not in parts:
            raise ConfigError(f"split {split!r}: not found; choose from {', '.join(lanes.splits) or ', '.join(parts)}")
        self._part = TRAINED_ON if own else parts.index(split)
        self._split = split if own else cfg.split
        # Held-out documents are few: with 16 lanes, some lanes might have none.
        self.count = lanes.lanes_of(self._split) if self._part == TRAINED_ON else 1
        if self._part == EVALUATED and not recipe["validation_fraction"]:
            raise NothingHeldOut(f"{cfg.dataset}: no split {split!r} and no held-out documents; raise --validation-fraction")
        self._text = text_of_volume(cfg.seq_len)
        self.name = cfg.dataset
        shares = recipe["validation_fraction"], recipe.get("test_fraction", 0.0)
        self._recipe, self._rule = recipe, by_share(*shares) if self._split == cfg.split else HeldOut()
        self.identity = digest_of(["stream", VERSION, recipe, split, self.count, self._text])
        folder = Path(cfg.cache_dir) / f"stream-{self.identity[:24]}"
        self.lanes = [Lane(folder / f"lane-{number:02d}.jsonl") for number in range(self.count)]
        self._lock = threading.Lock()
        words = [f"{held:.1%} {what}" for held, what in zip(shares, ("of the documents", "for the test"), strict=True) if held]
        self.held_out = f"held out: {' and '.join(words)}, chosen while streaming" if words else ""

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        rows = []
        with self._lock:
            for index in indices:
                number, row = int(index) % self.count, int(index) // self.count
                lane = self.lanes[number]
                while lane.ends[-1] <= row:
                    self._read_volume(number, len(lane.ends) - 1)
                volume = bisect_right(lane.ends, row) - 1
                if volume not in lane.volumes:
                    self._read_volume(number, volume)
                stored, order = lane.volumes[volume]
                rows.append(StoredRows(*(a[order[row - lane.ends[volume]]] for a in stored)))
        return unpack(StoredRows(*(np.stack(arrays) for arrays in zip(*rows, strict=True))), self._tokenizer.end)

    def _read_volume(self, number: int, volume: int) -> None:
        """Read and pack one volume of a lane, and add it to the index if it is new."""
        lane, recipe = self.lanes[number], self._recipe
        epoch, state = lane.states[volume]
        at, reader = lane.reader or (None, iter(()))
        lane.reader = None
        if at != volume:
            reader = self._lanes.read_lane(number, self.count, self._split, state)
        # The first volume of each lane has another size, so that the lanes do not all finish volumes in the same step.
        wanted = self._text if volume else self._text * (number + 1) // self.count
        documents: list[Document] = []
        size, after = 0, [epoch + 1, None]  # at the end of the lane
        for raw, position in reader:
            document = document_of(raw, self._lanes.names, recipe)
            if self._rule.part_of(document.key) == self._part:
                documents.append(document)
                size += raw.size
            if size >= wanted:
                after, lane.reader = [epoch, position()], (volume + 1, reader)
                break
        pieces, _ = pieces_of(documents, recipe, self._tokenizer, self._lanes.names)
        stored, rows = pack_pieces(pieces, self._tokenizer.end, recipe["seq_len"], align=recipe["align"])
        if volume == len(lane.ends) - 1:
            lane.add(len(rows), after)
            if epoch > 0 and lane.ends[-1] == 0:
                raise ConfigError(
                    f"{self.name}: reader {number} of the stream found no text to train on; leave out --streaming"
                )
        if rows:
            order = permuted(np.arange(len(rows)), len(rows), combine(self._seed, number, volume))
            lane.volumes[volume] = stored, order
        while len(lane.volumes) > 3:
            lane.volumes.popitem(last=False)


def open_stream(cfg: DataConfig, tokenizer: Tokenizer, *, split: str, seed: int, align: int, is_hub: bool) -> StreamRows:
    if cfg.num_workers:
        raise ConfigError("--streaming packs sequences in the training process; leave out --num-workers")
    if cfg.max_documents is not None:
        raise ConfigError("--streaming reads all of the data; leave out --max-documents, or --streaming")
    lanes = HubLanes(cfg.dataset.removeprefix("hf:"), cfg) if is_hub else ParquetLanes(cfg.dataset, cfg)
    return StreamRows(lanes, cfg, tokenizer, split=split, seed=seed, align=align)
