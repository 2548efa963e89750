"""Our tokenizer of bytes as Hugging Face's libraries know it: every byte is the token of its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nash_mhc.data.tokenizer import ByteTokenizer, prepend_token, write_tokenizer_config

_END = "<|endoftext|>"


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in such files: itself where it can be seen, else the next free one."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def write(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json. Texts get the token in front that every document began with."""
    vocabulary = {letter: byte for byte, letter in sorted(_letters().items())}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": ByteTokenizer.end, "content": _END, "single_word": False, "lstrip": False, "rstrip": False}
    values: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None, "pre_tokenizer": by_bytes, "decoder": by_bytes,
        "post_processor": prepend_token(_END, ByteTokenizer.end),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")
    write_tokenizer_config(folder, _END)
