"""What rows are made by: all of the configuration and of the data that they depend on,
resolved once and passed down."""

from __future__ import annotations

from typing import Any

from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig
from nash_mhc.data.documents.readers import Content
from nash_mhc.data.documents.records import check_template
from nash_mhc.data.tokenizer import Tokenizer

_SMALLEST, _LARGEST = 4 << 20, 32 << 20  # bytes of text in a chunk: enough to pack well, few enough for memory

Recipe = dict[str, Any]  # as it stands in a manifest: equal recipes give equal bytes


def make_recipe(cfg: DataConfig, tokenizer: Tokenizer, corpus: Content, align: int) -> Recipe:
    """ConfigError where the settings do not go together."""
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
