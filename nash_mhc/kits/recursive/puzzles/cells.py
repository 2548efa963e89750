"""Cells as tokens, a symbol each, so that a puzzle can be written and read as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nash_mhc.config.fields import ConfigError

_ALSO_EMPTY = {"0": "."}  # what others write for a symbol, where it is no symbol itself


class CellTokenizer:
    """The symbols in their order are tokens 0, 1, ...: the numbers that cells hold. One token more ends a document.

    Ends of lines are no cells: a grid may be given in lines.
    """

    adds_begin = False
    begin: int | None
    bos: int | None = None

    def __init__(self, symbols: str) -> None:
        if not symbols or len(set(symbols)) < len(symbols) or not symbols.isascii() or not symbols.isprintable():
            raise ConfigError(f"symbols {symbols!r}: must be different printable ASCII characters, one for each kind of cell")
        self.symbols, self.vocab_size = symbols, len(symbols) + 1
        self.begin = self.end = len(symbols)
        self.fingerprint = f"cells {symbols}"
        self.byte_lengths = np.append(np.ones(len(symbols), np.int32), np.int32(0))
        self._numbers = {symbol: number for number, symbol in enumerate(symbols)}
        for written, meant in _ALSO_EMPTY.items():
            if meant in self._numbers:
                self._numbers.setdefault(written, self._numbers[meant])

    def encode(self, text: str) -> np.ndarray:
        cells = "".join(text.split("\n"))
        if unknown := next((symbol for symbol in cells if symbol not in self._numbers), None):
            raise ConfigError(f"{unknown!r} is no symbol of this puzzle; there are {' '.join(map(repr, self.symbols))}")
        return np.array([self._numbers[symbol] for symbol in cells], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self.symbols[int(t)] for t in np.asarray(tokens).ravel() if 0 <= t < len(self.symbols))

    def grid_text(self, cells: np.ndarray, width: int) -> str:
        """A grid in lines, for people; `encode` reads it back."""
        text = self.decode(cells)
        return "\n".join(text[start : start + width] for start in range(0, len(text), width))

    def split_special(self, template: str) -> list[str | int]:
        return [template]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        raise ConfigError("the tokenizer of cells has no chat template; write the puzzle's cells")

    def chat_form(self) -> dict[str, Any]:
        raise ConfigError("--template tokenizer: the tokenizer of cells has no chat template; puzzles need none")
