"""Documents -> tokens -> packed rows on disk, in parallel, once.

The corpus is read in chunks, whose borders follow from its content; a chunk becomes its own shards, whoever makes them.
So the result does not depend on the number of processes, and a preparation that was killed goes on with the chunks that
are missing: byte for byte what an unbroken one leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import groupby
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.holdout import HeldOut, survey
from nash_mhc.data.documents.readers import Corpus, Unreachable
from nash_mhc.data.pieces import document_of, wastes_alignment
from nash_mhc.data.prepared.chunks import Chunk, Job, file_of, in_words, make_chunk, read_chunks, read_split, rule_digest
from nash_mhc.data.prepared.manifest import FILE, Manifest, OlderForm, Shard, Split, check_files, write_file
from nash_mhc.data.recipe import Recipe
from nash_mhc.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from nash_mhc.data.workers import begin_worker, starting_workers
from nash_mhc.storage.files import is_same_file
from nash_mhc.storage.json_files import MALFORMED, parse_json

RECIPE = "recipe.json"

Watch = Callable[[int, int, int], None]  # bytes read, bytes in all, tokens so far


_job: Job  # of this process, where it is a worker


def _start_worker(job: Job) -> None:
    global _job  # noqa: PLW0603  (a pool has no other place for what its tasks share)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    begin_worker()
    _job = job


def _work(chunk: Chunk) -> dict[str, Any]:
    return make_chunk(_job, chunk)


def _note_of(job: Job, number: int) -> dict[str, Any] | None:
    """The note of a chunk that an earlier process has finished, if its shards are whole."""
    try:
        note = parse_json((job.folder / f"chunk-{number:05d}.json").read_bytes())
        if note["rule"] != rule_digest(job):
            return None
        shards = [part["shard"] for part in note["splits"].values()]
        hashes = {f"{s['name']}.rows": (None, s["sha256"]) for s in shards}
        file_of(job.folder, number).stat()
        check_files(job.folder, hashes | {f"{s['name']}.origins": (None, s["origins_sha256"]) for s in shards})
    except (OSError, *MALFORMED):
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
                        with starting_workers():
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


def _decided(recipe: Recipe, tokenizer: Tokenizer, corpus: Corpus, folder: Path) -> Job:
    """What is decided before anything is made: which documents are held out (those of a small corpus are all looked
    at), and whether they are worth aligning."""
    documents = lambda: (document_of(raw, corpus.names, recipe) for raw in read_split(corpus, recipe, recipe["split"]))
    keys = ((d.key, d.size) for d in documents() if d.size)
    rule = survey(keys, recipe["validation_fraction"], recipe.get("test_fraction", 0.0))
    job = Job(recipe, tokenizer, corpus.names, folder, rule)
    return dataclasses.replace(
        job, is_dense=recipe["align"] > 1 and wastes_alignment(documents(), recipe, tokenizer, corpus.names)
    )


def _run_with_both_splits(job: Job, corpus: Corpus, workers: int, watch: Watch) -> tuple[Job, list[dict[str, Any]]]:
    """The notes, and the job that they are of:
    where chance gave a split no piece at all of a single document, another one."""
    notes, recipe = run_chunks(job, corpus, workers, watch), job.recipe
    if job.held_out.by_piece and len({name for note in notes for name in note["splits"]}) == 1:
        keys = [note[which] for note in notes for which in ("lowest", "highest") if note[which] is not None]
        if min(keys) != max(keys) and recipe["split"] != recipe["eval_split"]:
            job = dataclasses.replace(job, held_out=HeldOut(chosen=frozenset({min(keys)}), by_piece=True))
            notes = run_chunks(job, corpus, workers, watch)
    return job, notes


def _held_out_in_words(job: Job, splits: dict[str, Split]) -> str:
    """What is held out, in words; empty where nothing is, or where the data has a split for it."""
    recipe = job.recipe
    shares = {
        "held out": (recipe["eval_split"], recipe["validation_fraction"]),
        "for the test": (recipe.get("test_split"), recipe.get("test_fraction")),
    }
    shares = {what: (name, asked) for what, (name, asked) in shares.items() if asked and name in splits}
    divided = [splits[name] for name in (recipe["split"], *(name for name, _ in shares.values())) if name in splits]
    slots, documents = (sum(getattr(split, what) for split in divided) for what in ("slots", "documents"))
    words = []
    for what, (name, asked) in shares.items():
        part, share = splits[name], splits[name].slots / slots
        if job.held_out.by_piece:
            return (
                f"there is only one document: {part.rows:,} rows of it are held out ({share:.1%} of the text), in the midst "
                f"of those that are trained on"
            )
        off = f", where {asked:.1%} was asked for: only whole documents are" if not 0.5 < share / asked < 1.5 else ""
        words.append(f"{what}: {part.documents:,} of {documents:,} documents, {share:.1%} of the text{off}")
    return "; ".join(words)


def _gathered(job: Job, corpus: Corpus, notes: list[dict[str, Any]], dataset: str) -> Manifest:
    splits: dict[str, Split] = {}
    found = [(name, part) for note in notes for name, part in note["splits"].items()]
    for name, group in groupby(sorted(found, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        parts = [part for _, part in group]
        totals = {key: sum(part[key] for part in parts) for key in ("tokens", "slots", "documents")}
        most = max(part["most_documents"] for part in parts)
        room = max(part["room"] for part in parts) if job.is_dense else None
        splits[name] = Split(tuple(Shard(**part["shard"]) for part in parts), **totals, most_documents=most, room=room)
    counted = {key: sum(note[key] for note in notes) for key in ("bytes", "empty")}
    about = {"dataset": dataset, "left_out": corpus.left_out, "held_out": _held_out_in_words(job, splits)}
    names = [job.recipe["split"], job.recipe["eval_split"], job.recipe.get("test_split", "")]
    if near := in_words([file_of(job.folder, number) for number in range(len(notes))], names):
        about["near_identical"] = near
    return Manifest(job.recipe, corpus.files, splits, **counted, about=about)


def prepare(
    recipe: Recipe,
    tokenizer: Tokenizer,
    corpus: Corpus,
    out: Path,
    *,
    dataset: str,
    workers: int | None = None,
    watch: Watch = lambda *_: None,
) -> Manifest:
    """Prepares into `out`, or finds it prepared already.
    ConfigError, and nothing left behind, for data that cannot be used.

    The work is done in OUT.partial, which a killed process leaves for the next one;
    the finished folder appears at once.
    """
    partial = out.with_name(out.name + ".partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _sole_owner(partial):
            if (out / FILE).exists():
                try:
                    before = Manifest.read(out)
                except OlderForm as older:
                    # What counts as text in a folder has grown since: all that it was made of must be there.
                    if older.recipe.get("content") != recipe["content"] and not {*older.files} < {*corpus.files}:
                        raise ConfigError(f"{out}: holds other data; choose another --out, or remove it first") from None
                else:
                    if before.recipe != recipe:
                        changed = _difference(before.recipe, recipe)
                        raise ConfigError(f"{out}: holds other data ({changed}); choose another --out")
                    return before
            elif out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError(f"--out {out}: is there already and holds no prepared data; choose another folder")
            return _prepare_in(partial, out, recipe, tokenizer, corpus, workers, watch, dataset)
    except BrokenProcessPool:
        raise ConfigError(
            f"{partial}: a worker process was stopped from outside (no memory left?); start it again to continue"
        ) from None
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another folder or make room") from error


def _prepare_in(
    partial: Path,
    out: Path,
    recipe: Recipe,
    tokenizer: Tokenizer,
    corpus: Corpus,
    workers: int | None,
    watch: Watch,
    dataset: str,
) -> Manifest:
    text = json.dumps(recipe, sort_keys=True).encode()
    if not (partial / RECIPE).exists() or (partial / RECIPE).read_bytes() != text:
        for entry in partial.iterdir():  # of other data or settings
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_file(partial / RECIPE, text)
    try:
        job = _decided(recipe, tokenizer, corpus, partial)
        job, notes = _run_with_both_splits(job, corpus, workers or os.cpu_count() or 1, watch)
        manifest = _gathered(job, corpus, notes, dataset)
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
    for extra in (partial / RECIPE, *partial.glob("chunk-*"), *partial.glob("*.part")):
        extra.unlink()
    if out.is_dir():
        shutil.rmtree(out)  # empty, or of an older form
    partial.rename(out)
    return manifest


@contextlib.contextmanager
def _sole_owner(partial: Path) -> Iterator[None]:
    """Holds a lock on the folder; who waited for another process finds what that one has left."""
    while True:
        # The one before may rename or remove the folder at any moment.
        # (mkdir's own exist_ok looks again, and would fail then.)
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
                    with contextlib.suppress(OSError):  # where it holds something, it stays
                        if is_same_file(partial, handle):
                            partial.rmdir()
                return
        finally:
            os.close(handle)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    tokens = [values.get("tokenizer", {}).get("vocab_size") for values in (before, now)]
    long = {
        "content": "other content",
        "chat_form": "another chat template",
        "tokenizer": f"another tokenizer, of {tokens[0]:,} tokens there, {tokens[1]:,} now",
    }
    return ", ".join(long.get(key, f"{key} {before.get(key)} there, {now.get(key)} now") for key in changed)
