"""Text <-> token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from nash_mhc.config.schema import ConfigError

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers put where bytes do not (yet) make a character


@runtime_checkable
class Tokenizer(Protocol):
    vocab_size: int
    end: int  # stands before the first token of a document and after the last
    byte_lengths: np.ndarray  # bytes of text behind each token id, for bits per byte

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, tokens: np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and one end-of-document token."""

    vocab_size = 257
    end = 256

    def __init__(self) -> None:
        self.byte_lengths = np.append(np.ones(256, np.int32), 0)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(int(t) for t in np.asarray(tokens).ravel() if t < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library, read from a local folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # slow to import; only those who ask for it wait

        try:
            self._inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--tokenizer {folder}: not a tokenizer that transformers can read ({reason})") from error
        self.vocab_size = len(self._inner)
        end = self._inner.eos_token_id if self._inner.eos_token_id is not None else self._inner.bos_token_id
        if end is None:
            raise ConfigError(
                f"--tokenizer {folder}: it has neither an eos nor a bos token to stand between documents; add one"
            )
        self.end: int = end
        special = set(self._inner.all_special_ids)
        pieces = self._inner.convert_ids_to_tokens(list(range(self.vocab_size)))
        lengths = [0 if i in special else _byte_length(str(p), str(self._inner.decode([i]))) for i, p in enumerate(pieces)]
        self.byte_lengths = np.array(lengths, np.int32)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._inner.decode(np.asarray(tokens).ravel().tolist(), skip_special_tokens=True))


def _byte_length(piece: str, text: str) -> int:
    """Bytes of text behind one token, from its name in the vocabulary and what it decodes to on its own."""
    if "\ufffd" in text and "\ufffd" not in piece:
        # Part of a character: a byte by its number, or byte-level pieces, whose names have one letter a byte.
        return 1 if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) else len(piece)
    # Decoding a piece alone drops the space that it begins with.
    return len(text.encode("utf-8")) + (piece.startswith("\u2581") and not text.startswith(" "))


def load_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ConfigError(f"--tokenizer {name}: neither 'bytes' nor a local folder with a Hugging Face tokenizer")
    return HuggingFaceTokenizer(Path(name))


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as soon as it is certain: the pieces join to decode(all tokens), and none ends within a character."""
    seen: list[int] = []
    text, shown = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(np.array(seen, np.int32))
        # A character is at most four bytes: up to three marks at the end may still turn into one.
        marks = len(text) - len(text.rstrip(_UNREADABLE))
        ready = len(text) - min(marks, 3)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]
