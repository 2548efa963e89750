"""Text <-> token ids."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.folders import download_command, model_name
from nash_mhc.storage.json_files import read_json

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers put where bytes do not (yet) make a character

# What a folder has at least one of that holds a tokenizer. Without, transformers makes one that knows no word.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
# Names of the token that ends a document, where a tokenizer.json comes without a tokenizer_config.json that says so.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<s>", "<bos>")
# Of kits: each returns the tokenizer of a name, or None for names that are not its own.
TOKENIZERS: Registry[Callable[[str], Tokenizer | None]] = Registry("tokenizers", {})


@runtime_checkable
class Tokenizer(Protocol):
    vocab_size: int
    begin: int | None  # stands before the first token of a document; None: documents begin with their first token
    end: int  # stands after the last
    adds_begin: bool  # whether the tokenizer.json of it puts `begin` before every text by itself
    bos: int | None  # the token of that name, where it has one
    fingerprint: str  # equal for tokenizers that give equal tokens

    @property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text of each token id, for bits per byte."""

    def encode(self, text: str) -> np.ndarray:
        """Text that spells a special token is text: no document can end itself, or begin another."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode(self, tokens: np.ndarray) -> str: ...

    def split_special(self, template: str) -> list[str | int]:
        """What a template spells: text, and the ids of special tokens between it."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation (role and content each) in the form that the model was taught,
        up to where its answer begins. ConfigError where the tokenizer knows none."""

    def chat_form(self) -> dict[str, Any]:
        """All that conversations are written from, as plain values: its chat template and what that may name,
        the spellings of special tokens, of the begin and of the end token. ConfigError where there is no template."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and one end-of-document token."""

    vocab_size = 257
    begin: int | None = 256
    end = 256
    adds_begin = False
    bos: int | None = None
    fingerprint = "bytes"

    def __init__(self) -> None:
        self.byte_lengths = np.append(np.ones(256, np.int32), 0)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(int(t) for t in np.asarray(tokens).ravel() if t < 256).decode("utf-8", errors="replace")

    def split_special(self, template: str) -> list[str | int]:
        return [template]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        raise ConfigError("the tokenizer of bytes has no chat template; write the prompt as the model was taught it")

    def chat_form(self) -> dict[str, Any]:
        raise ConfigError("--template tokenizer: the tokenizer of bytes has no chat template; write one with --template")


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library. Copies in other processes can only encode, and need no transformers."""

    def __init__(self, inner: Any, name: str, *, begin_with_end: bool = True) -> None:
        self._inner, self._name = inner, name
        self._backend: Any = getattr(inner, "backend_tokenizer", None)
        if self._backend is None:
            raise ConfigError(f"--tokenizer {name}: has no tokenizer.json; save it as a fast tokenizer first")
        self._backend.no_truncation()
        self._backend.no_padding()
        self._take_special_tokens_as_text()
        self.vocab_size = 1 + max(self._backend.get_vocab().values())  # their number is less where some ids are left out
        end = inner.eos_token_id if inner.eos_token_id is not None else inner.bos_token_id
        if end is None:
            raise ConfigError(f"--tokenizer {name}: it has neither an eos nor a bos token to stand between documents; add one")
        self.end: int = end
        # What it puts in front of a text by itself: Llama's models were trained with that, Qwen's with nothing.
        added = self._backend.encode("", add_special_tokens=True).ids
        self.begin: int | None = next(iter(added), end if begin_with_end else None)
        self.adds_begin: bool = len(added) > 0
        self.bos: int | None = inner.bos_token_id
        self.fingerprint = hashlib.sha256(f"{end} {self._backend.to_str()}".encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_inner", "byte_lengths", "_special")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_special_tokens_as_text()  # which a copy of the backend forgets

    def _take_special_tokens_as_text(self) -> None:
        self._backend.encode_special_tokens = True

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def split_special(self, template: str) -> list[str | int]:
        names = sorted(self._special, key=len, reverse=True)  # the longest of those that begin alike
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", template) if names else [template]
        return [self._special.get(piece, piece) for piece in pieces if piece]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._inner.chat_template:
            raise ConfigError(f"{self._name}: its tokenizer has no chat template; write the prompt as the model was taught it")
        try:
            return str(self._inner.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever the template, which is a program, does not like
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{self._name}: its chat template does not take these messages ({reason})") from error

    def chat_form(self) -> dict[str, Any]:
        if not self._inner.chat_template:
            raise ConfigError(f"--template tokenizer: {self._name} has no chat template; write one with --template")
        spelled = self._backend.id_to_token
        return {
            "template": self._inner.get_chat_template(),
            "tokens": {name: text for name, text in self._inner.special_tokens_map.items() if isinstance(text, str)},
            "special": sorted(self._special),
            "begin": None if self.begin is None else spelled(self.begin),
            "end": spelled(self.end),
        }

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        special = {*self._inner.all_special_ids, self.end}
        pieces = self._inner.convert_ids_to_tokens(list(range(self.vocab_size)))
        lengths = [
            0 if i in special or p is None else _byte_length(str(p), str(self._inner.decode([i]))) for i, p in enumerate(pieces)
        ]
        return np.array(lengths, np.int32)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Without the offsets of each token in the text, which nothing here reads.
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._inner.decode(np.asarray(tokens).ravel().tolist(), skip_special_tokens=True))

    def save(self, folder: Path, *, begins: bool = False) -> None:
        """Leaves what `load_tokenizer(folder)` reads back to the same tokens.

        `begins`: and what puts the begin token in front of a text for everyone who does not know that it belongs there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        end = self._backend.id_to_token(self.end)
        self.save_backend(folder, begins=begins)
        chat = {"bos_token": self._inner.bos_token, "chat_template": self._inner.chat_template}  # which may name that token
        write_tokenizer_config(folder, end, **{k: v for k, v in chat.items() if v and self._inner.chat_template})

    def save_backend(self, folder: Path, *, begins: bool) -> None:
        """tokenizer.json alone."""
        values = json.loads(self._backend.to_str())
        if begins and not self.adds_begin:
            values["post_processor"] = in_front(self._backend.id_to_token(self.end), self.end)
        (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")


def in_front(token: str, number: int) -> dict[str, Any]:
    """The part of a tokenizer.json that puts this token in front of every text."""
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, lambda which: {"Sequence": {"id": which, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text("A")],
        "pair": [special, text("A"), text("B")],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def write_tokenizer_config(folder: Path, end: str, **more: Any) -> None:
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": end, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")


def _byte_length(piece: str, text: str) -> int:
    """Bytes of text of one token, from its name in the vocabulary and what it decodes to on its own."""
    if "\ufffd" in text and "\ufffd" not in piece:
        # Part of a character: a byte by its number, or byte-level pieces, whose names have one letter a byte.
        return 1 if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) else len(piece)
    # Decoding a piece alone drops the space that it begins with.
    return len(text.encode("utf-8")) + (piece.startswith("\u2581") and not text.startswith(" "))


