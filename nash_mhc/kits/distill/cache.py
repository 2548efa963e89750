"""The teacher's cache: a `NAME.teacher` file of records for each shard of prepared rows, and teacher.json.

A record holds one sequence: K token ids per position (the top-k, then the random ones), K logits in float16 relative to
the largest, and for each temperature the log-sum-exp (float32) relative to the largest logit. Every file is hashed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Extras, Rows
from nash_mhc.data.prepared.folder import Damaged, Manifest, PreparedRows, check_files, write_file
from nash_mhc.kits.distill.teacher import top_k_reader
from nash_mhc.loading.load import Loaded
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.board import barrier, from_leader
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.storage.files import check_types, digest_of, digest_of_file, read_json, reading
from nash_mhc.train.device_batches import own_rows, to_device

FILE = "teacher.json"
_PARTIAL = "teacher.partial.json"  # settings of a cache that is being written
_PROGRESS_INTERVAL = 16  # batches between two writes of the progress file
_HOW = "cache them with python -m nash_mhc.distill cache --teacher RUN --dataset ... --out FOLDER"
_AGAIN = "make the cache again"
Tick = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    top_k: int
    random: int  # random other tokens per position
    temperatures: tuple[float, ...]
    batch_size: int

    def record(self, manifest: Manifest) -> np.dtype:
        return _record(manifest, self.top_k + self.random, len(self.temperatures))


def _record(manifest: Manifest, tokens: int, temperatures: int) -> np.dtype:
    """Return the record of a sequence; `tokens` per position: the top-k and the random ones."""
    seq_len, vocab_size = manifest.recipe["seq_len"], manifest.recipe["tokenizer"]["vocab_size"]
    ids, some = "<u2" if vocab_size <= 1 << 16 else "<u4", (seq_len, tokens)
    return np.dtype([("ids", ids, some), ("logits", "<f2", some), ("lse", "<f4", (seq_len, temperatures))])


def read_teacher_json(folder: Path) -> dict[str, Any]:
    """Return the content of teacher.json; raise ConfigError if there is none or it is damaged."""
    if not (folder / FILE).exists():
        raise ConfigError(f"--dataset {folder}: contains no teacher logits; {_HOW}")
    about = read_json(folder / FILE, _AGAIN, Damaged)
    with reading(folder / FILE, _AGAIN, Damaged):
        check_types(about, rows=str, top_k=int, temperatures=list, files=dict)
        check_types({"random": 0, "vocab_size": 0} | about, random=int, vocab_size=int)
        for temperature in about["temperatures"]:
            check_types({"temperature": temperature}, temperature=float)
        for digest in about["files"].values():
            check_types({"hash": digest}, hash=str)
        return about


class RowsWithLogits(NamedTuple):
    """`Rows`, then the teacher's logits."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    ids: np.ndarray  # [B, T, K]
    logits: np.ndarray  # [B, T, K], relative to the largest
    lse: np.ndarray  # [B, T], over the whole vocabulary at the run's temperature, relative to the largest logit


