"""Rows of the built-in stories, made when they are asked for: each a function of its number alone."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import numpy as np

from nash_mhc.data.order import combine, permuted
from nash_mhc.data.pack import Rows, pack
from nash_mhc.data.stories.corpus import StoryCorpus
from nash_mhc.data.tokenizer import Tokenizer


class StoryRows:
    """Endless packed rows of the embedded stories.

    Rows are made a volume at a time: fresh stories, best fit, little padding, in random order. Every story appears at
    most once (the few that fit nowhere are left out) and whole, unless it is longer than a row. Where none is, the mean
    loss of a perfect model is the corpus's own floor;
    the rest of a story that was cut has lost its opening and costs more.
    """

    endless = True
    most_documents: int | None = None
    room: int | None = None
    name, identity, held_out = "stories", "stories-2", ""
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

    def epochs(self, position: int) -> dict[str, float]:
        return {}

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        return Rows(*(np.stack(a) for a in zip(*(self[int(i)] for i in indices), strict=True)))

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
        rows = pack(
            documents, self._tokenizer.end, self._seq_len, most_rows=self.rows_per_volume, align=self._align,
            begins=self._tokenizer.begin is not None, begin=self._tokenizer.begin,
        )  # fmt: skip
        # Best fit lays the longest first: in that order, the first rows of a volume would be no sample of it.
        order = permuted(np.arange(self.rows_per_volume), self.rows_per_volume, combine(self._seed, volume))
        return Rows(*(a[order] for a in rows))
