"""Where rows come from: random-access sources of packed rows, each row a function of its number alone."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.corpus import SPLITS, StoryCorpus
from nash_mhc.data.pack import Rows, pack
from nash_mhc.data.tokens import ByteTokenizer, Tokenizer

_VALIDATION_EVERY = 20  # one row in so many of a text dataset is held out


@runtime_checkable
class RowSource(Protocol):
    endless: bool  # fresh rows for ever: no epochs, no shuffling

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Rows: ...


class StoryRows:
    """Endless packed rows of the embedded stories.

    Rows are made a volume at a time: fresh stories, best fit, little padding. Every story appears at most once (the few
    that fit nowhere are left out) and whole, unless it is longer than a row. Where none is, the mean loss of a perfect model
    is the corpus's own floor; the rest of a story that was cut has lost its opening and costs more.
    """

    endless = True
    rows_per_volume = 64

    def __init__(self, tokenizer: Tokenizer, *, seed: int, split: str, seq_len: int, align: int = 1) -> None:
        self._corpus, self._tokenizer = StoryCorpus(), tokenizer
        self._seed, self._split, self._seq_len, self._align = seed, split, seq_len, align
        self._volumes: OrderedDict[int, Rows] = OrderedDict()
        self._lock = threading.Lock()  # grain's reader threads share this source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Rows:
        volume, row = divmod(int(index), self.rows_per_volume)
        with self._lock:
            if volume not in self._volumes:
                self._volumes[volume] = self._make(volume)
            self._volumes.move_to_end(volume)
            rows = self._volumes[volume]
            while len(self._volumes) > 4:
                self._volumes.popitem(last=False)
        return Rows(*(a[row] for a in rows))

    def __getstate__(self) -> dict[str, object]:  # worker processes get the recipe, not the lock
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_volumes")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _volumes=OrderedDict())

    def _make(self, volume: int) -> Rows:
        documents, slots = [], 0
        capacity = self.rows_per_volume * self._seq_len
        for number in range(1 << 20):
            # One number a story, volumes far apart: no story is ever used twice.
            story = self._corpus.story(self._seed, self._split, (volume << 20) + number)
            tokens = self._tokenizer.encode(story.text)
            slots += -(-(len(tokens) + 1) // self._align) * self._align
            if slots > capacity:
                break
            documents.append(tokens)
        return pack(documents, self._tokenizer.end, self._seq_len, most_rows=self.rows_per_volume, align=self._align)


class TextRows:
    """Packed rows of local .txt files, one document a file; every twentieth row is the validation split."""

    endless = False

    def __init__(self, path: Path, tokenizer: Tokenizer, *, split: str, seq_len: int, align: int = 1) -> None:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"--dataset {path}: no .txt file in this folder")
        rows = pack([tokenizer.encode(_read(f)) for f in files], tokenizer.end, seq_len, align=align)
        held_out = np.arange(len(rows.inputs)) % _VALIDATION_EVERY == _VALIDATION_EVERY - 1
        self._rows = Rows(*(a[held_out if split == "validation" else ~held_out] for a in rows))
        if not len(self):
            need = _VALIDATION_EVERY if split == "validation" else 1
            raise ConfigError(
                f"--dataset {path}: its text fills {len(rows.inputs)} row(s) of {seq_len} tokens, and split {split!r} needs "
                f"{need}; add text or lower --seq-len"
            )

    def __len__(self) -> int:
        return len(self._rows.inputs)

    def __getitem__(self, index: int) -> Rows:
        return Rows(*(a[index] for a in self._rows))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}; convert it, for instance with iconv") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error


def open_source(cfg: DataConfig, tokenizer: Tokenizer, *, split: str, seed: int, align: int = 1) -> RowSource:
    """The rows of one split, documents starting at multiples of `align`; ConfigError when there is no such dataset or split."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: there are {' and '.join(SPLITS)}")
    if cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {cfg.dataset_name}: dataset {cfg.dataset!r} has no variants; leave it out")
    if cfg.dataset == "stories":
        return StoryRows(tokenizer, seed=seed, split=split, seq_len=cfg.seq_len, align=align)
    if not Path(cfg.dataset).exists():
        raise ConfigError(f"--dataset {cfg.dataset}: neither 'stories' nor a .txt file or folder that is here")
    return TextRows(Path(cfg.dataset), tokenizer, split=split, seq_len=cfg.seq_len, align=align)


def loss_floor(cfg: DataConfig, tokenizer: Tokenizer) -> tuple[float, float] | None:
    """(nats a token, bits a byte) below which no model can go, where the dataset knows it."""
    if cfg.dataset == "stories" and isinstance(tokenizer, ByteTokenizer):
        corpus = StoryCorpus()
        return corpus.floor_nats_per_token, corpus.floor_bits_per_byte
    return None
