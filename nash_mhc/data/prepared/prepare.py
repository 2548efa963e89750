"""Prepare a dataset once: documents -> tokens -> packed rows on disk, in parallel.

Chunk borders follow from the content of the corpus, and each chunk becomes its own shards. So the bytes do not depend
on the number of processes, and a preparation that was killed continues with the missing chunks.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.files import Corpus, Unreachable
from nash_mhc.data.documents.holdout import choose_held_out
from nash_mhc.data.prepared.chunks import (
    Chunk,
    Job,
    make_chunk,
    read_chunks,
    read_note,
    with_one_piece_held_out,
)
from nash_mhc.data.prepared.folder import FILE, Manifest, Shard, Split, write_file
from nash_mhc.data.recipe import Recipe, alignment_wastes_space, document_of, read_split
from nash_mhc.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from nash_mhc.data.workers import begin_worker, starting_workers
from nash_mhc.storage.files import is_same_file

RECIPE = "recipe.json"

Report = Callable[[int, int, int], None]  # called with bytes read, bytes in total, tokens so far


def prepare(
    recipe: Recipe,
    tokenizer: Tokenizer,
    corpus: Corpus,
    out: Path,
    *,
    dataset: str,
    workers: int | None = None,
    report: Report = lambda *_: None,
) -> Manifest:
    """Prepare a corpus into `out`, unless it is there already. Unusable data is a ConfigError, without leftovers.

    The work is done in OUT.partial, which a killed process leaves for the next one; `out` appears when it is complete.
    """
    partial = out.with_name(out.name + ".partial")
    with _write_errors(out, partial):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(partial):
            if (existing := _existing(out, recipe)) is not None:
                return existing
            _remove_leftovers(partial, recipe)
            try:
                manifest = _make_shards(recipe, tokenizer, corpus, partial, dataset, workers or os.cpu_count() or 1, report)
            except Unreachable:
                raise
            except ConfigError:
                shutil.rmtree(partial)
                raise
            if isinstance(tokenizer, HuggingFaceTokenizer):
                tokenizer.save(partial / "tokenizer")
            manifest.write(partial)
            for extra in (partial / RECIPE, *partial.glob("chunk-*"), *partial.glob("*.part")):
                extra.unlink()
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
            return manifest


def _existing(out: Path, recipe: Recipe) -> Manifest | None:
    """Return the manifest of data prepared by the same recipe; None if there is none, ConfigError for other data."""
    if not (out / FILE).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: already exists, but is not prepared data; choose another folder")
        return None
    if (manifest := Manifest.read(out)).recipe != recipe:
        raise ConfigError(f"{out}: contains other data ({_difference(manifest.recipe, recipe)}); choose another --out")
    return manifest


def _remove_leftovers(partial: Path, recipe: Recipe) -> None:
    """Empty the folder if it was left by other data or settings."""
    text = json.dumps(recipe, sort_keys=True).encode()
    if not (partial / RECIPE).exists() or (partial / RECIPE).read_bytes() != text:
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_file(partial / RECIPE, text)


def _make_shards(
    recipe: Recipe, tokenizer: Tokenizer, corpus: Corpus, folder: Path, dataset: str, workers: int, report: Report
) -> Manifest:
    job = _plan_job(recipe, tokenizer, corpus, folder)
    results = _run_chunks(job, corpus, workers, report)
    if (other := with_one_piece_held_out(job, results)) is not None:
        job, results = other, _run_chunks(other, corpus, workers, report)
    if not any(result["splits"] for result in results):
        raise ConfigError(f"{corpus.names[0]}: no document with text; check --dataset")
    splits: dict[str, Split] = {}
    for name in sorted({name for result in results for name in result["splits"]}):
        parts = [result["splits"][name] for result in results if name in result["splits"]]
        totals = {key: sum(part[key] for part in parts) for key in ("tokens", "slots", "documents")}
        most_documents = max(part["most_documents"] for part in parts)
        aligned_length = max(part["room"] for part in parts) if job.is_dense else None  # of the longest row
        shards = tuple(Shard(**part["shard"]) for part in parts)
        splits[name] = Split(shards, **totals, most_documents=most_documents, room=aligned_length)
    totals = {key: sum(result[key] for result in results) for key in ("bytes", "empty")}
    about = {"dataset": dataset, "left_out": corpus.left_out, "held_out": _describe_held_out(job, splits)}
    return Manifest(job.recipe, corpus.files, splits, **totals, about=about)


def _plan_job(recipe: Recipe, tokenizer: Tokenizer, corpus: Corpus, folder: Path) -> Job:
    """Decide which documents are held out, and whether documents are aligned."""
    documents = lambda: (document_of(raw, corpus.names, recipe) for raw in read_split(corpus, recipe, recipe["split"]))
    keys = ((d.key, d.size) for d in documents() if d.size)
    rule = choose_held_out(keys, recipe["validation_fraction"], recipe.get("test_fraction", 0.0))
    is_dense = recipe["align"] > 1 and alignment_wastes_space(documents(), recipe, tokenizer, corpus.names)
    return Job(recipe, tokenizer, corpus.names, folder, rule, is_dense)


def _run_chunks(job: Job, corpus: Corpus, workers: int, report: Report) -> list[dict[str, Any]]:
    """Return the results of all chunks in order; start processes only if there is more than one chunk to make."""
    notes: dict[int, dict[str, Any]] = {}
    read = tokens = 0

    def done(chunk: Chunk, note: dict[str, Any]) -> None:
        nonlocal read, tokens
        notes[chunk.number] = note
        read += sum(raw.size for raw in chunk.raws)
        tokens += sum(part["tokens"] for part in note["splits"].values())
        report(read, corpus.total, tokens)

    def missing_chunks() -> Iterator[Chunk]:
        for chunk in read_chunks(corpus, job.recipe):
            if note := read_note(job, chunk.number):
                done(chunk, note)
            else:
                yield chunk

    missing = missing_chunks()
    first = list(itertools.islice(missing, 2))
    chunks = itertools.chain(first, missing)
    if workers == 1 or len(first) < 2:
        for chunk in chunks:
            done(chunk, make_chunk(job, chunk))
        return [notes[number] for number in sorted(notes)]
    waiting: deque[tuple[Chunk, Future[dict[str, Any]]]] = deque()
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of JAX's threads
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job,))
    try:
        for chunk in chunks:
            with starting_workers():
                waiting.append((chunk, pool.submit(_make_in_worker, chunk)))
            if len(waiting) > workers + 1:
                made, future = waiting.popleft()
                done(made, future.result())
        for made, future in waiting:
            done(made, future.result())
    finally:
        pool.shutdown(cancel_futures=True)
    return [notes[number] for number in sorted(notes)]


_job: Job  # of this worker process


def _start_worker(job: Job) -> None:
    global _job  # noqa: PLW0603  (a pool has no other place for what its tasks share)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    begin_worker()
    _job = job


def _make_in_worker(chunk: Chunk) -> dict[str, Any]:
    return make_chunk(_job, chunk)


def _describe_held_out(job: Job, splits: dict[str, Split]) -> str:
    """Describe the held-out documents; empty if there are none, or if the data has its own splits."""
    recipe = job.recipe
    requested = {recipe["eval_split"]: recipe["validation_fraction"], recipe.get("test_split"): recipe.get("test_fraction")}
    held = {name: share for name, share in requested.items() if share and name in splits}
    divided = [splits[name] for name in (recipe["split"], *held) if name in splits]
    slots, documents = sum(split.slots for split in divided), sum(split.documents for split in divided)
    words = []
    for name, requested_share in held.items():
        split, share = splits[name], splits[name].slots / slots
        if job.held_out.by_piece:
            part = f"{split.rows:,} sequences of it are held out ({share:.1%} of the text)"
            return f"there is only one document: {part}, scattered among those that are trained on"
        what = "held out" if name == recipe["eval_split"] else "for the test"
        off = "" if 0.5 < share / requested_share < 1.5 else f" instead of {requested_share:.1%}, to keep documents whole"
        words.append(f"{what}: {split.documents:,} of {documents:,} documents, {share:.1%} of the text{off}")
    return "; ".join(words)


def _difference(before: Recipe, now: Recipe) -> str:
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    sizes = [values.get("tokenizer", {}).get("vocab_size") for values in (before, now)]
    long = {
        "content": "other content",
        "chat_form": "another chat template",
        "tokenizer": f"another tokenizer, of {sizes[0]:,} tokens in that folder, {sizes[1]:,} in this command",
    }
    both = lambda key: f"{key} {before.get(key)} in that folder, {now.get(key)} in this command"
    return ", ".join(long.get(key) or both(key) for key in changed)


@contextlib.contextmanager
def _exclusive(partial: Path) -> Iterator[None]:
    """Create the folder and hold a lock on it; remove it afterwards if it is empty.

    The package filelock would leave a file beside every prepared folder.
    """
    while True:
        # Another process may rename or remove the folder at any moment, which mkdir(exist_ok=True) does not tolerate.
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if is_same_file(partial, handle):
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):  # not empty
                        if is_same_file(partial, handle):
                            partial.rmdir()
                return
        finally:
            os.close(handle)


@contextlib.contextmanager
def _write_errors(out: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise ConfigError(f"{partial}: a worker process was killed (out of memory?); start again to continue") from None
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another folder or free space") from error