class CachedRows(PreparedRows):
    """The sequences of one split with the teacher's logits at one temperature."""

    def __init__(self, folder: Path, split: str, temperature: float, *, vocab_size: int | None = None, name: str = "") -> None:
        super().__init__(folder, split, vocab_size=vocab_size, name=name)
        about = read_teacher_json(folder)
        if about["rows"] != self.manifest.identity:
            raise ConfigError(f"--dataset {self.name}: the text has changed since the teacher's logits were cached; {_HOW}")
        self.random = int(about.get("random", 0))
        self.random_vocab = int(about.get("vocab_size", 0))  # size of the vocabulary that the random tokens are from
        if temperature not in about["temperatures"]:
            known = ", ".join(f"{t:g}" for t in about["temperatures"])
            raise ConfigError(
                f"--distill-temperature {temperature:g}: the cache {self.name} supports {known}; choose one of these, or "
                "create the cache again with --temperatures"
            )
        seq_len, tokens = self.form.seq_len, int(about["top_k"]) + self.random
        self.extras: Extras = {
            "ids": ("int32", (seq_len, tokens)), "logits": ("float16", (seq_len, tokens)), "lse": ("float32", (seq_len,)),
        }  # fmt: skip
        with reading(folder / FILE, _AGAIN, Damaged):
            self._record = _record(self.manifest, tokens, len(about["temperatures"]))
        self._temperature = about["temperatures"].index(temperature)
        read_by = {k: about[k] for k in ("teacher", "rows", "top_k", "random", "temperatures", "files") if k in about}
        self.identity = digest_of([self.identity, digest_of(read_by)])
        self._logits = self.records_of("teacher", self._record.itemsize)
        sizes = {f"{shard.name}.teacher": shard.rows * self._logits.size for shard in self.shards}
        if missing := [name for name in sizes if name not in about["files"]]:
            raise Damaged(f"{folder / FILE}: does not list {missing[0]}; {_AGAIN}")
        check_files(folder, {name: (sizes[name], about["files"][name]) for name in sizes})

    def take(self, indices: np.ndarray | list[int]) -> RowsWithLogits:  # type: ignore[override]  # has the fields of Rows
        records = self._logits.read(indices).view(self._record)[:, 0]
        logits, lse = (np.ascontiguousarray(a) for a in (records["logits"], records["lse"][..., self._temperature]))
        return RowsWithLogits(*super().take(indices), records["ids"].astype(np.int32), logits, lse)


