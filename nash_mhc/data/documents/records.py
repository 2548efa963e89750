"""One record -> the text of its document, in spans that count in the loss or do not.

Plain text is one span. Prompts and chats are messages, each written by a template; named fields are written by a
template for the prompt and one for the response. With `--loss-on response`, what counts is an assistant's message and
what the template puts after it, so that the model learns to answer and to stop. A template may spell the tokenizer's
special tokens; whatever a record spells is text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.data import TOKENIZER
from nash_mhc.config.schema import TEMPLATE, ConfigError
from nash_mhc.data.documents.readers import Raw
from nash_mhc.data.documents.templates import ANSWERS, Message, Part, Span, both, conversation, text_of
from nash_mhc.storage.json_files import parse_json

# Names that datasets give to what is asked and to what is answered.
_ASKS = ("question", "instruction", "prompt", "query", "input", "problem")
_ANSWERS = ("answer", "response", "output", "completion", "solution", "target")


def check_template(template: str) -> str:
    """With escapes read as a shell leaves them (\\n, \\t); ConfigError unless it says where the content goes."""
    text = template.replace("\\n", "\n").replace("\\t", "\t")
    names = re.findall(r"\{(\w*)\}", text)
    if names.count("content") != 1 or set(names) - {"role", "content"}:
        raise ConfigError(
            f"--template {template!r}: must hold {{content}} once and may hold {{role}}, such as {TEMPLATE!r}; or be "
            f"{TOKENIZER}"
        )
    return text


def spans_of(raw: Raw, file: str, recipe: Mapping[str, Any]) -> list[Span]:
    """ConfigError, with file and line, for what is no text, no JSON, or lacks what the format asks for.

    No spans for a record with an answer that is empty or null: only the template would be learned from it.
    """
    where = f"{file}:{raw.line}"
    if raw.kind == "text":
        if recipe["format"] == "fields":
            raise ConfigError(
                f"{file}: a text file has no fields, which --format fields asks for; leave it out, for instance with "
                "--extensions .jsonl"
            )
        return [Span((Part(_decoded(raw, file, raw.content)),), True)]
    record = raw.content
    if raw.kind == "jsonl":
        record = _parsed(_decoded(raw, file, raw.content), where)
    if recipe["format"] == "text":
        if raw.kind == "jsonl":
            record = _field(record, recipe["text_field"], where, _remedy(record))
        return [Span((Part(text_of(record, where, recipe["text_field"])),), True)]
    if recipe["format"] == "fields":
        prompt, response = (
            template.filled(record, where) for template in both(recipe["prompt_template"], recipe["response_template"])
        )
        if not any(part.text for part in response):
            raise ConfigError(
                f"{where}: nothing is left of --response-template; fill one of its fields or leave the record out"
            )
        if recipe["template"] != TOKENIZER:
            return [span for span in (Span(prompt, recipe["loss_on"] == "all"), Span(response, True)) if span.text]
        messages: list[Message] = [("user", prompt), ("assistant", response)]
    elif recipe["format"] == "prompt":
        remedy = "a record needs prompt and response"
        content = lambda name: (Part(text_of(_field(record, name, where, remedy), where, "content")),)
        messages = [("user", content("prompt")), ("assistant", content("response"))]
    else:
        messages = _messages(record, where)
    if recipe["loss_on"] != "all" and not any(role in ANSWERS for role, _ in messages):
        raise ConfigError(
            f"{where}: no message of role {ANSWERS[0]}, so nothing would be learned; leave it out or use --loss-on all"
        )
    if any(role in ANSWERS and not "".join(part.text for part in content).strip() for role, content in messages):
        return []
    return [span for span in _written(messages, where, recipe) if span.text]


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
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); a line must hold one whole object") from None


def _field(record: Any, name: str, where: str, remedy: str) -> Any:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: a value of type {type(record).__name__} instead of an object with fields; {remedy}")
    if name not in record:
        raise ConfigError(f"{where}: no field {name!r}, there are {', '.join(map(str, record)) or 'none'}; {remedy}")
    return record[name]


def _remedy(record: Any) -> str:
    """What to give for a record without the field of the text, by the names of those that it has."""
    names = set(record) if isinstance(record, Mapping) else set()
    asked, answered = (next((name for name in wanted if name in names), None) for wanted in (_ASKS, _ANSWERS))
    if asked is None or answered is None:
        return "name the text's with --text-field"
    templates = ("--prompt-template", rf"{{{asked}}}\n", "--response-template", f"{{{answered}}}")
    return f"to learn the answers: {shlex.join(['--format', 'fields', *templates])}; or name the text's with --text-field"


def _messages(record: Any, where: str) -> list[Message]:
    messages = _field(record, "messages", where, "chat data needs a list of messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list that is not empty")
    told = lambda message, name: text_of(_field(message, name, where, "a message has role and content"), where, name)
    return [(told(message, "role"), (Part(told(message, "content")),)) for message in messages]


def _written(messages: list[Message], where: str, recipe: Mapping[str, Any]) -> list[Span]:
    if recipe["template"] == TOKENIZER:
        return conversation(messages, where, recipe["chat_form"], recipe["loss_on"])
    before, _, after = recipe["template"].partition("{content}")
    spans: list[Span] = []
    for role, content in messages:
        spans.append(Span(_filled(before, role), recipe["loss_on"] == "all"))
        spans.append(Span((*content, *_filled(after, role)), recipe["loss_on"] == "all" or role in ANSWERS))
    return spans


def _filled(template: str, role: str) -> tuple[Part, ...]:
    """What the template says, with the role, which is the record's own word, in its places."""
    first, *rest = [Part(text, is_template=True) for text in template.split("{role}")]
    return (first, *(part for text in rest for part in (Part(role), text)))
