"""Prepared rows with what a teacher knows of every place: its likeliest tokens, their logits, the sum over all.

Beside each shard of rows lies one of records, `NAME.teacher`, of one size a row: K tokens a place (the likeliest, then
those that were drawn at random, if any), K logits in float16 less that of the likeliest (where a number counts most, it
is exact), and a float32 for every temperature: the log-sum-exp over all tokens, less the likeliest logit.
`teacher.json` is written last. Of the teacher it has a hash, of every file another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Extras, Taught
from nash_mhc.data.prepared.manifest import Damaged, check_files
from nash_mhc.data.prepared.rows import PreparedRows, few_open_files
from nash_mhc.storage.files import digest_of
from nash_mhc.storage.json_files import check_types, read_json, reading

FILE = "teacher.json"
_MAKE = "python -m nash_mhc.distill cache --teacher RUN --dataset ... --out FOLDER makes one"


@dataclass(frozen=True)
class TeacherFormat:
    """Of a record: all places of a row."""

    seq_len: int
    top_k: int
    vocab_size: int
    temperatures: tuple[float, ...]

    @property
    def _ids(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Where ids, logits and sums begin in a record, and where it ends."""
        ids = self.seq_len * self.top_k * self._ids.itemsize
        logits = ids + self.seq_len * self.top_k * 2
        return 0, ids, logits, logits + self.seq_len * len(self.temperatures) * 4

    @property
    def record_bytes(self) -> int:
        return self._bounds[-1]

    def encode(self, ids: np.ndarray, logits: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """Rows [B, T, K], [B, T, K] and [B, T, number of temperatures] -> bytes [B, record_bytes]."""
        # A logit so far below the likeliest that float16 cannot say it is no less impossible one step above.
        small = np.maximum(logits, np.finfo(np.float16).min)
        parts = (ids.astype(self._ids), small.astype("<f2"), lse.astype("<f4"))
        return np.concatenate([np.ascontiguousarray(a).reshape(len(ids), -1).view(np.uint8) for a in parts], axis=1)

    def decode(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a, b, c, d = self._bounds
        cut = lambda i, j, dtype: np.ascontiguousarray(records[:, i:j]).view(dtype).reshape(len(records), self.seq_len, -1)
        return cut(a, b, self._ids).astype(np.int32), cut(b, c, "<f2"), cut(c, d, "<f4")


def read_about(folder: Path) -> dict[str, Any]:
    """What teacher.json says; ConfigError."""
    if not (folder / FILE).exists():
        raise ConfigError(f"--dataset {folder}: no teacher has read it; {_MAKE}")
    about = read_json(folder / FILE, "make it again", Damaged)
    with reading(folder / FILE, "make it again", Damaged):
        check_types(about, rows=str, top_k=int, temperatures=list, files=dict)
        check_types({"random": 0, "vocab_size": 0} | about, random=int, vocab_size=int)
        for temperature in about["temperatures"]:
            check_types({"a temperature": temperature}, **{"a temperature": float})
        for digest in about["files"].values():
            check_types({"a hash": digest}, **{"a hash": str})
        return about


class TaughtRows(PreparedRows):
    """The rows of one split, with what the teacher knows of them at one temperature."""

    def __init__(self, folder: Path, split: str, temperature: float, *, vocab_size: int | None = None, name: str = "") -> None:
        super().__init__(folder, split, vocab_size=vocab_size, name=name)
        about = read_about(folder)
        if about["rows"] != self.manifest.identity:
            raise ConfigError(f"--dataset {self.name}: the teacher has read other text than lies there now; {_MAKE}")
        self.random = int(about.get("random", 0))  # of the tokens of a place
        self.drawn_from = int(about.get("vocab_size", 0))  # so many tokens
        if temperature not in about["temperatures"]:
            there = ", ".join(f"{t:g}" for t in about["temperatures"])
            raise ConfigError(
                f"--distill-temperature {temperature:g}: {self.name} was made for {there}; choose one of them, or make it "
                "again with --temperatures"
            )
        self.top_k = int(about["top_k"]) + self.random
        self.extras: Extras = {
            "ids": ("int32", (self.form.seq_len, self.top_k)), "logits": ("float16", (self.form.seq_len, self.top_k)),
            "lse": ("float32", (self.form.seq_len,)),
        }  # fmt: skip
        self._known = TeacherFormat(self.form.seq_len, self.top_k, self.form.vocab_size, tuple(about["temperatures"]))
        self._place_of_sum = about["temperatures"].index(temperature)
        self._teacher_paths = [folder / f"{shard.name}.teacher" for shard in self.shards]
        self._open_teacher = few_open_files(self._teacher_paths)
        self._teacher_identity = digest_of(
            {k: about[k] for k in ("teacher", "rows", "top_k", "random", "temperatures", "files") if k in about}
        )
        size = self._known.record_bytes
        sizes = {f"{shard.name}.teacher": shard.rows * size for shard in self.shards}
        if missing := [name for name in sizes if name not in about["files"]]:
            raise Damaged(f"{folder / FILE}: knows nothing of {missing[0]}; make it again")
        check_files(folder, {name: (sizes[name], about["files"][name]) for name in sizes})

    @property
    def identity(self) -> str:
        return digest_of([super().identity, self._teacher_identity])

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in super().__getstate__().items() if k != "_open_teacher"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._open_teacher = few_open_files(self._teacher_paths)

    def take(self, indices: np.ndarray | list[int]) -> Taught:  # type: ignore[override]  # which has all that Rows has
        size = self._known.record_bytes
        buffer = np.empty((len(indices), size), np.uint8)
        for at, index in enumerate(indices):
            shard, row = self.locate(int(index))
            file = self._open_teacher(shard)
            if os.preadv(file.number, [buffer[at]], row * size) != size:
                raise Damaged(f"{self._teacher_paths[shard]}: has become shorter; the cache must be made again")
        ids, logits, sums = self._known.decode(buffer)
        return Taught(*super().take(indices), ids, logits, np.ascontiguousarray(sums[..., self._place_of_sum]))
