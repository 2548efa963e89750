"""What rows are made by: all of the configuration and of the data that they depend on,
resolved once and passed down."""

from __future__ import annotations

from typing import Any

from nash_mhc.config.data import TOKENIZER
from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig
from nash_mhc.data.documents.readers import Content
from nash_mhc.data.documents.records import check_template
from nash_mhc.data.tokenizer import Tokenizer

_SMALLEST, _LARGEST = 4 << 20, 32 << 20  # bytes of text in a chunk: enough to pack well, few enough for memory

Recipe = dict[str, Any]  # as it stands in a manifest: equal recipes give equal bytes


def how_written(cfg: DataConfig, form: str, tokenizer: Tokenizer | None) -> Recipe:
    """What the text of a record follows from. Without a tokenizer, none can write it."""
    if cfg.template == TOKENIZER and form != "text":
        if tokenizer is None:
            raise ConfigError(f"--template {TOKENIZER}: there is no tokenizer yet to write with; write a template of your own")
        written: Recipe = {"template": TOKENIZER, "chat_form": tokenizer.chat_form()}
    else:
        written = {"template": check_template(TEMPLATE if cfg.template in (None, TOKENIZER) else cfg.template)}
    if form == "fields":
        written |= {"prompt_template": cfg.prompt_template, "response_template": cfg.response_template}
    return {"format": form, "text_field": cfg.text_field, **written, "loss_on": cfg.loss_on}


def make_recipe(cfg: DataConfig, tokenizer: Tokenizer, corpus: Content, align: int) -> Recipe:
    """ConfigError where the settings do not go together."""
    if cfg.split == cfg.eval_split:
        raise ConfigError(f"--eval-split {cfg.eval_split}: is what is trained on (--split); choose another name")
    made_by = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    recipe = {
        "content": corpus.content,
        # Where documents have a begin token, the recipe is what it was before some had none.
        "tokenizer": made_by | ({"begin": None} if tokenizer.begin is None else {}),
        "seq_len": cfg.seq_len,
        "align": align,
        **how_written(cfg, corpus.format, tokenizer),
        "split": cfg.split,
        "eval_split": cfg.eval_split,
        "validation_fraction": 0.0 if cfg.eval_split in corpus.splits else cfg.validation_fraction,
        "max_documents": cfg.max_documents,
        "chunk_bytes": min(_LARGEST, max(_SMALLEST, corpus.total // 32)),
    }
    # Only where there is one: data without is what it was before there were tests.
    return recipe | (_test_part(cfg, cfg.test_part, corpus) if cfg.test_part is not None else {})


def _test_part(cfg: DataConfig, name: str, corpus: Content) -> Recipe:
    for flag, other in (("--split", cfg.split), ("--eval-split", cfg.eval_split)):
        if name == other:
            raise ConfigError(f"--test-split {name}: is what {flag} names; choose another name")
    is_own = name in corpus.splits
    if not is_own and not cfg.test_fraction:
        there = f", there are {', '.join(corpus.splits)}" if corpus.splits else ""
        raise ConfigError(
            f"--test-split {name}: the data has no such split{there}; choose another, or a share of it with --test-fraction"
        )
    return {"test_split": name, "test_fraction": 0.0 if is_own else cfg.test_fraction}
