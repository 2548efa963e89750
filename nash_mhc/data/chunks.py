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

from nash_mhc.config.schema import DataConfig
from nash_mhc.data.manifest import write_whole
from nash_mhc.data.order import mix
from nash_mhc.data.pack import Piece, cut, lay
from nash_mhc.data.readers import Content, Corpus, Raw
from nash_mhc.data.records import TEMPLATE, check_template, spans_of
from nash_mhc.data.rows import RowFormat
from nash_mhc.data.tokens import Tokenizer

_SMALLEST, _LARGEST = 4 << 20, 32 << 20  # bytes of text in a chunk: enough to pack well, few enough for memory
_AT_ONCE = 1 << 20  # bytes of text given to the tokenizer in one call


class Chunk(NamedTuple):
    number: int
    split: str
    raws: list[Raw]


@dataclass(frozen=True)
class Job:
    """What a process needs to make the shards of a chunk."""

    recipe: dict[str, Any]
    tokenizer: Tokenizer
    names: tuple[str, ...]  # of the files, for messages
    folder: Path


def make_recipe(cfg: DataConfig, tokenizer: Tokenizer, corpus: Content, align: int) -> dict[str, Any]:
    """Everything that the rows follow from; equal recipes give equal bytes."""
    return {
        "content": corpus.content,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end},
        "seq_len": cfg.seq_len,
        "align": align,
        "format": cfg.format,
        "text_field": cfg.text_field,
        "template": check_template(cfg.template or TEMPLATE),
        "loss_on": cfg.loss_on,
        "split": cfg.split,
        "eval_split": cfg.eval_split,
        "validation_fraction": 0.0 if cfg.eval_split in corpus.splits else cfg.validation_fraction,
        "max_documents": cfg.max_documents,
        "chunk_bytes": min(_LARGEST, max(_SMALLEST, corpus.total // 32)),
    }


def read_chunks(corpus: Corpus, recipe: dict[str, Any]) -> Iterator[Chunk]:
    """The corpus in pieces of `chunk_bytes`, each of one split."""
    number = 0
    for split in (recipe["split"], *({recipe["eval_split"]} & {*corpus.splits})):
        raws: list[Raw] = []
        size = documents = 0
        for raw in corpus.read(split):
            documents += raw.opens
            if recipe["max_documents"] is not None and documents > recipe["max_documents"]:
                break
            raws.append(raw)
            size += raw.size
            if size >= recipe["chunk_bytes"]:
                yield Chunk(number, split, raws)
                number, raws, size = number + 1, [], 0
        if raws:
            yield Chunk(number, split, raws)
            number += 1


def tokenized(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """In calls of bounded size: a batch's tokens are Python objects for a moment."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _AT_ONCE:
            yield from tokenizer.encode_batch(batch)
            batch, size = [], 0
    yield from tokenizer.encode_batch(batch)


def pieces_of(raws: list[Raw], job: Job) -> tuple[list[Piece], int, int]:
    """(pieces, bytes of text, documents left out because they are empty); a piece's document is its place in `raws`."""
    recipe = job.recipe
    spans = [spans_of(raw, job.names[raw.file], recipe) for raw in raws]
    tokens = tokenized([text for document in spans for text, _ in document], job.tokenizer)
    pieces: list[Piece] = []
    size = empty = 0
    for number, (raw, document) in enumerate(zip(raws, spans, strict=True)):
        parts = [next(tokens) for _ in document]
        size += sum(len(text.encode("utf-8")) for text, _ in document)
        if not any(len(part) for part in parts):
            empty += raw.opens and raw.closes
            continue
        counts = np.concatenate([np.full(len(part), c) for part, (_, c) in zip(parts, document, strict=True)])
        found = cut(
            np.concatenate(parts), job.tokenizer.end, recipe["seq_len"], opens=raw.opens, closes=raw.closes,
            counts=np.append(counts, counts[-1]), document=number,
        )  # fmt: skip
        pieces += [piece for piece in found if piece.counts.any()]  # a row of nothing but prompt would teach nothing
    return pieces, size, empty


def held_out(count: int, fraction: float, chunk: int) -> np.ndarray:
    """Which of a chunk's pieces are held out: a mask with the fraction's share, by a hash of their numbers.

    What the share leaves over one chunk, another makes up for; and a corpus of one chunk holds out something, if it can.
    """
    golden = (0.5 + chunk * 0.6180339887498949) % 1
    wanted = int(count * fraction + golden)
    if chunk == 0 and fraction > 0:
        wanted = max(1, wanted)
    mask = np.zeros(count, bool)
    mask[np.argsort(mix(np.arange(count), chunk + 1), kind="stable")[: min(wanted, count - 1)]] = fraction > 0
    return mask


def make_chunk(job: Job, chunk: Chunk) -> dict[str, Any]:
    """Writes the shards of a chunk and, last, the note that says they are there; returns the note."""
    recipe = job.recipe
    pieces, size, empty = pieces_of(chunk.raws, job)
    is_own = chunk.split == recipe["eval_split"] != recipe["split"]  # the data's own held-out split
    mask = held_out(len(pieces), 0.0 if is_own else recipe["validation_fraction"], chunk.number)
    note: dict[str, Any] = {"bytes": size, "empty": empty, "splits": {}}
    for name, wanted in ((chunk.split, ~mask), (recipe["eval_split"], mask)):
        mine = [piece for piece, take in zip(pieces, wanted, strict=True) if take]
        if mine:
            note["splits"][name] = _write_shard(job, chunk, name, mine)
    write_whole(job.folder / f"chunk-{chunk.number:05d}.json", json.dumps(note).encode())
    return note


def _write_shard(job: Job, chunk: Chunk, split: str, pieces: list[Piece]) -> dict[str, Any]:
    recipe, tokenizer = job.recipe, job.tokenizer
    laid, rows = lay(pieces, tokenizer.end, recipe["seq_len"], align=recipe["align"])
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
    write_whole(job.folder / f"{name}.rows", records)
    write_whole(job.folder / f"{name}.origins", buffer.getvalue())
    shard = {"name": name, "rows": len(rows), "sha256": sha256(records).hexdigest()}
    return {
        "shard": shard | {"origins_sha256": sha256(buffer.getvalue()).hexdigest()},
        "tokens": int(laid.counts.sum()),
        "slots": sum(len(piece.counts) for piece in pieces),
        "documents": len({piece.document for piece in pieces}),
        "most_documents": max(map(len, rows), default=0),
    }
