"""Prompts: a text, a conversation, or a file of many. And stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.documents.records import text_of
from nash_mhc.data.tokenizer import Tokenizer, with_begin
from nash_mhc.storage.files import parse_json


class Prompt(NamedTuple):
    text: str
    messages: tuple[Mapping[str, str], ...] = ()  # a conversation, of which `text` is the last message

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Encode with the begin token of training documents."""
        text = tokenizer.render_chat(self.messages) if self.messages else self.text
        tokens: list[int] = []
        for unit in tokenizer.split_special(text):  # chat templates contain special tokens as text
            tokens += [unit] if isinstance(unit, int) else tokenizer.encode(unit).tolist()
        # A chat template may include the begin token.
        return tokens if self.messages and tokens[:1] == [tokenizer.begin] else with_begin(tokenizer, tokens)


def chat_prompt(text: str, system: str | None) -> Prompt:
    """Return a conversation that begins with this user message."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return Prompt(text, (*first, {"role": "user", "content": text}))


def read_prompts(path: Path, *, chat: bool, system: str | None) -> list[Prompt]:
    """Read one prompt per line, or the `prompt` or `messages` of JSON lines (.jsonl)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as text ({error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            found.append(chat_prompt(line, system) if chat else Prompt(line))
            continue
        record = _record(line, f"--prompts {path}:{number}")
        if record.get("messages"):
            messages = tuple(record["messages"])
            found.append(Prompt(str(messages[-1].get("content", "")), messages))
        else:
            found.append(chat_prompt(record["prompt"], system) if chat else Prompt(record["prompt"]))
    if not found:
        raise ConfigError(f"--prompts {path}: contains no prompt; write one per line")
    return found


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    is_text = isinstance(record, dict) and isinstance(record.get("prompt"), str)
    messages = record.get("messages") if isinstance(record, dict) else None
    is_chat = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not (is_chat or (is_text and messages is None)):
        raise ConfigError(f"{where}: has neither a prompt (text) nor messages (a list with role and content)")
    for part in messages if isinstance(messages, list) else [record]:
        for name in ("prompt", "role", "content"):
            if isinstance(part.get(name), str):
                text_of(part[name], where, name)  # refuses half a surrogate pair, which no tokenizer accepts
    return dict(record)


def before_stop(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the text before the first of `stops`, holding back what may be the beginning of one."""
    pending = ""
    for piece in pieces:
        pending += piece
        if positions := [pending.index(stop) for stop in stops if stop in pending]:
            yield pending[: min(positions)]
            return
        partial = max((n for stop in stops for n in range(1, len(stop)) if pending.endswith(stop[:n])), default=0)
        ready, pending = pending[: len(pending) - partial], pending[len(pending) - partial :]
        if ready:
            yield ready
    if pending:
        yield pending