def load_tokenizer(name: str, *, begin_with_end: bool = True) -> Tokenizer:
    """By name, folder or file, read once in a process. `begin_with_end` is that of DataConfig."""
    if name == "bytes":
        return ByteTokenizer()
    for of_kit in TOKENIZERS.values():
        if (found := of_kit(name)) is not None:
            return found
    from_hub = None if Path(name).exists() else model_name(name)
    if from_hub is None and not Path(name).exists():
        raise ConfigError(
            f"--tokenizer {name}: neither 'bytes' nor a tokenizer.json or a folder with one; one of Hugging Face is hf:{name}, "
            f"or a folder ({download_command(name)})"
        )
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in FILES):
        raise ConfigError(f"--tokenizer {name}: no tokenizer is in that folder (such as tokenizer.json); name one that has it")
    files = [] if from_hub is not None else [Path(name)] if Path(name).is_file() else sorted(Path(name).iterdir())
    return _loaded(name, from_hub, begin_with_end, tuple((str(file), file.stat().st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=4)
def _loaded(name: str, from_hub: str | None, begin_with_end: bool, _: tuple[tuple[str, int], ...]) -> HuggingFaceTokenizer:
    """The last argument changes when a file does."""
    return HuggingFaceTokenizer(_load_inner(Path(name), from_hub, name), name, begin_with_end=begin_with_end)


def _load_inner(path: Path, from_hub: str | None, name: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # that there is no PyTorch is no news here
    from transformers import PreTrainedTokenizerFast  # slow to import; only those who ask for it wait

    folder = path if path.is_dir() else path.parent
    if from_hub is None and "auto_map" in _values(folder / "tokenizer_config.json"):
        raise ConfigError(
            f"--tokenizer {name}: its tokenizer_config.json names code of its own (auto_map), which is never run; if its "
            "tokenizer.json is complete without it, take auto_map out of the file"
        )
    try:
        if from_hub is not None:
            return _auto_tokenizer().from_pretrained(from_hub, trust_remote_code=False)
        if path.is_file() and not (path.parent / "tokenizer_config.json").exists():
            bare = PreTrainedTokenizerFast(tokenizer_file=str(path))
            return PreTrainedTokenizerFast(
                tokenizer_file=str(path), eos_token=next((end for end in _ENDS if end in bare.get_vocab()), None)
            )
        # Where the model is code of its own, AutoTokenizer would ask on the terminal whether to run that.
        kind = PreTrainedTokenizerFast if _brings_code(folder) or _is_plain(folder) else _auto_tokenizer()
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers raise, bare Exception included
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if from_hub is None:
            raise ConfigError(f"--tokenizer {name}: not a tokenizer that transformers can read ({reason})") from error
        raise ConfigError(
            f"--tokenizer {name}: Hugging Face does not give it ({reason}); "
            f"without a network, AutoTokenizer.from_pretrained('{from_hub}').save_pretrained(FOLDER) where there is one, "
            "and --tokenizer FOLDER here"
        ) from error


def _auto_tokenizer() -> Any:
    from transformers import AutoTokenizer  # imports torch where it is installed: several seconds more

    return AutoTokenizer


def _values(file: Path) -> dict[str, Any]:
    """What such a file of the transformers library says; nothing, where it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_json(file)
    return {}


def _brings_code(folder: Path) -> bool:
    return "auto_map" in _values(folder / "config.json")


def _is_plain(folder: Path) -> bool:
    """A folder that names the class that AutoTokenizer would choose, such as those that we write;
    beside a model's config.json it may choose another one."""
    values = _values(folder / "tokenizer_config.json")
    named = values.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    files = (folder / "tokenizer.json").is_file() and not (folder / "config.json").exists()
    return named and files and "auto_map" not in values


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Text as soon as it is certain: the pieces join to decode(all tokens), and none ends within a character."""
    seen: list[int] = []
    text, shown = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(np.array(seen, np.int32))
        # A character is at most four bytes: up to three marks at the end may still turn into one.
        marks = len(text) - len(text.rstrip(_UNREADABLE))
        ready = len(text) - min(marks, 3)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]
