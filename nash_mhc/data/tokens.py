"""Text <-> token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from nash_mhc.config.schema import ConfigError


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
        texts = [b"" if i in special else str(self._inner.decode([i])).encode("utf-8") for i in range(self.vocab_size)]
        self.byte_lengths = np.array([len(t) for t in texts], np.int32)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._inner.decode(np.asarray(tokens).ravel().tolist(), skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ConfigError(f"--tokenizer {name}: neither 'bytes' nor a local folder with a Hugging Face tokenizer")
    return HuggingFaceTokenizer(Path(name))
