"""A corpus in chunks, the shards of one chunk, and documents that are nearly those of another part.

Every process of a preparation makes chunks by itself. Each leaves a file with 8 bytes per document; at the end the keys
of held-out documents are in memory and those of all others pass by.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.humanize import counted
from nash_mhc.data.documents.holdout import PARTS, TRAINED_ON, HeldOut, key_of
from nash_mhc.data.documents.readers import Corpus, Raw
from nash_mhc.data.pack import Piece, lay, room_of
from nash_mhc.data.pieces import Document, document_of, pieces_of
from nash_mhc.data.prepared.manifest import write_file
from nash_mhc.data.prepared.rows import RowFormat
from nash_mhc.data.recipe import Recipe
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.files import digest_of


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


_ASCII = bytes(byte for byte in range(128) if not chr(byte).isalnum())
_OTHERS = re.compile(r"[\W_]+")


def near_key(text: str) -> int:
    """Equal for texts with the same letters and digits, whatever their case and what stands between; 0 without any."""
    letters = text.lower().encode("utf-8").translate(None, _ASCII)  # most of it, and much faster than the rest
    if not letters.isascii():
        letters = _OTHERS.sub("", letters.decode("utf-8")).encode("utf-8")
    return key_of([letters]) if letters else 0


def file_of(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:05d}.near"


def write_keys(file: Path, documents: Iterable[tuple[int, int]]) -> None:
    """(near key, part) of the documents of a chunk."""
    found = [(key, part) for key, part in documents if key]
    buffer = io.BytesIO()
    np.save(buffer, np.array([key for key, _ in found], np.uint64))
    np.save(buffer, np.array([part for _, part in found], np.uint8))
    write_file(file, buffer.getvalue())


def _read_keys(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open("rb") as opened:
        return np.load(opened), np.load(opened)


def in_words(files: Sequence[Path], names: Sequence[str]) -> str:
    """How many documents of each held-out part are nearly those of another one; empty where none are.

    `names` are those of the parts.
    """
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for file in files:
        keys, parts = _read_keys(file)
        held.append((keys[parts != TRAINED_ON], parts[parts != TRAINED_ON]))
    if not held:
        return ""
    keys, parts = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    known, which = np.unique(keys, return_inverse=True)
    is_in = np.zeros((len(PARTS), len(known)), bool)  # whether a part has such a document
    is_in[parts, which] = True
    for file in files if len(known) else ():
        passing, of = _read_keys(file)
        passing = passing[of == TRAINED_ON]
        at = np.searchsorted(known, passing).clip(max=len(known) - 1)
        is_in[TRAINED_ON, at[known[at] == passing]] = True
    in_several = is_in.sum(axis=0)[which] > 1
    counts = [(int((in_several & (parts == part)).sum()), names[part]) for part in PARTS[1:]]
    told = ", ".join(f"{counted(count, 'document')} of {name}" for count, name in counts if count)
    return f"the same as a document of another part but for case, spaces or punctuation: {told}" if told else ""
