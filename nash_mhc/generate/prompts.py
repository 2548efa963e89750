"""What text goes on from: a prompt, a conversation, or a file of many; and where it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.templates import text_of
from nash_mhc.data.tokenizer import Tokenizer, with_begin
from nash_mhc.storage.json_files import parse_json


class Prompt(NamedTuple):
    text: str
    messages: tuple[Mapping[str, str], ...] = ()  # of a conversation; then the text is its last message

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """What the model reads: as every document that it has read began."""
        spelled = tokenizer.render_chat(self.messages) if self.messages else self.text
        found: list[int] = []
        for unit in tokenizer.split_special(spelled):  # as in a template, which the prompt may have to repeat
            found += [unit] if isinstance(unit, int) else tokenizer.encode(unit).tolist()
        # A chat template may spell the begin token itself.
        return found if self.messages and found[:1] == [tokenizer.begin] else with_begin(tokenizer, found)


def asked(text: str, system: str | None) -> Prompt:
    """A conversation that begins with this."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return Prompt(text, (*first, {"role": "user", "content": text}))


def read_prompts(path: Path, *, chat: bool, system: str | None) -> list[Prompt]:
    """One a line; of .jsonl, the records' `prompt`, or `messages`. ConfigError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as text ({error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            found.append(asked(line, system) if chat else Prompt(line))
            continue
        record = _record(line, f"--prompts {path}:{number}")
        if record.get("messages"):
            messages = tuple(record["messages"])
            found.append(Prompt(str(messages[-1].get("content", "")), messages))
        else:
            found.append(asked(record["prompt"], system) if chat else Prompt(record["prompt"]))
    if not found:
        raise ConfigError(f"--prompts {path}: holds no prompt; write one a line")
    return found


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON ({error})") from None
    is_text = isinstance(record, dict) and isinstance(record.get("prompt"), str)
    messages = record.get("messages") if isinstance(record, dict) else None
    is_chat = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not (is_chat or (is_text and messages is None)):
        raise ConfigError(f"{where}: has neither a prompt (text) nor messages (a list with role and content)")
    for said in messages if isinstance(messages, list) else [record]:
        for name in ("prompt", "role", "content"):
            if isinstance(said.get(name), str):
                text_of(said[name], where, name)  # no half of a character, which no tokenizer takes
    return dict(record)


def up_to(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """The text before the first of `stops`, as soon as it is certain that none of them has begun."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [held.index(stop) for stop in stops if stop in held]:
            yield held[: min(found)]
            return
        begun = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        ready, held = held[: len(held) - begun], held[len(held) - begun :]
        if ready:
            yield ready
    if held:
        yield held