def cache_size(folder: Path, settings: CacheSettings) -> tuple[int, int]:
    """Return the number of prepared rows in the folder, and the bytes of their cache."""
    manifest = Manifest.read(folder)
    rows = sum(split.rows for split in manifest.splits.values())
    return rows, rows * settings.record(manifest).itemsize


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise ConfigError if the disk has fewer bytes left."""
    written = sum(f.stat().st_size for f in folder.glob("*.teacher*"))
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) + written < needed:
            raise ConfigError(
                f"--out {folder}: needs {needed / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free; lower --top-k or "
                "--max-documents"
            )


def write_cache(folder: Path, loaded: Loaded, teacher: dict[str, Any], mesh: Mesh, settings: CacheSettings, tick: Tick) -> None:
    """Write the records of all splits, then teacher.json; raise ConfigError if another teacher's cache was begun there.

    Every process calls it, and they share the folder. A stopped call resumes with the same bytes.
    """
    manifest = Manifest.read(folder)
    about = {
        "teacher": teacher, "rows": manifest.identity, "top_k": settings.top_k, "temperatures": list(settings.temperatures),
        "batch_size": settings.batch_size, "dtype": loaded.dtype,
        "lse_vocab_size": loaded.config.model.vocab_size,
    }  # fmt: skip
    if settings.random:
        about |= {"random": settings.random, "vocab_size": loaded.config.model.vocab_size}
    from_leader(lambda: _begin(folder, about))
    record, files = settings.record(manifest), {}
    for split in manifest.splits:
        if not manifest.splits[split].rows:
            continue
        source = PreparedRows(folder, split)
        read = _reader(loaded, source, mesh, settings)
        for number, shard in enumerate(source.shards):
            first = sum(other.rows for other in source.shards[:number])
            path = folder / f"{shard.name}.teacher"
            if not from_leader(path.exists):
                rows = range(first, first + shard.rows)
                _write_shard(path, rows, record, read, settings.batch_size, tick)
            else:
                tick(shard.rows)
            files[path.name] = from_leader(lambda path=path: digest_of_file(path))
    from_leader(lambda: _end(folder, about | {"files": files}))


def _begin(folder: Path, about: dict[str, Any]) -> None:
    partial = folder / _PARTIAL
    for path in (folder / FILE, partial):
        if path.exists():
            before = json.loads(path.read_text())
            if changed := [name for name in {**about, **before} if name != "files" and before.get(name) != about.get(name)]:
                raise ConfigError(
                    f"--out {folder}: contains a cache with another {changed[0].replace('_', ' ')}; choose another folder, "
                    "or remove this one"
                )
    write_file(partial, json.dumps(about).encode())


def _end(folder: Path, about: dict[str, Any]) -> None:
    write_file(folder / FILE, json.dumps(about, indent=1, sort_keys=True).encode() + b"\n")
    (folder / _PARTIAL).unlink()


def _reader(loaded: Loaded, source: PreparedRows, mesh: Mesh, settings: CacheSettings) -> Callable[[range], Any]:
    """Return the function (numbers of rows) -> (ids, logits, lse per temperature)."""
    read = top_k_reader(
        loaded, source, mesh, seq_len=source.form.seq_len, top_k=settings.top_k, random=settings.random,
        temperatures=settings.temperatures, vocabulary=min(source.form.vocab_size, loaded.config.model.vocab_size),
    )  # fmt: skip
    only_part = lambda model, batch: read(model, jax.tree.map(lambda a: a[0], batch))[:3]
    places = named_sharding(mesh, "batch", "time", "candidates")
    program = CompiledStep(only_part, mesh, out_shardings=(places, places, places), several_shapes=True)
    return lambda numbers: program(loaded.model, _batch(source, numbers, settings.batch_size, mesh))


def _write_shard(path: Path, rows: range, record: np.dtype, read: Callable[[range], Any], batch_size: int, tick: Tick) -> None:
    """Write the records of these rows, from the recorded progress on; rename the file once it is complete."""
    partial, progress = path.with_name(path.name + ".partial"), path.with_name(path.name + ".note")
    done: int = from_leader(lambda: int(progress.read_text()) if progress.exists() and partial.exists() else 0)
    tick(done)
    size = record.itemsize
    handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        running: deque[tuple[int, Any]] = deque()
        for at in [*range(done, len(rows), batch_size), None]:
            if at is not None:
                running.append((at, read(rows[at : at + batch_size])))
            if running and len(running) > (at is not None):  # write one batch while the next one runs
                begun, found = running.popleft()
                for row, content in _own_records(found, record):
                    if begun + row < len(rows):
                        os.pwrite(handle, content, (begun + row) * size)
                tick(min(batch_size, len(rows) - begun))
                if (begun - done) // batch_size % _PROGRESS_INTERVAL == _PROGRESS_INTERVAL - 1:
                    _flush(handle)
                    from_leader(lambda n=begun + batch_size: write_file(progress, str(n).encode()))
        _flush(handle)
    finally:
        os.close(handle)

    def rename() -> None:
        partial.rename(path)
        progress.unlink(missing_ok=True)

    from_leader(rename)


def _flush(handle: int) -> None:
    """Wait until every process has written its records to disk."""
    os.fsync(handle)
    barrier()


def _batch(source: PreparedRows, numbers: range, size: int, mesh: Mesh) -> Batch:
    """Return a batch of that many rows, filled up with copies of the last one: one program serves all batches."""
    rows = source.take([*numbers, *[numbers[-1]] * (size - len(numbers))])
    return to_device(own_rows(Rows(*(a[None] for a in rows)), mesh), mesh)


def _own_records(found: tuple[Array, Array, Array], record: np.dtype) -> Iterator[tuple[int, bytes]]:
    """Yield (row of the batch, its record) for the rows that this process must write."""
    parts = [sorted((s for s in a.addressable_shards if s.replica_id == 0), key=lambda s: s.index[0].start or 0) for a in found]
    for shards in zip(*parts, strict=True):
        ids, logits, lse = (np.asarray(s.data) for s in shards)
        records, first = np.empty(len(ids), record), shards[0].index[0].start or 0
        # Logits below the range of float16 have probability 0 either way.
        records["ids"], records["logits"], records["lse"] = ids, np.maximum(logits, np.finfo(np.float16).min), lse
        for row, content in enumerate(records):
            yield first + row, content.tobytes()
