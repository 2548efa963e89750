"""What a teacher knows of every place of prepared rows, written beside them: on any mesh, and to the same bytes when a
command that was stopped goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows
from nash_mhc.data.prepared.manifest import Manifest, write_file
from nash_mhc.data.prepared.rows import PreparedRows
from nash_mhc.data.prepared.taught import FILE, TeacherFormat
from nash_mhc.hub.load import Loaded
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.board import barrier, from_leader
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.storage.files import digest_of_file
from nash_mhc.train.device_batches import own_rows, to_device
from nash_mhc.train.teacher import finder

_BEGUN = "teacher.partial.json"  # whose work was begun here
_NOTE_EVERY = 16  # batches between two notes of how far it is
Tick = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Wanted:
    top_k: int
    random: int  # other tokens, drawn
    temperatures: tuple[float, ...]
    batch_size: int


def size_of(folder: Path, wanted: Wanted) -> tuple[int, int]:
    """(rows that lie there, bytes of what will be known of them)."""
    manifest = Manifest.read(folder)
    rows = sum(split.rows for split in manifest.splits.values())
    return rows, rows * _format(manifest, wanted).record_bytes


def _format(manifest: Manifest, wanted: Wanted) -> TeacherFormat:
    recipe = manifest.recipe
    return TeacherFormat(
        recipe["seq_len"], wanted.top_k + wanted.random, recipe["tokenizer"]["vocab_size"], wanted.temperatures
    )


def make_cache(folder: Path, loaded: Loaded, teacher: dict[str, Any], mesh: Mesh, wanted: Wanted, tick: Tick) -> None:
    """Writes the records of all splits, and teacher.json last. ConfigError for work that another teacher began there.

    All processes call it; they share the folder.
    """
    manifest = Manifest.read(folder)
    about = {
        "teacher": teacher, "rows": manifest.identity, "top_k": wanted.top_k, "temperatures": list(wanted.temperatures),
        "batch_size": wanted.batch_size, "dtype": loaded.dtype,
        "lse_vocab_size": loaded.config.model.vocab_size,
    }  # fmt: skip
    if wanted.random:
        about |= {"random": wanted.random, "vocab_size": loaded.config.model.vocab_size}
    from_leader(lambda: _begin(folder, about))
    form, files = _format(manifest, wanted), {}
    for split in manifest.splits:
        if not manifest.splits[split].rows:
            continue
        source = PreparedRows(folder, split)
        find = _program(loaded, source, mesh, wanted)
        for number, shard in enumerate(source.shards):
            first = sum(other.rows for other in source.shards[:number])
            path = folder / f"{shard.name}.teacher"
            if not from_leader(path.exists):
                _write_shard(path, source, range(first, first + shard.rows), form, find, loaded.model, mesh, wanted, tick)
            else:
                tick(shard.rows)
            files[path.name] = from_leader(lambda path=path: digest_of_file(path))  # type: ignore[misc]
    from_leader(lambda: _end(folder, about | {"files": files}))


def _begin(folder: Path, about: dict[str, Any]) -> None:
    begun = folder / _BEGUN
    for path in (folder / FILE, begun):
        if path.exists():
            before = json.loads(path.read_text())
            if changed := [name for name in {**about, **before} if name != "files" and before.get(name) != about.get(name)]:
                raise ConfigError(
                    f"--out {folder}: holds what was found with another {changed[0].replace('_', ' ')}; choose another folder, "
                    "or remove it first"
                )
    write_file(begun, json.dumps(about).encode())


def _end(folder: Path, about: dict[str, Any]) -> None:
    write_file(folder / FILE, json.dumps(about, indent=1, sort_keys=True).encode() + b"\n")
    (folder / _BEGUN).unlink()


def _program(loaded: Loaded, source: PreparedRows, mesh: Mesh, wanted: Wanted) -> CompiledStep:
    """(model, batch) -> (ids, logits less the largest, a sum for every temperature less the largest logit)."""
    find = finder(
        loaded, source, mesh, seq_len=source.form.seq_len, top_k=wanted.top_k, random=wanted.random,
        temperatures=wanted.temperatures, vocabulary=min(source.form.vocab_size, loaded.config.model.vocab_size),
    )  # fmt: skip
    only_part = lambda model, batch: find(model, jax.tree.map(lambda a: a[0], batch))[:3]
    places = named_sharding(mesh, "batch", "time", "candidates")
    return CompiledStep(only_part, mesh, out_shardings=(places, places, places), warn=lambda text: None)


def _write_shard(
    path: Path,
    source: PreparedRows,
    numbers: range,
    form: TeacherFormat,
    find: CompiledStep,
    model: LanguageModel,
    mesh: Mesh,
    wanted: Wanted,
    tick: Tick,
) -> None:
    """From the last note on, where there is one; the file has its name when it is whole."""
    partial, note = path.with_name(path.name + ".partial"), path.with_name(path.name + ".note")
    done: int = from_leader(lambda: int(note.read_text()) if note.exists() and partial.exists() else 0)
    tick(done)
    size, B = form.record_bytes, wanted.batch_size
    handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        running: deque[tuple[int, Any]] = deque()
        for at in [*range(done, len(numbers), B), None]:
            if at is not None:
                running.append((at, find(model, _batch(source, numbers[at : at + B], B, mesh))))
            if running and len(running) > (at is not None):  # while one batch runs, the one before it is written
                begun, found = running.popleft()
                for row, record in _own_records(found, form):
                    if begun + row < len(numbers):
                        os.pwrite(handle, record, (begun + row) * size)
                tick(min(B, len(numbers) - begun))
                if (begun - done) // B % _NOTE_EVERY == _NOTE_EVERY - 1:
                    _all_written(handle)
                    from_leader(lambda rows=begun + B: write_file(note, str(rows).encode()))  # type: ignore[misc]
        _all_written(handle)
    finally:
        os.close(handle)

    def name_it() -> None:
        partial.rename(path)
        note.unlink(missing_ok=True)

    from_leader(name_it)


def _all_written(handle: int) -> None:
    """By every process, before anyone says so."""
    os.fsync(handle)
    barrier()


def _batch(source: PreparedRows, numbers: range, size: int, mesh: Mesh) -> Batch:
    """Rows that none is left for are the last one again: the same program, and nobody keeps what comes of them."""
    rows = source.take([*numbers, *[numbers[-1]] * (size - len(numbers))])
    return to_device(own_rows(Rows(*(a[None] for a in rows)), mesh), mesh)


def _own_records(found: tuple[Array, Array, Array], form: TeacherFormat) -> Iterator[tuple[int, bytes]]:
    """(row of the batch, its record), of those that lie on this process's devices and not on another's as well."""
    parts = [sorted((s for s in a.addressable_shards if s.replica_id == 0), key=lambda s: s.index[0].start or 0) for a in found]
    for ids, logits, sums in zip(*parts, strict=True):
        first = ids.index[0].start or 0
        records = form.encode(*(np.asarray(s.data) for s in (ids, logits, sums)))
        for row, record in enumerate(records):
            yield first + row, record.tobytes()


def check_room(folder: Path, needed: int) -> None:
    """ConfigError where the disk has less than that."""
    there = sum(f.stat().st_size for f in folder.glob("*.teacher*"))
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) + there < needed:
            raise ConfigError(
                f"--out {folder}: needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free; lower --top-k, or take "
                "fewer documents with --max-documents"
            )
