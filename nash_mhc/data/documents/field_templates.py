r"""Templates over the fields of a record: `Question: {question}[\nHint: {hint}]`.

What stands in [ ] is left out where one of its fields is missing or empty. `\n` and `\t` are read as a shell leaves
them; `\[`, `\]`, `\{`, `\}` and `\\` are the characters themselves.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.spans import Part, text_of

_MARKS = re.compile(r"\\([nt\\\[\]{}])|\{([^{}\[\]\\\n]+)\}|([\[\]{}])")
_ESCAPED = {"n": "\n", "t": "\t"}


class _Word(NamedTuple):
    text: str
    is_field: bool


class _Stretch(NamedTuple):
    """Words that are there together, or not at all."""

    words: tuple[_Word, ...]
    is_optional: bool

    @property
    def fields(self) -> list[str]:
        return [word.text for word in self.words if word.is_field]


class FieldTemplate(NamedTuple):
    flag: str
    stretches: tuple[_Stretch, ...]

    @property
    def needed(self) -> list[str]:
        return [name for stretch in self.stretches if not stretch.is_optional for name in stretch.fields]

    @property
    def optional(self) -> list[str]:
        return [name for stretch in self.stretches if stretch.is_optional for name in stretch.fields]

    def filled(self, record: Any, where: str) -> tuple[Part, ...]:
        """ConfigError, with file and line, where a field that must be there is not, or has no text."""
        if not isinstance(record, Mapping):
            raise ConfigError(f"{where}: a value of type {type(record).__name__} instead of an object with fields")
        parts: list[Part] = []
        for stretch in self.stretches:
            values = {name: _value(record.get(name), where, name) for name in stretch.fields}
            if empty := [name for name, value in values.items() if not value.strip()]:
                if stretch.is_optional:
                    continue
                there = ", ".join(map(str, record)) or "none"
                if empty[0] not in record and (meant := did_you_mean(empty[0], [str(name) for name in record])):
                    raise ConfigError(f"{where}: no field {empty[0]!r}, which {self.flag} names{meant}")
                found = f"field {empty[0]!r} is empty" if empty[0] in record else f"no field {empty[0]!r}, there are {there}"
                raise ConfigError(f"{where}: {found}; mend or leave out the record, or put it in [ ] in {self.flag}")
            parts += [Part(values[word.text]) if word.is_field else Part(word.text, is_template=True) for word in stretch.words]
        return tuple(parts)


def _value(value: Any, where: str, name: str) -> str:
    """Numbers as they are written; a table writes a hole among numbers as NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "" if isinstance(value, float) and math.isnan(value) else str(value)
    return text_of(value, where, name)


def both(prompt: str | None, response: str | None) -> tuple[FieldTemplate, FieldTemplate]:
    return _parsed("--prompt-template", prompt or ""), _parsed("--response-template", response or "")


@functools.lru_cache(maxsize=16)
def _parsed(flag: str, template: str) -> FieldTemplate:
    """The value of --prompt-template or --response-template; ConfigError for what is none."""

    def refused(why: str) -> ConfigError:
        return ConfigError(f"{flag} {template!r}: {why}")

    stretches: list[_Stretch] = []
    words: list[_Word] = []
    opened: int | None = None  # where the [ stands that we are in
    for text, mark, at in _split(template):
        if mark not in ("[", "]"):
            if mark in ("{", "}"):
                raise refused(
                    f"the {mark} at character {at + 1} holds no field's name; write {{question}}, or \\{mark} for itself"
                )
            words.append(_Word(text, mark == "field"))
            continue
        if (mark == "[") == (opened is not None):
            other = "lies within another one" if mark == "[" else "closes nothing"
            raise refused(f"the {mark} at character {at + 1} {other}; write \\{mark} for the character itself")
        stretch = _Stretch(tuple(words), mark == "]")
        if stretch.is_optional and not stretch.fields:
            raise refused(
                f"the [ ] at character {at + 1} names no field, and would never vanish; write \\[ and \\] for themselves"
            )
        stretches.append(stretch)
        words, opened = [], at if mark == "[" else None
    if opened is not None:
        raise refused(f"the [ at character {opened + 1} is never closed; close it, or write \\[ for the character itself")
    stretches.append(_Stretch(tuple(words), False))
    found = FieldTemplate(flag, tuple(stretch for stretch in stretches if stretch.words))
    if not found.needed and not found.optional:
        raise refused("names no field of a record; write such as {question} where its text goes")
    return found


def _split(template: str) -> Iterator[tuple[str, str, int]]:
    """(text, `text`, place), (name, `field`, place) and the brackets between them."""
    end = 0
    for found in _MARKS.finditer(template):
        if found.start() > end:
            yield template[end : found.start()], "text", end
        escaped, name, bracket = found.groups()
        if escaped:
            yield _ESCAPED.get(escaped, escaped), "text", found.start()
        else:
            yield name or "", "field" if name else bracket, found.start()
        end = found.end()
    if end < len(template):
        yield template[end:], "text", end
