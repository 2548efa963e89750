"""Documents -> tokens -> pieces, each of which fits into a row: what prepared and streamed rows have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.holdout import key_of
from nash_mhc.data.documents.readers import Raw
from nash_mhc.data.documents.records import spans_of
from nash_mhc.data.documents.templates import Span
from nash_mhc.data.pack import Piece, cut
from nash_mhc.data.recipe import Recipe
from nash_mhc.data.tokenizer import Tokenizer

_AT_ONCE = 1 << 20  # bytes of text given to the tokenizer in one call
_LOOKED_AT, _LOOKED_AT_BYTES = 256, 2 << 20  # documents, or bytes of them, that tell how long they are
_TRIFLE = 0.02  # share of the rows that may go into alignment


class Document(NamedTuple):
    """What a raw one says; or, of a long text, the part of it that was read at once."""

    raw: Raw
    spans: list[Span]
    key: int  # of the whole text
    size: int  # bytes of text


def document_of(raw: Raw, names: tuple[str, ...], recipe: Recipe) -> Document:
    spans = spans_of(raw, names[raw.file], recipe)
    texts = [span.text.encode("utf-8") for span in spans]
    return Document(raw, spans, key_of(texts) if raw.key is None else raw.key, sum(map(len, texts)))


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


def pieces_of(
    documents: list[Document], recipe: Recipe, tokenizer: Tokenizer, names: tuple[str, ...]
) -> tuple[list[Piece], int]:
    """(pieces, documents left out because they are empty); a piece's document is its place in `documents`."""
    units = [[_units(span, tokenizer) for span in document.spans] for document in documents]
    texts = [unit for spans in units for span in spans for unit in span if isinstance(unit, str)]
    tokens = tokenized(texts, tokenizer)
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
        _check_ids(ids, tokenizer, f"{names[raw.file]}:{raw.line}")
        found = cut(
            ids, tokenizer.end, recipe["seq_len"], opens=raw.opens and tokenizer.begin is not None, closes=raw.closes,
            counts=np.append(counts, counts[-1]), document=number, begin=tokenizer.begin,
        )  # fmt: skip
        pieces += [piece for piece in found if piece.counts.any()]  # a row of nothing but prompt would teach nothing
    return pieces, empty


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer, where: str) -> None:
    """Files keep two bytes a token where that is enough: an id that is too large would come back as another one."""
    if ids.max() >= tokenizer.vocab_size or ids.min() < 0:
        bad = int(ids[(ids >= tokenizer.vocab_size) | (ids < 0)][0])
        raise ConfigError(
            f"{where}: the tokenizer makes token {bad} of this document, and says that it has "
            f"{tokenizer.vocab_size} (0 to {tokenizer.vocab_size - 1}); mend its vocabulary or use another --tokenizer"
        )


def wastes_alignment(documents: Iterator[Document], recipe: Recipe, tokenizer: Tokenizer, names: tuple[str, ...]) -> bool:
    """Whether so many documents are short
    that room for each to start at a multiple would be more than a trifle of the rows.

    By the first few hundred, or the first few MB of them: what they show decides for all, whoever prepares the rest.
    """
    stride, seq_len = recipe["align"], recipe["seq_len"]
    looked_at: list[Document] = []
    for document in documents:
        looked_at.append(document)
        if len(looked_at) >= _LOOKED_AT or sum(seen.size for seen in looked_at) >= _LOOKED_AT_BYTES:
            break
    pieces, _ = pieces_of(looked_at, recipe, tokenizer, names)
    gaps = sum(-len(piece.counts) % stride for piece in pieces if len(piece.counts) < seq_len)
    return gaps > _TRIFLE * max(1, sum(len(piece.counts) for piece in pieces))
