"""The text of a document, in spans that count in the loss or do not."""

from __future__ import annotations

from typing import Any, NamedTuple

from nash_mhc.config.schema import ConfigError


class Part(NamedTuple):
    text: str
    is_template: bool = False  # what it spells may be special tokens; whatever a record spells is text


class Span(NamedTuple):
    parts: tuple[Part, ...]
    counts: bool

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def text_of(value: Any, where: str, name: str) -> str:
    """What a field of a record holds; ConfigError, with file and line, where that is no text."""
    if value is None:  # tables have holes; an empty document is left out and counted
        return ""
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: {name} is of type {type(value).__name__}, not text; choose another field or write it as text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {name} holds half a character (a lone surrogate); repair or leave out the record"
        ) from None
    return value
