"""Conversations as a tokenizer's own chat template writes them (`--template tokenizer`).

A template is a program (Jinja) that writes a whole conversation. What an answer adds to it is found by writing the
conversation up to the answer, and with it: the first must be how the second begins.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.spans import Part, Span

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
