"""Chunks of a corpus, and the shards made from one chunk. Any process can make any chunk."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.data.documents.files import Corpus
from nash_mhc.data.documents.holdout import HeldOut, key_of
from nash_mhc.data.documents.records import Raw
from nash_mhc.data.pack import Piece, aligned_length, pack_pieces
from nash_mhc.data.prepared.folder import RowFormat, check_files, write_file
from nash_mhc.data.recipe import Document, Recipe, document_of, pieces_of, read_split
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.files import MALFORMED, digest_of, parse_json


class Chunk(NamedTuple):
    number: int
    split: str
    raws: list[Raw]


@dataclass(frozen=True)
class Job:
    """Settings shared by all chunks of a preparation."""

    recipe: Recipe
    tokenizer: Tokenizer
    names: tuple[str, ...]  # file names, for messages
    folder: Path
    held_out: HeldOut
    is_dense: bool = False  # documents start anywhere, not only at multiples of the alignment

    @property
    def part_names(self) -> list[str]:
        """The splits that the parts of the held-out rule are written to."""
        return [self.recipe["split"], self.recipe["eval_split"], self.recipe.get("test_split", "")]

    @property
    def rule_digest(self) -> str:
        """A digest of the held-out rule: shards made by another rule are not reused."""
        rule = self.held_out
        return digest_of([rule.below, sorted(rule.chosen), rule.by_piece, rule.test_below, sorted(rule.test_chosen)])

    def note_file(self, chunk: int) -> Path:
        return self.folder / f"chunk-{chunk:05d}.json"


def read_chunks(corpus: Corpus, recipe: Recipe) -> Iterator[Chunk]:
    """Yield the corpus in chunks of `chunk_bytes`, each of one split."""
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
    """Write the shards of a chunk and then the note that describes them; return the note."""
    recipe = job.recipe
    documents = [document_of(raw, job.names, recipe) for raw in chunk.raws]
    pieces, empty = pieces_of(documents, recipe, job.tokenizer, job.names)
    is_own = chunk.split != recipe["split"]  # a validation or test split that the data has itself
    rule = HeldOut() if is_own else job.held_out
    keys = [key_of([piece.tokens.tobytes()]) if rule.by_piece else documents[piece.document].key for piece in pieces]
    note: dict[str, Any] = {"rule": job.rule_digest, "bytes": sum(d.size for d in documents), "empty": empty, "splits": {}}
    note |= {"lowest": min(keys, default=None), "highest": max(keys, default=None)}
    names = [chunk.split, *job.part_names[1:]]
    parts = [rule.part_of(key) for key in keys]
    for part in sorted({*parts}):
        of_part = [piece for piece, other in zip(pieces, parts, strict=True) if other == part]
        note["splits"][names[part]] = _write_shard(job, chunk, names[part], of_part, documents)
    write_file(job.note_file(chunk.number), json.dumps(note).encode())
    return note


def read_note(job: Job, chunk: int) -> dict[str, Any] | None:
    """Return the note of a chunk that was made before; None if it or one of its files is missing or damaged."""
    try:
        note: dict[str, Any] = parse_json(job.note_file(chunk).read_bytes())
        if note["rule"] != job.rule_digest:
            return None
        shards = [part["shard"] for part in note["splits"].values()]
        hashes = {f"{s['name']}.rows": (None, s["sha256"]) for s in shards}
        check_files(job.folder, hashes | {f"{s['name']}.origins": (None, s["origins_sha256"]) for s in shards})
    except (OSError, *MALFORMED):
        return None
    return note


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _write_shard(job: Job, chunk: Chunk, split: str, pieces: list[Piece], documents: list[Document]) -> dict[str, Any]:
    recipe, tokenizer = job.recipe, job.tokenizer
    stored, rows = pack_pieces(pieces, tokenizer.end, recipe["seq_len"], align=1 if job.is_dense else recipe["align"])
    records = RowFormat(recipe["seq_len"], tokenizer.vocab_size, tokenizer.end).encode(stored)
    starts = [np.flatnonzero(row) for row in stored.starts]
    places = [
        (row, start, chunk.raws[pieces[item].document].file, chunk.raws[pieces[item].document].line, pieces[item].offset)
        for row, items in enumerate(rows)
        for start, item in zip(starts[row], items, strict=True)
    ]
    origins = _npy(np.array(places, np.int64))
    name = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', split)}-{chunk.number:05d}"
    write_file(job.folder / f"{name}.rows", records)
    write_file(job.folder / f"{name}.origins", origins)
    shard = {"name": name, "rows": len(rows), "sha256": sha256(records).hexdigest()}
    return {
        "shard": shard | {"origins_sha256": sha256(origins).hexdigest()},
        "tokens": int(stored.scored.sum()),
        "slots": sum(len(piece.scored) for piece in pieces),
        "documents": len({piece.document for piece in pieces if documents[piece.document].raw.opens}),
        "most_documents": max(map(len, rows), default=0),
        "room": aligned_length(stored, recipe["align"]) if job.is_dense else None,
    }


def with_one_piece_held_out(job: Job, notes: Sequence[dict[str, Any]]) -> Job | None:
    """Return a job that holds out one piece of a single document, if its hash put all pieces into one split."""
    recipe = job.recipe
    if not job.held_out.by_piece or len({name for note in notes for name in note["splits"]}) != 1:
        return None
    keys = [note[which] for note in notes for which in ("lowest", "highest") if note[which] is not None]
    if min(keys) == max(keys) or recipe["split"] == recipe["eval_split"]:
        return None
    return dataclasses.replace(job, held_out=HeldOut(chosen=frozenset({min(keys)}), by_piece=True))
