"""Turn one record into spans of text that are in the loss or not.

Plain text is one span. Prompts and chats are messages, each written by a template; named fields are written by a prompt
template and a response template. With `--loss-on response`, only assistant messages and the template text after them
are in the loss.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.data import TOKENIZER
from nash_mhc.config.schema import TEMPLATE, ConfigError
from nash_mhc.data.documents.files import Raw
from nash_mhc.data.documents.templates import ANSWERS, Message, Part, Span, conversation, parse_both, text_of
from nash_mhc.storage.json_files import parse_json

# Common field names for prompts and responses, for suggestions in errors.
_PROMPT_NAMES = ("question", "instruction", "prompt", "query", "input", "problem")
_RESPONSE_NAMES = ("answer", "response", "output", "completion", "solution", "target")


def check_template(template: str) -> str:
    """Return the value of --template with escapes (\\n, \\t) resolved; ConfigError unless it has one {content}."""
    text = template.replace("\\n", "\n").replace("\\t", "\t")
    names = re.findall(r"\{(\w*)\}", text)
    if names.count("content") != 1 or set(names) - {"role", "content"}:
        raise ConfigError(
            f"--template {template!r}: must have {{content}} once and may have {{role}}, such as {TEMPLATE!r}; or be "
            f"{TOKENIZER}"
        )
    return text


def spans_of(raw: Raw, file: str, recipe: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a document; ConfigError, with file and line, for invalid text or JSON or a missing field.

    A record with an empty answer has no spans: only the template would be learned from it.
    """
    where = f"{file}:{raw.line}"
    form, score_all = recipe["format"], recipe["loss_on"] == "all"
    if raw.kind == "text":
        if form == "fields":
            raise ConfigError(
                f"{file}: --format fields needs records, this is a text file; leave it out, for example "
                "with --extensions .jsonl"
            )
        return [Span((Part(_decode(raw, file)),), True)]
    record = _parse(_decode(raw, file), where) if raw.kind == "jsonl" else raw.content
    if form == "text":
        if raw.kind == "jsonl":
            record = _field(record, recipe["text_field"], where, _suggest_template(record))
        return [Span((Part(text_of(record, where, recipe["text_field"])),), True)]
    if form == "fields":
        templates = parse_both(recipe["prompt_template"], recipe["response_template"])
        prompt, response = (template.fill(record, where) for template in templates)
        if not any(part.text for part in response):
            raise ConfigError(f"{where}: --response-template gives no text; fill one of its fields or remove the record")
        if recipe["template"] != TOKENIZER:
            return [span for span in (Span(prompt, score_all), Span(response, True)) if span.text]
        messages: list[Message] = [("user", prompt), ("assistant", response)]
    elif form == "prompt":
        remedy = "a record needs prompt and response"
        content = lambda name: (Part(text_of(_field(record, name, where, remedy), where, "content")),)
        messages = [("user", content("prompt")), ("assistant", content("response"))]
    else:
        messages = _messages(record, where)
    if not score_all and not any(role in ANSWERS for role, _ in messages):
        raise ConfigError(
            f"{where}: no message of role {ANSWERS[0]}, so no target is in the loss; remove the record or use --loss-on all"
        )
    if any(role in ANSWERS and not "".join(part.text for part in content).strip() for role, content in messages):
        return []
    return [span for span in _write(messages, where, recipe) if span.text]


def _decode(raw: Raw, file: str) -> str:
    content: bytes = raw.content
    try:
        return content.decode("utf-8").removeprefix("\ufeff" if raw.line == 1 else "")  # the byte order mark
    except UnicodeDecodeError as error:
        line = raw.line + content[: error.start].count(b"\n")
        byte = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise ConfigError(
            f"{file}:{line}: not UTF-8 at byte {byte} of the line; convert the file, for example with iconv"
        ) from None


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); a line must hold one complete object") from None


def _field(record: Any, name: str, where: str, remedy: str) -> Any:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: a value of type {type(record).__name__} instead of an object with fields; {remedy}")
    if name not in record:
        raise ConfigError(f"{where}: no field {name!r}, there are {', '.join(map(str, record)) or 'none'}; {remedy}")
    return record[name]


def _suggest_template(record: Any) -> str:
    """Return what to do about a record without the text field, given the names of its fields."""
    by_flag = "name the text field with --text-field"
    names = set(record) if isinstance(record, Mapping) else set()
    prompt = next((name for name in _PROMPT_NAMES if name in names), None)
    response = next((name for name in _RESPONSE_NAMES if name in names), None)
    if prompt is None or response is None:
        return by_flag
    templates = ("--prompt-template", rf"{{{prompt}}}\n", "--response-template", f"{{{response}}}")
    return f"to learn the answers use {shlex.join(['--format', 'fields', *templates])}; or {by_flag}"


def _messages(record: Any, where: str) -> list[Message]:
    messages = _field(record, "messages", where, "chat data needs a list of messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a non-empty list")
    text = lambda message, name: text_of(_field(message, name, where, "a message has role and content"), where, name)
    return [(text(message, "role"), (Part(text(message, "content")),)) for message in messages]


def _write(messages: list[Message], where: str, recipe: Mapping[str, Any]) -> list[Span]:
    if recipe["template"] == TOKENIZER:
        return conversation(messages, where, recipe["chat_form"], recipe["loss_on"])
    before, _, after = recipe["template"].partition("{content}")
    score_all = recipe["loss_on"] == "all"
    spans: list[Span] = []
    for role, content in messages:
        spans.append(Span(_fill_role(before, role), score_all))
        spans.append(Span((*content, *_fill_role(after, role)), score_all or role in ANSWERS))
    return spans


def _fill_role(template: str, role: str) -> tuple[Part, ...]:
    """Replace {role} by the record's text, which is not template text."""
    first, *rest = [Part(text, is_template=True) for text in template.split("{role}")]
    return (first, *(part for text in rest for part in (Part(role), text)))
