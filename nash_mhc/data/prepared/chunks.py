"""A corpus in chunks, and the shards of one chunk: what every process of a preparation does by itself."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.data.documents.holdout import HeldOut, key_of
from nash_mhc.data.documents.readers import Corpus, Raw
from nash_mhc.data.pack import Piece, lay, room_of
from nash_mhc.data.pieces import Document, document_of, pieces_of
from nash_mhc.data.prepared.manifest import write_file
from nash_mhc.data.prepared.near_identical import file_of, near_key, write_keys
from nash_mhc.data.prepared.rows import RowFormat
from nash_mhc.data.recipe import Recipe
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.digests import digest_of


class Chunk(NamedTuple):
    number: int
    split: str
    raws: list[Raw]


@dataclass(frozen=True)
class Job:
    """What a process needs to make the shards of a chunk."""

    recipe: Recipe
    tokenizer: Tokenizer
    names: tuple[str, ...]  # of the files, for messages
    folder: Path
    held_out: HeldOut
    is_dense: bool = False  # documents start anywhere in a row, not only at multiples of the alignment


def read_split(corpus: Corpus, recipe: Recipe, split: str) -> Iterator[Raw]:
    """What of a split is used."""
    documents = 0
    for raw in corpus.read(split):
        documents += raw.opens
        if recipe["max_documents"] is not None and documents > recipe["max_documents"]:
            return
        yield raw


def read_chunks(corpus: Corpus, recipe: Recipe) -> Iterator[Chunk]:
    """The corpus in pieces of `chunk_bytes`, each of one split."""
    number = 0
    own = [name for name in (recipe["eval_split"], recipe.get("test_split")) if name in corpus.splits]
    for split in (recipe["split"], *own):
        raws: list[Raw] = []
        size = 0
        for raw in read_split(corpus, recipe, split):
            raws.append(raw)
            size += raw.size
            if size >= recipe["chunk_bytes"]:
                yield Chunk(number, split, raws)
                number, raws, size = number + 1, [], 0
        if raws:
            yield Chunk(number, split, raws)
            number += 1


def make_chunk(job: Job, chunk: Chunk) -> dict[str, Any]:
    """Writes the shards of a chunk and, last, the note that says they are there; returns the note."""
    recipe = job.recipe
    documents = [document_of(raw, job.names, recipe) for raw in chunk.raws]
    pieces, empty = pieces_of(documents, recipe, job.tokenizer, job.names)
    is_own = chunk.split != recipe["split"]  # one that the data itself holds out
    rule = HeldOut() if is_own else job.held_out
    by_piece = lambda piece: key_of([piece.tokens.tobytes()])
    keys = [by_piece(piece) if rule.by_piece else documents[piece.document].key for piece in pieces]
    note: dict[str, Any] = {"rule": rule_digest(job), "bytes": sum(d.size for d in documents), "empty": empty, "splits": {}}
    note |= {"lowest": min(keys, default=None), "highest": max(keys, default=None)}
    names = [chunk.split, recipe["eval_split"], recipe.get("test_split", "")]
    parts = [rule.part_of(key) for key in keys]
    for part in sorted({*parts}):
        mine = [piece for piece, of in zip(pieces, parts, strict=True) if of == part]
        note["splits"][names[part]] = _write_shard(job, chunk, names[part], mine, documents)
    part_of = lambda key: names.index(chunk.split, 1) if is_own else rule.part_of(key)
    whole = [d for d in documents if d.raw.opens and d.raw.closes and not rule.by_piece]
    write_keys(file_of(job.folder, chunk.number), ((near_key("".join(s.text for s in d.spans)), part_of(d.key)) for d in whole))
    write_file(job.folder / f"chunk-{chunk.number:05d}.json", json.dumps(note).encode())
    return note


def rule_digest(job: Job) -> str:
    """What a note is worth nothing without: another rule would have made other shards."""
    rule = job.held_out
    return digest_of([rule.below, sorted(rule.chosen), rule.by_piece, rule.test_below, sorted(rule.test_chosen)])


def _write_shard(job: Job, chunk: Chunk, split: str, pieces: list[Piece], documents: list[Document]) -> dict[str, Any]:
    recipe, tokenizer = job.recipe, job.tokenizer
    laid, rows = lay(pieces, tokenizer.end, recipe["seq_len"], align=1 if job.is_dense else recipe["align"])
    records = RowFormat(recipe["seq_len"], tokenizer.vocab_size, tokenizer.end).encode(laid)
    starts = [np.flatnonzero(row) for row in laid.starts]
    places = [
        (row, start, chunk.raws[pieces[item].document].file, chunk.raws[pieces[item].document].line, pieces[item].offset)
        for row, items in enumerate(rows)
        for start, item in zip(starts[row], items, strict=True)
    ]
    buffer = io.BytesIO()
    np.save(buffer, np.array(places, np.int64))
    name = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', split)}-{chunk.number:05d}"
    write_file(job.folder / f"{name}.rows", records)
    write_file(job.folder / f"{name}.origins", buffer.getvalue())
    shard = {"name": name, "rows": len(rows), "sha256": sha256(records).hexdigest()}
    return {
        "shard": shard | {"origins_sha256": sha256(buffer.getvalue()).hexdigest()},
        "tokens": int(laid.counts.sum()),
        "slots": sum(len(piece.counts) for piece in pieces),
        "documents": len({piece.document for piece in pieces if documents[piece.document].raw.opens}),
        "most_documents": max(map(len, rows), default=0),
        "room": room_of(laid, recipe["align"]) if job.is_dense else None,
    }
