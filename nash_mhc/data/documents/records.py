"""Turn one record into spans of text that are in the loss or not.

Plain text is one span. Prompts and chats are messages, each written by a template; named fields are written by a prompt
template and a response template. With `--loss-on response`, only assistant messages and the template text after them
are in the loss.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import TEMPLATE, ConfigError
from nash_mhc.config.sections import TOKENIZER
from nash_mhc.storage.errors import first_line
from nash_mhc.storage.files import parse_json

# Common field names for prompts and responses, for suggestions in errors.
_PROMPT_NAMES = ("question", "instruction", "prompt", "query", "input", "problem")
_RESPONSE_NAMES = ("answer", "response", "output", "completion", "solution", "target")


class Raw(NamedTuple):
    """A document, or a block of a long text file, as it was read."""

    file: int  # number of the file in the corpus
    line: int  # first line or row, from 1
    content: Any  # bytes of a text block or a JSON line; the text or the record of a table row
    size: int  # bytes
    kind: str  # text, jsonl or table
    opens: bool = True  # is this the beginning of the document?
    closes: bool = True  # is this its end?
    key: int | None = None  # key of the whole document, if this is a block of it

    @staticmethod
    def of_table(file: int, row: int, content: Any) -> Raw:
        return Raw(file, row, content, len(content) if isinstance(content, str) else len(str(content)), "table")


class Part(NamedTuple):
    text: str
    is_template: bool = False  # special tokens are recognized in template text only, never in a record's text


class Span(NamedTuple):
    parts: tuple[Part, ...]
    scored: bool  # in the loss?

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def text_of(value: Any, where: str, name: str) -> str:
    """Return the text of a field, "" for null; raise ConfigError if it is not text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is of type {type(value).__name__}, not text; choose another field or convert it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: {name} has a lone surrogate (half a character); repair or remove the record") from None
    return value


_OPTIONAL = re.compile(r"\\.|\[((?:\\.|[^\[\]\\])*)\]", re.DOTALL)  # an escape, or a section in [ ]
_PART = re.compile(r"\{([^{}\[\]\\\n]+)\}|((?:\\.|[^\[\]{}\\]|\\$)+)|.", re.DOTALL)  # a field, text, or a stray bracket
_ESCAPE = re.compile(r"\\([nt\\\[\]{}])")
_ESCAPED = {"n": "\n", "t": "\t"}


class _Section(NamedTuple):
    """Literal text, and names of fields (`not is_template`); an optional section is dropped as a whole."""

    parts: tuple[Part, ...]
    is_optional: bool

    @property
    def fields(self) -> list[str]:
        return [part.text for part in self.parts if not part.is_template]


class FieldTemplate(NamedTuple):
    """The parsed value of --prompt-template or --response-template. str.format and Jinja have no optional sections that
    follow from their fields."""

    flag: str
    sections: tuple[_Section, ...]

    @property
    def needed(self) -> list[str]:
        return [name for section in self.sections if not section.is_optional for name in section.fields]

    @property
    def optional(self) -> list[str]:
        return [name for section in self.sections if section.is_optional for name in section.fields]

    def fill(self, record: Any, where: str) -> tuple[Part, ...]:
        """Return the text of a record; raise ConfigError if a required field is missing or empty."""
        if not isinstance(record, Mapping):
            raise ConfigError(f"{where}: not a JSON object, but a value of type {type(record).__name__}")
        parts: list[Part] = []
        for section in self.sections:
            values = {name: _value(record.get(name), where, name) for name in section.fields}
            empty = next((name for name, value in values.items() if not value.strip()), None)
            if empty is not None and section.is_optional:
                continue
            if empty is not None:
                if empty not in record and (hint := did_you_mean(empty, [str(name) for name in record])):
                    raise ConfigError(f"{where}: no field {empty!r}, which {self.flag} names{hint}")
                present = ", ".join(map(str, record)) or "none"
                problem = f"field {empty!r} is empty" if empty in record else f"no field {empty!r} (fields: {present})"
                raise ConfigError(f"{where}: {problem}; fix or remove the record, or put the field in [ ] in {self.flag}")
            parts += [part if part.is_template else Part(values[part.text]) for part in section.parts]
        return tuple(parts)


