"""Trains a byte-level BPE tokenizer on the documents of a dataset:
no text is unknown to it, and all of it comes back."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.readers import Corpus
from nash_mhc.data.documents.records import spans_of
from nash_mhc.data.recipe import how_written
from nash_mhc.data.tokenizer import write_tokenizer_config

END = "<|endoftext|>"
LEAST = 256 + 1  # every byte, and the end


def corpus_texts(cfg: DataConfig, corpus: Corpus) -> Iterator[str]:
    """The text of every document, of at most `max_documents`; long ones in blocks."""
    recipe = how_written(cfg, corpus.format, None) | {"loss_on": "all"}
    documents = 0
    for raw in corpus.read(cfg.split):
        documents += raw.opens
        if cfg.max_documents is not None and documents > cfg.max_documents:
            return
        yield "".join(span.text for span in spans_of(raw, corpus.names[raw.file], recipe))


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path, *, progress: bool = False) -> int:
    """Leaves tokenizer.json and its settings in `out`;
    returns how many tokens it has (fewer, where the text has no more)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < LEAST:
        raise ConfigError(f"--vocab-size must be at least {LEAST} (every byte, and the end of a document), not {vocab_size}")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; choose another folder")
    found = (text for text in texts if text)
    first = next(found, None)
    if first is None:
        raise ConfigError("--dataset: no document with text in it, so there is nothing to learn from")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    backend.train_from_iterator(itertools.chain([first], found), trainer)
    part = out.with_name(out.name + ".partial")
    try:
        part.mkdir(parents=True, exist_ok=True)
        backend.save(str(part / "tokenizer.json"))
        write_tokenizer_config(part, END)
        part.rename(out)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
    return int(backend.get_vocab_size())
