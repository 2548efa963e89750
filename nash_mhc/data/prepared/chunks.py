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

from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig
from nash_mhc.data.documents.holdout import HeldOut, key_of
from nash_mhc.data.documents.readers import Content, Corpus, Raw
from nash_mhc.data.documents.records import Span, check_template, spans_of
from nash_mhc.data.pack import Piece, cut, lay, room_of
from nash_mhc.data.prepared.manifest import write_file
from nash_mhc.data.prepared.rows import RowFormat
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.storage.digests import digest_of

_SMALLEST, _LARGEST = 4 << 20, 32 << 20  # bytes of text in a chunk: enough to pack well, few enough for memory
_AT_ONCE = 1 << 20  # bytes of text given to the tokenizer in one call
_LOOKED_AT, _LOOKED_AT_BYTES = 256, 2 << 20  # documents, or bytes of them, that tell how long they are
_TRIFLE = 0.02  # share of the rows that may go into alignment


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
    held_out: HeldOut
    is_dense: bool = False  # documents start anywhere in a row, not only at multiples of the alignment


class Document(NamedTuple):
    """What a raw one says; or, of a long text, the part of it that was read at once."""

    raw: Raw
    spans: list[Span]
    key: int  # of the whole text
    size: int  # bytes of text


def document_of(raw: Raw, names: tuple[str, ...], recipe: dict[str, Any]) -> Document:
    spans = spans_of(raw, names[raw.file], recipe)
    texts = [span.text.encode("utf-8") for span in spans]
    return Document(raw, spans, key_of(texts) if raw.key is None else raw.key, sum(map(len, texts)))


