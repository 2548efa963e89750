"""What a text begins with: the same for documents in training, prompts, evaluations and exported tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nash_mhc.data.tokenizer import Tokenizer


def prefix_of(tokenizer: Tokenizer) -> int:
    """The token before a text that has nothing before it: the begin token, or else what ends the text before."""
    return next(token for token in (tokenizer.begin, tokenizer.bos, tokenizer.end) if token is not None)


def begun(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """A text as the model reads it: with the begin token, where documents have one. An empty text gets the prefix."""
    return [*[prefix_of(tokenizer)] * (tokenizer.begin is not None or not tokens), *tokens]


def is_of_model(name: str) -> bool:
    """Whether it is the folder of a Hugging Face model: its documents begin with what the tokenizer adds by itself."""
    folder = Path(name)
    return (folder / "config.json").is_file() and not (folder / "run.json").exists()
