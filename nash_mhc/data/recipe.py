"""The recipe of a dataset's rows, and documents -> tokens -> pieces by it, for prepared and streamed data alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig
from nash_mhc.config.sections import TOKENIZER
from nash_mhc.data.documents.files import Corpus
from nash_mhc.data.documents.holdout import key_of
from nash_mhc.data.documents.records import Raw, Span, check_template, spans_of
from nash_mhc.data.pack import Piece, split_document
from nash_mhc.data.tokenizer import Tokenizer

_SMALLEST, _LARGEST = 4 << 20, 32 << 20  # bytes of text in a chunk: enough to pack well, little enough for memory
_TOKENIZED_AT_ONCE = 1 << 20  # bytes of text per tokenizer call
_SURVEYED, _SURVEYED_BYTES = 256, 2 << 20  # documents, or bytes of them, from which document lengths are estimated
_TOLERATED_WASTE = 0.02  # share of the slots that alignment may waste

Recipe = dict[str, Any]  # all settings and data digests that the rows depend on, as stored in the manifest


def template_settings(cfg: DataConfig, form: str, tokenizer: Tokenizer | None) -> Recipe:
    """Return the settings that turn a record into text. Without a tokenizer, `--template tokenizer` is an error."""
    if cfg.template == TOKENIZER and form != "text":
        if tokenizer is None:
            raise ConfigError(
                f"--template {TOKENIZER}: no tokenizer is given, so no chat template; give a --template with {{content}}"
            )
        written: Recipe = {"template": TOKENIZER, "chat_form": tokenizer.chat_form()}
    else:
        written = {"template": check_template(TEMPLATE if cfg.template in (None, TOKENIZER) else cfg.template)}
    if form == "fields":
        written |= {"prompt_template": cfg.prompt_template, "response_template": cfg.response_template}
    return {"format": form, "text_field": cfg.text_field, **written, "loss_on": cfg.loss_on}


def make_recipe(cfg: DataConfig, tokenizer: Tokenizer, corpus: Corpus, align: int) -> Recipe:
    """Return the recipe of these settings and this data; raise ConfigError if settings contradict each other."""
    if cfg.split == cfg.eval_split:
        raise ConfigError(f"--eval-split {cfg.eval_split}: is the training split (--split); choose another name")
    made_by = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    recipe = {
        "content": corpus.content,
        # Absent if documents have a begin token: older recipes have no such key.
        "tokenizer": made_by | ({"begin": None} if tokenizer.begin is None else {}),
        "seq_len": cfg.seq_len,
        "align": align,
        **template_settings(cfg, corpus.format, tokenizer),
        "split": cfg.split,
        "eval_split": cfg.eval_split,
        "validation_fraction": 0.0 if cfg.eval_split in corpus.splits else cfg.validation_fraction,
        "max_documents": cfg.max_documents,
        "chunk_bytes": min(_LARGEST, max(_SMALLEST, corpus.total // 32)),
    }
    if (test := cfg.test_part) is None:  # recipes without a test part have no keys for it, like older ones
        return recipe
    for flag, other in (("--split", cfg.split), ("--eval-split", cfg.eval_split)):
        if test == other:
            raise ConfigError(f"--test-split {test}: is already the {flag}; choose another name")
    is_own = test in corpus.splits
    if not is_own and not cfg.test_fraction:
        present = f" (splits: {', '.join(corpus.splits)})" if corpus.splits else ""
        raise ConfigError(f"--test-split {test}: the data has no such split{present}; choose another, or use --test-fraction")
    return recipe | {"test_split": test, "test_fraction": 0.0 if is_own else cfg.test_fraction}


def corpus_texts(cfg: DataConfig, corpus: Corpus) -> Iterator[str]:
    """Yield the text of at most `max_documents` documents, long ones in blocks."""
    recipe = template_settings(cfg, corpus.format, None) | {"loss_on": "all", "max_documents": cfg.max_documents}
    for raw in read_split(corpus, recipe, cfg.split):
        yield "".join(span.text for span in spans_of(raw, corpus.names[raw.file], recipe))


def read_split(corpus: Corpus, recipe: Recipe, split: str) -> Iterator[Raw]:
    """Yield at most `max_documents` documents of a split."""
    documents = 0
    for raw in corpus.read(split):
        documents += raw.opens
        if recipe["max_documents"] is not None and documents > recipe["max_documents"]:
            return
        yield raw


class Document(NamedTuple):
    """The text of a raw document, or of the block of it that was read."""

    raw: Raw
    spans: list[Span]
    key: int  # of the whole document
    size: int  # bytes of text


def document_of(raw: Raw, names: tuple[str, ...], recipe: Recipe) -> Document:
    spans = spans_of(raw, names[raw.file], recipe)
    texts = [span.text.encode("utf-8") for span in spans]
    return Document(raw, spans, key_of(texts) if raw.key is None else raw.key, sum(map(len, texts)))


def _tokenize(texts: list[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Tokenize in calls of limited size, because a call's tokens are Python objects for a moment."""
    ends = itertools.accumulate(map(len, texts))
    for _, batch in itertools.groupby(zip(texts, ends, strict=True), lambda entry: entry[1] // _TOKENIZED_AT_ONCE):
        yield from tokenizer.encode_batch([text for text, _ in batch])


def _split_special_tokens(span: Span, tokenizer: Tokenizer) -> list[str | int]:
    """Split a span into text and the ids of the special tokens that occur in the template."""
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
    """Return (pieces, number of empty documents); `piece.document` is an index into `documents`."""
    units = [[_split_special_tokens(span, tokenizer) for span in document.spans] for document in documents]
    tokens = _tokenize([unit for spans in units for span in spans for unit in span if isinstance(unit, str)], tokenizer)
    pieces: list[Piece] = []
    empty = 0
    for number, (document, spans) in enumerate(zip(documents, units, strict=True)):
        raw = document.raw
        ids, scored = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
        for span, span_units in zip(document.spans, spans, strict=True):
            for unit in span_units:
                ids.append(next(tokens) if isinstance(unit, str) else np.array([unit], np.int32))
                scored.append(np.full(len(ids[-1]), span.scored))
        whole = np.concatenate(ids)
        if not len(whole):
            empty += raw.opens and raw.closes
            continue
        _check_ids(whole, tokenizer, f"{names[raw.file]}:{raw.line}")
        of_document = split_document(
            whole, tokenizer.end, recipe["seq_len"], begin=tokenizer.begin if raw.opens else None, closes=raw.closes,
            scored=np.concatenate(scored), document=number,
        )  # fmt: skip
        pieces += [piece for piece in of_document if piece.scored.any()]  # drop pieces of prompt only
    return pieces, empty


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer, where: str) -> None:
    """Prepared files store two bytes per token where the vocabulary allows: a larger id would come back wrong."""
    if ids.max() >= tokenizer.vocab_size or ids.min() < 0:
        bad = int(ids[(ids >= tokenizer.vocab_size) | (ids < 0)][0])
        size = f"{tokenizer.vocab_size} tokens (0 to {tokenizer.vocab_size - 1})"
        raise ConfigError(f"{where}: the tokenizer returns token {bad} of {size}; repair it or use another --tokenizer")


def alignment_wastes_space(documents: Iterator[Document], recipe: Recipe, tokenizer: Tokenizer, names: tuple[str, ...]) -> bool:
    """Return whether aligning documents would waste more than 2% of the slots, estimated from the first documents."""
    stride, seq_len = recipe["align"], recipe["seq_len"]
    surveyed: list[Document] = []
    for document in documents:
        surveyed.append(document)
        if len(surveyed) >= _SURVEYED or sum(seen.size for seen in surveyed) >= _SURVEYED_BYTES:
            break
    pieces, _ = pieces_of(surveyed, recipe, tokenizer, names)
    gaps = sum(-len(piece.scored) % stride for piece in pieces if len(piece.scored) < seq_len)
    return gaps > _TOLERATED_WASTE * max(1, sum(len(piece.scored) for piece in pieces))
