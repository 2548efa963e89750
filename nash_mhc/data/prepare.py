"""Documents -> tokens -> packed rows on disk, in parallel, once.

The corpus is read in chunks, whose borders follow from its content; a chunk becomes its own shards, whoever makes them. So
the result does not depend on the number of processes, and a preparation that was killed goes on with the chunks that are
missing: byte for byte what an unbroken one leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import groupby
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.chunks import Chunk, Job, make_chunk, make_recipe, read_chunks
from nash_mhc.data.manifest import FILE, Manifest, Shard, Split, check_files, write_whole
from nash_mhc.data.readers import Corpus, Unreachable
from nash_mhc.data.tokens import HuggingFaceTokenizer, Tokenizer

RECIPE = "recipe.json"

Watch = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens so far


_job: Job  # of this process, where it is a worker


def _start_worker(job: Job) -> None:
    global _job  # noqa: PLW0603  (a pool has no other place for what its tasks share)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which then ends it
    end_with_parent()
    _job = job


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _work(chunk: Chunk) -> dict[str, Any]:
    return make_chunk(_job, chunk)


def _note_of(job: Job, number: int) -> dict[str, Any] | None:
    """The note of a chunk that an earlier process has finished, if its shards are whole."""
    try:
        note = json.loads((job.folder / f"chunk-{number:05d}.json").read_text())
        shards = [part["shard"] for part in note["splits"].values()]
        hashes = {f"{s['name']}.rows": (None, s["sha256"]) for s in shards}
        check_files(job.folder, hashes | {f"{s['name']}.origins": (None, s["origins_sha256"]) for s in shards})
    except (OSError, ValueError, KeyError):
        return None
    return note


def run_chunks(job: Job, corpus: Corpus, workers: int, watch: Watch) -> list[dict[str, Any]]:
    """Notes of all chunks in order. Processes are started once there is more than one chunk to make."""
    notes: dict[int, dict[str, Any]] = {}
    waiting: deque[tuple[Chunk, Future[dict[str, Any]]]] = deque()
    read = tokens = 0

    def done(chunk: Chunk, note: dict[str, Any]) -> None:
        nonlocal read, tokens
        notes[chunk.number] = note
        read += sum(raw.size for raw in chunk.raws)
        tokens += sum(part["tokens"] for part in note["splits"].values())
        watch(read, corpus.total, tokens)

    first: Chunk | None = None
    pool: ProcessPoolExecutor | None = None
    with contextlib.ExitStack() as stack:
        for chunk in read_chunks(corpus, job.recipe):
            if note := _note_of(job, chunk.number):
                done(chunk, note)
            elif workers == 1:
                done(chunk, make_chunk(job, chunk))
            elif first is None and pool is None:
                first = chunk  # alone, it is not worth a pool
            else:
                if pool is None:
                    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of JAX's threads
                    pool = ProcessPoolExecutor(workers, context, _start_worker, (job,))
                    stack.callback(pool.shutdown, cancel_futures=True)
                for each in (first, chunk):
                    if each is not None:
                        waiting.append((each, pool.submit(_work, each)))
                first = None
                while len(waiting) > workers + 1:
                    done(waiting[0][0], waiting[0][1].result())
                    waiting.popleft()
        if first is not None:
            done(first, make_chunk(job, first))
        for chunk, future in waiting:
            done(chunk, future.result())
    return [notes[number] for number in sorted(notes)]


def _gathered(job: Job, corpus: Corpus, notes: list[dict[str, Any]]) -> Manifest:
    splits: dict[str, Split] = {}
    found = [(name, part) for note in notes for name, part in note["splits"].items()]
    for name, group in groupby(sorted(found, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        parts = [part for _, part in group]
        totals = {key: sum(part[key] for part in parts) for key in ("tokens", "slots", "documents")}
        most = max(part["most_documents"] for part in parts)
        splits[name] = Split(tuple(Shard(**part["shard"]) for part in parts), **totals, most_documents=most)
    counted = {key: sum(note[key] for note in notes) for key in ("bytes", "empty")}
    return Manifest(job.recipe, corpus.files, splits, **counted)


def prepare(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    out: Path,
    *,
    align: int,
    workers: int | None = None,
    watch: Watch = lambda *_: None,
) -> Manifest:
    """Prepares into `out`, or finds it prepared already. ConfigError, and nothing left behind, for data that cannot be used.

    The work is done in OUT.partial, which a killed process leaves for the next one; the finished folder appears at once.
    """
    recipe = make_recipe(cfg, tokenizer, corpus, align)
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _sole_owner(partial):
            if (out / FILE).exists():
                manifest = Manifest.read(out)
                if manifest.recipe != recipe:
                    raise ConfigError(f"{out}: holds other data ({_difference(manifest.recipe, recipe)}); choose another --out")
                return manifest
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError(f"--out {out}: is there already and holds no prepared data; choose another folder")
            return _prepare_in(partial, out, recipe, tokenizer, corpus, workers, watch)
    except BrokenProcessPool:
        raise ConfigError(
            f"{partial}: a worker process was stopped from outside (no memory left?); start again to go on"
        ) from None
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another folder or make room") from error


def _prepare_in(
    partial: Path, out: Path, recipe: dict[str, Any], tokenizer: Tokenizer, corpus: Corpus, workers: int | None, watch: Watch
) -> Manifest:
    text = json.dumps(recipe, sort_keys=True).encode()
    if not (partial / RECIPE).exists() or (partial / RECIPE).read_bytes() != text:
        for entry in partial.iterdir():  # of other data or settings
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_whole(partial / RECIPE, text)
    job = Job(recipe, tokenizer, corpus.names, partial)
    try:
        notes = run_chunks(job, corpus, workers or os.cpu_count() or 1, watch)
        manifest = _gathered(job, corpus, notes)
        if not manifest.splits:
            raise ConfigError(
                f"{corpus.names[0]}: no document with text in it, nor in the rest of the data; is it the right one?"
            )
    except ConfigError as error:
        if not isinstance(error, Unreachable):
            shutil.rmtree(partial)
        raise
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(partial / "tokenizer")
    manifest.write(partial)
    for extra in (partial / RECIPE, *partial.glob("chunk-*.json"), *partial.glob("*.part")):
        extra.unlink()
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    return manifest


@contextlib.contextmanager
def _sole_owner(partial: Path) -> Iterator[None]:
    """Holds a lock on the folder; who waited for another process finds what that one has left."""
    while True:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The one before may have renamed or removed the folder that this handle still means.
            if partial.exists() and partial.stat().st_ino == os.fstat(handle).st_ino:
                try:
                    yield
                finally:
                    if partial.exists() and not any(partial.iterdir()):
                        partial.rmdir()
                return
        finally:
            os.close(handle)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [key for key in now if before.get(key) != now[key]]
    return ", ".join(
        "other content" if key == "content" else f"{key} {before.get(key)} there, {now[key]} now" for key in changed
    )
