"""Records, and what is learned from them."""

import json
from pathlib import Path
from typing import Any

from corpora import BYTES

from nash_mhc.config.schema import DataConfig
from nash_mhc.data.documents.records import Raw
from nash_mhc.data.recipe import document_of, pieces_of, template_settings
from nash_mhc.data.tokenizer import Tokenizer


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def recipe_of(tokenizer: Tokenizer = BYTES, form: str = "fields", seq_len: int = 256, **settings: Any) -> dict[str, Any]:
    cfg = DataConfig(**{"format": form, "seq_len": seq_len} | settings)
    return template_settings(cfg, form, tokenizer) | {"seq_len": seq_len}


def learned(record: dict[str, Any], tokenizer: Tokenizer = BYTES, **settings: Any) -> list[tuple[int, bool]]:
    """Every target of a record alone, and whether it counts."""
    recipe = recipe_of(tokenizer, **settings)
    document = document_of(Raw(0, 7, record, 1, "table"), ("qa",), recipe)
    pieces, _ = pieces_of([document], recipe, tokenizer, ("qa",))
    return [(int(t), bool(c)) for p in pieces for t, c in zip(p.tokens[1:], p.scored, strict=True)]


def expected(*texts: tuple[str | int, bool], tokenizer: Tokenizer = BYTES) -> list[tuple[int, bool]]:
    """Text and single tokens, each with whether it counts."""
    ids = lambda text: [text] if isinstance(text, int) else tokenizer.encode(text).tolist()
    return [(token, counts) for text, counts in texts for token in ids(text)]
