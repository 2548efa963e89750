"""From the fields of a record to its text: templates of fields and chats, in spans that count in the loss or not."""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nash_mhc.config.commands import did_you_mean
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


ANSWERS = ("assistant", "model", "gpt")  # roles whose messages the model shall learn to write
_TODAY = datetime.datetime(2024, 7, 26)  # for all templates that ask: equal data gives equal rows on any day
_UNUSED = range(0xFDD0, 0xFDF0)  # code points that stand for no character in any text

Message = tuple[str, tuple[Part, ...]]  # role, content


def conversation(messages: Sequence[Message], where: str, form: Mapping[str, Any], loss_on: str) -> list[Span]:
    """`form` is `Tokenizer.chat_form`. ConfigError, with file and line, for what the template does not take."""
    is_answer = [role in ANSWERS for role, _ in messages]
    texts = [part.text for role, content in messages for part in (Part(role), *content)]
    mark = next(chr(code) for code in _UNUSED if not any(chr(code) in text for text in texts))
    # A record's text that spells a special token gets a mark in it: what the template spells has none.
    special = _any_of(tuple(form["special"]))
    as_text = lambda text: special.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", text) if special else text
    plain = [
        {
            "role": ANSWERS[0] if answers else as_text(role),
            "content": "".join(part.text if part.is_template else as_text(part.text) for part in content),
        }
        for answers, (role, content) in zip(is_answer, messages, strict=True)
    ]
    borders, written = [0], ""
    for number in (number for number, answers in enumerate(is_answer) if answers):
        for count, begins_answer in ((number, True), (number + 1, False)):
            now = _rendered(form, plain[:count], begins_answer, where)
            if not now.startswith(written):
                raise ConfigError(
                    f"{where}: the tokenizer's chat template writes what comes before message {number + 1} in another way once "
                    "that is there, so what each answer adds cannot be told; keep one answer a record, or write a --template"
                )
            written = now
            borders.append(len(now))
    whole = _rendered(form, plain, False, where) if not is_answer[-1] else written
    if not whole.startswith(written):
        raise ConfigError(
            f"{where}: the tokenizer's chat template writes the last answer in another way once more follows; leave out what "
            "follows, or write a --template"
        )
    # Both stand around every document anyway.
    first = len(form["begin"]) if form["begin"] and whole.startswith(form["begin"]) else 0
    stop = len(whole.rstrip())
    last = stop - len(form["end"]) if whole[:stop].endswith(form["end"]) else len(whole)
    spans = []
    for number, (start, end) in enumerate(zip(borders, [*borders[1:], len(whole)], strict=True)):
        text = whole[max(start, first) : min(end, last)]
        parts = tuple(Part(part, is_template=True) for part in text.split(mark))
        spans.append(Span(parts, loss_on == "all" or number % 2 == 1))
    return spans


@functools.lru_cache(maxsize=4)
def _any_of(spellings: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first = sorted((s for s in spellings if len(s) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _rendered(form: Mapping[str, Any], messages: list[dict[str, str]], begins_answer: bool, where: str) -> str:
    try:
        return str(_compiled(form["template"]).render(messages=messages, add_generation_prompt=begins_answer, **form["tokens"]))
    except Exception as error:  # whatever the template, which is a program, does not like
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{where}: the tokenizer's chat template does not take these messages ({reason}); "
            "change them, or write a --template"
        ) from error


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """As transformers does it, but for the date: worker processes do without that library, which is slow to load."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Some templates mark what the model writes; here, as for generating, that is just text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes what HTML would not take
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _TODAY.strftime}
    return environment.from_string(template)
