"""One record -> the text of its document, in spans that count in the loss or do not.

Plain text is one span. Prompts and chats are messages, each written by a template; with `--loss-on response`, what
counts is an assistant's message and what the template puts after it, so that the model learns to answer and to stop. A
template may spell the tokenizer's special tokens; whatever a record spells is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nash_mhc.config.schema import TEMPLATE, ConfigError
from nash_mhc.data.documents.readers import Raw

ANSWERS = ("assistant", "model", "gpt")  # roles whose messages the model shall learn to write


class Part(NamedTuple):
    text: str
    is_template: bool = False


class Span(NamedTuple):
    parts: tuple[Part, ...]
    counts: bool

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def check_template(template: str) -> str:
    """With escapes read as a shell leaves them (\\n, \\t); ConfigError unless it says where the content goes."""
    text = template.replace("\\n", "\n").replace("\\t", "\t")
    names = re.findall(r"\{(\w*)\}", text)
    if names.count("content") != 1 or set(names) - {"role", "content"}:
        raise ConfigError(f"--template {template!r}: must hold {{content}} once and may hold {{role}}, such as {TEMPLATE!r}")
    return text


def spans_of(raw: Raw, file: str, recipe: Mapping[str, Any]) -> list[Span]:
    """ConfigError, with file and line, for what is no text, no JSON, or lacks what the format asks for."""
    where = f"{file}:{raw.line}"
    if raw.kind == "text":
        return [Span((Part(_decoded(raw, file, raw.content)),), True)]
    record = raw.content
    if raw.kind == "jsonl":
        record = _parsed(_decoded(raw, file, raw.content), where)
    if recipe["format"] == "text":
        if raw.kind == "jsonl":
            record = _field(record, recipe["text_field"], where, "name the text's with --text-field")
        return [Span((Part(_text(record, where, recipe["text_field"])),), True)]
    if recipe["format"] == "prompt":
        record = {
            "messages": [
                {"role": role, "content": _field(record, name, where, "a record needs prompt and response")}
                for role, name in (("user", "prompt"), ("assistant", "response"))
            ]
        }
    return _messages(record, where, recipe)


def _decoded(raw: Raw, file: str, content: bytes) -> str:
    try:
        # The mark that some editors put before UTF-8 is no text.
        return content.decode("utf-8").removeprefix("\ufeff" if raw.line == 1 else "")
    except UnicodeDecodeError as error:
        line = raw.line + content[: error.start].count(b"\n")
        byte = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise ConfigError(
            f"{file}:{line}: not UTF-8 at byte {byte} of the line; convert the file, for instance with iconv"
        ) from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); a line must hold one whole object") from None


def _field(record: Any, name: str, where: str, remedy: str) -> Any:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: a value of type {type(record).__name__} instead of an object with fields; {remedy}")
    if name not in record:
        raise ConfigError(f"{where}: no field {name!r}, there are {', '.join(map(str, record)) or 'none'}; {remedy}")
    return record[name]


def _text(value: Any, where: str, name: str) -> str:
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


def _messages(record: Any, where: str, recipe: Mapping[str, Any]) -> list[Span]:
    messages = _field(record, "messages", where, "chat data needs a list of messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list that is not empty")
    before, _, after = recipe["template"].partition("{content}")
    spans: list[Span] = []
    for message in messages:
        role = _text(_field(message, "role", where, "a message has role and content"), where, "role")
        content = _text(_field(message, "content", where, "a message has role and content"), where, "content")
        counts = recipe["loss_on"] == "all" or role in ANSWERS
        spans.append(Span(_filled(before, role), recipe["loss_on"] == "all"))
        spans.append(Span((Part(content), *_filled(after, role)), counts))
    if not any(span.counts for span in spans):
        raise ConfigError(
            f"{where}: no message of role {ANSWERS[0]}, so nothing would be learned; leave it out or use --loss-on all"
        )
    return [span for span in spans if span.text]


def _filled(template: str, role: str) -> tuple[Part, ...]:
    """What the template says, with the role, which is the record's own word, in its places."""
    first, *rest = [Part(text, is_template=True) for text in template.split("{role}")]
    return (first, *(part for text in rest for part in (Part(role), text)))