def _value(value: Any, where: str, name: str) -> str:
    """Return a field's text; numbers as written, and "" for NaN, which tables use for missing numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "" if isinstance(value, float) and math.isnan(value) else str(value)
    return text_of(value, where, name)


def parse_both(prompt: str | None, response: str | None) -> tuple[FieldTemplate, FieldTemplate]:
    """Parse --prompt-template and --response-template."""
    return _parse_template("--prompt-template", prompt or ""), _parse_template("--response-template", response or "")


@functools.lru_cache(maxsize=16)
def _parse_template(flag: str, template: str) -> FieldTemplate:
    def error(problem: str) -> ConfigError:
        return ConfigError(f"{flag} {template!r}: {problem}")

    def parts(start: int, stop: int) -> Iterator[Part]:
        for match in _PART.finditer(template, start, stop):
            name, text = match.groups()
            if name is None and text is None:
                what = f"the {match[0]} at character {match.start() + 1} has no partner or encloses no field name"
                raise error(f"{what}; write a field such as {{question}}, or \\{match[0]} for a literal {match[0]}")
            yield Part(name) if name else Part(_ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), text), is_template=True)

    sections: list[_Section] = []
    end = 0
    for match in _OPTIONAL.finditer(template):
        if match[1] is None:  # an escape
            continue
        sections.append(_Section(tuple(parts(end, match.start())), False))
        sections.append(_Section(tuple(parts(*match.span(1))), True))
        end = match.end()
        if not sections[-1].fields:
            raise error(f"the [ ] at character {match.start() + 1} contains no field; write \\[ and \\] for literal brackets")
    sections.append(_Section(tuple(parts(end, len(template))), False))
    if not any(section.fields for section in sections):
        raise error("contains no field; write a field such as {question} where its text goes")
    return FieldTemplate(flag, tuple(sections))


ANSWERS = ("assistant", "model", "gpt")  # roles whose messages are learned
_TODAY = datetime.datetime(2024, 7, 26)  # for templates that ask for the date: the same data on any day
_UNUSED = range(0xFDD0, 0xFDF0)  # code points that are not characters

Message = tuple[str, tuple[Part, ...]]  # role, content


def conversation(messages: Sequence[Message], where: str, form: Mapping[str, Any], loss_on: str) -> list[Span]:
    """Render messages with a tokenizer's chat template (`Tokenizer.chat_form`).

    Raise ConfigError if it rejects them.
    """
    is_answer = [role in ANSWERS for role, _ in messages]
    texts = [part.text for role, content in messages for part in (Part(role), *content)]
    mark = next(chr(code) for code in _UNUSED if not any(chr(code) in text for text in texts))
    # A mark inside the special tokens of a record distinguishes them from those of the template.
    special = _any_of(tuple(form["special"]))
    as_text = lambda text: special.sub(lambda match: f"{match[0][0]}{mark}{match[0][1:]}", text) if special else text
    plain = [
        {
            "role": ANSWERS[0] if answers else as_text(role),
            "content": "".join(part.text if part.is_template else as_text(part.text) for part in content),
        }
        for answers, (role, content) in zip(is_answer, messages, strict=True)
    ]
    borders, rendered = [0], ""
    for number in (number for number, answers in enumerate(is_answer) if answers):
        for count, prompts_answer in ((number, True), (number + 1, False)):
            longer = _render(form, plain[:count], prompts_answer, where)
            if not longer.startswith(rendered):
                problem = f"with message {number + 1}, the tokenizer's chat template changes the text of the messages before it"
                raise ConfigError(f"{where}: {problem}; use one answer per record, or give a --template")
            rendered = longer
            borders.append(len(rendered))
    whole = _render(form, plain, False, where) if not is_answer[-1] else rendered
    if not whole.startswith(rendered):
        problem = "the tokenizer's chat template rewrites the last answer when messages follow"
        raise ConfigError(f"{where}: {problem}; remove those messages, or give a --template")
    # The begin and end tokens are added to every document anyway.
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


def _render(form: Mapping[str, Any], messages: list[dict[str, str]], prompts_answer: bool, where: str) -> str:
    try:
        template = _compile(form["template"])
        return str(template.render(messages=messages, add_generation_prompt=prompts_answer, **form["tokens"]))
    except Exception as error:  # a template is a program and may raise anything
        problem = f"the tokenizer's chat template rejects these messages ({first_line(error)})"
        raise ConfigError(f"{where}: {problem}; change them, or give a --template") from error


@functools.lru_cache(maxsize=4)
def _compile(template: str) -> Any:
    """Compile a chat template as transformers does (its import is too slow for worker processes), with a fixed date."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Some templates mark the model's text with this tag; here it is plain text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _TODAY.strftime}
    return environment.from_string(template)