def make_recipe(cfg: DataConfig, tokenizer: Tokenizer, corpus: Content, align: int) -> dict[str, Any]:
    """Everything that the rows follow from; equal recipes give equal bytes."""
    if cfg.split == cfg.eval_split:
        raise ConfigError(f"--eval-split {cfg.eval_split}: is what is trained on (--split); choose another name")
    return {
        "content": corpus.content,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end},
        "seq_len": cfg.seq_len,
        "align": align,
        "format": corpus.format,
        "text_field": cfg.text_field,
        "template": check_template(cfg.template or TEMPLATE),
        "loss_on": cfg.loss_on,
        "split": cfg.split,
        "eval_split": cfg.eval_split,
        "validation_fraction": 0.0 if cfg.eval_split in corpus.splits else cfg.validation_fraction,
        "max_documents": cfg.max_documents,
        "chunk_bytes": min(_LARGEST, max(_SMALLEST, corpus.total // 32)),
    }


def read_split(corpus: Corpus, recipe: dict[str, Any], split: str) -> Iterator[Raw]:
    """What of a split is used."""
    documents = 0
    for raw in corpus.read(split):
        documents += raw.opens
        if recipe["max_documents"] is not None and documents > recipe["max_documents"]:
            return
        yield raw


def read_chunks(corpus: Corpus, recipe: dict[str, Any]) -> Iterator[Chunk]:
    """The corpus in pieces of `chunk_bytes`, each of one split."""
    number = 0
    for split in (recipe["split"], *({recipe["eval_split"]} & {*corpus.splits})):
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


def _units(span: Span, tokenizer: Tokenizer) -> list[str | int]:
    """Text to tokenize as one, and the special tokens that the template spells between it."""
    units: list[str | int] = []
    for part in span.parts:
        for unit in tokenizer.split_special(part.text) if part.is_template else [part.text]:
            if isinstance(unit, str) and units and isinstance(units[-1], str):
                units[-1] += unit
            else:
                units.append(unit)
    return units


def pieces_of(documents: list[Document], job: Job) -> tuple[list[Piece], int]:
    """(pieces, documents left out because they are empty); a piece's document is its place in `documents`."""
    units = [[_units(span, job.tokenizer) for span in document.spans] for document in documents]
    texts = [unit for spans in units for span in spans for unit in span if isinstance(unit, str)]
    tokens = tokenized(texts, job.tokenizer)
    pieces: list[Piece] = []
    empty = 0
    for number, (document, spans) in enumerate(zip(documents, units, strict=True)):
        raw = document.raw
        parts = [[next(tokens) if isinstance(unit, str) else np.array([unit], np.int32) for unit in span] for span in spans]
        whole = [np.concatenate(part) if part else np.zeros(0, np.int32) for part in parts]
        if not any(len(part) for part in whole):
            empty += raw.opens and raw.closes
            continue
        counts = np.concatenate([np.full(len(part), s.counts) for part, s in zip(whole, document.spans, strict=True)])
        ids = np.concatenate(whole)
        _check_ids(ids, job, raw)
        found = cut(
            ids, job.tokenizer.end, job.recipe["seq_len"], opens=raw.opens, closes=raw.closes,
            counts=np.append(counts, counts[-1]), document=number,
        )  # fmt: skip
        pieces += [piece for piece in found if piece.counts.any()]  # a row of nothing but prompt would teach nothing
    return pieces, empty


def _check_ids(ids: np.ndarray, job: Job, raw: Raw) -> None:
    """Files keep two bytes a token where that is enough: an id that is too large would come back as another one."""
    if ids.max() >= job.tokenizer.vocab_size or ids.min() < 0:
        bad = int(ids[(ids >= job.tokenizer.vocab_size) | (ids < 0)][0])
        raise ConfigError(
            f"{job.names[raw.file]}:{raw.line}: the tokenizer makes token {bad} of this document, and says that it has "
            f"{job.tokenizer.vocab_size} (0 to {job.tokenizer.vocab_size - 1}); mend its vocabulary or use another --tokenizer"
        )


def wastes_alignment(job: Job, documents: Iterator[Document]) -> bool:
    """Whether so many documents are short
    that room for each to start at a multiple would be more than a trifle of the rows.

    By the first few hundred, or the first few MB of them: what they show decides for all, whoever prepares the rest.
    """
    stride, seq_len = job.recipe["align"], job.recipe["seq_len"]
    looked_at: list[Document] = []
    for document in documents:
        looked_at.append(document)
        if len(looked_at) >= _LOOKED_AT or sum(seen.size for seen in looked_at) >= _LOOKED_AT_BYTES:
            break
    pieces, _ = pieces_of(looked_at, job)
    gaps = sum(-len(piece.counts) % stride for piece in pieces if len(piece.counts) < seq_len)
    return gaps > _TRIFLE * max(1, sum(len(piece.counts) for piece in pieces))


def make_chunk(job: Job, chunk: Chunk) -> dict[str, Any]:
    """Writes the shards of a chunk and, last, the note that says they are there; returns the note."""
    recipe = job.recipe
    documents = [document_of(raw, job.names, recipe) for raw in chunk.raws]
    pieces, empty = pieces_of(documents, job)
    is_own = chunk.split == recipe["eval_split"] != recipe["split"]  # the data's own held-out split
    rule = HeldOut() if is_own else job.held_out
    by_piece = lambda piece: key_of([piece.tokens.tobytes()])
    keys = [by_piece(piece) if rule.by_piece else documents[piece.document].key for piece in pieces]
    note: dict[str, Any] = {"rule": rule_digest(job), "bytes": sum(d.size for d in documents), "empty": empty, "splits": {}}
    note |= {"lowest": min(keys, default=None), "highest": max(keys, default=None)}
    for name, held_out in ((chunk.split, False), (recipe["eval_split"], True)):
        mine = [piece for piece, key in zip(pieces, keys, strict=True) if (key in rule) == held_out]
        if mine:
            note["splits"][name] = _write_shard(job, chunk, name, mine, documents)
    write_file(job.folder / f"chunk-{chunk.number:05d}.json", json.dumps(note).encode())
    return note


def rule_digest(job: Job) -> str:
    """What a note is worth nothing without: another rule would have made other shards."""
    return digest_of([job.held_out.below, sorted(job.held_out.chosen), job.held_out.by_piece])


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