def check_template(template: str) -> str:
    """Return the value of --template with escapes (\\n, \\t) resolved.

    Raise ConfigError unless it has one {content}.
    """
    text = template.replace("\\n", "\n").replace("\\t", "\t")
    names = re.findall(r"\{(\w*)\}", text)
    if names.count("content") != 1 or set(names) - {"role", "content"}:
        remedy = f"write for example {TEMPLATE!r}, or {TOKENIZER}"
        raise ConfigError(f"--template {template!r}: must contain {{content}} once and may contain {{role}}; {remedy}")
    return text


def spans_of(raw: Raw, file: str, recipe: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a document; ConfigError, with file and line, for invalid text or JSON or a missing field.

    A record with an empty answer has no spans: only the template would be learned from it.
    """
    where = f"{file}:{raw.line}"
    form, score_all = recipe["format"], recipe["loss_on"] == "all"
    if raw.kind == "text":
        if form == "fields":
            raise ConfigError(f"{file}: --format fields needs records, but this is text; exclude it with --extensions .jsonl")
        return [Span((Part(_decode(raw, file)),), True)]
    record = _parse_json(_decode(raw, file), where) if raw.kind == "jsonl" else raw.content
    if form == "text":
        if raw.kind == "jsonl":
            record = _field(record, recipe["text_field"], where, _suggest_template(record))
        return [Span((Part(text_of(record, where, recipe["text_field"])),), True)]
    if form == "fields":
        templates = parse_both(recipe["prompt_template"], recipe["response_template"])
        prompt, response = (template.fill(record, where) for template in templates)
        if not any(part.text for part in response):
            raise ConfigError(f"{where}: --response-template produces no text; fill one of its fields or remove the record")
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
            f"{where}: no message of role {ANSWERS[0]}, so nothing to train on; remove the record or use --loss-on all"
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
        remedy = "convert the file, for example with iconv"
        raise ConfigError(f"{file}:{line}: not UTF-8 at byte {byte} of the line; {remedy}") from None


def _parse_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); a line must hold one complete object") from None


def _field(record: Any, name: str, where: str, remedy: str) -> Any:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: not a JSON object, but a value of type {type(record).__name__}; {remedy}")
    if name not in record:
        raise ConfigError(f"{where}: no field {name!r} (fields: {', '.join(map(str, record)) or 'none'}); {remedy}")
    return record[name]


def _suggest_template(record: Any) -> str:
    """Return the remedy for a record without the text field; it depends on the names of the fields."""
    by_flag = "name the text field with --text-field"
    names = set(record) if isinstance(record, Mapping) else set()
    prompt = next((name for name in _PROMPT_NAMES if name in names), None)
    response = next((name for name in _RESPONSE_NAMES if name in names), None)
    if prompt is None or response is None:
        return by_flag
    templates = ("--prompt-template", rf"{{{prompt}}}\n", "--response-template", f"{{{response}}}")
    return f"to train on the answers, use {shlex.join(['--format', 'fields', *templates])}; or {by_flag}"


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
