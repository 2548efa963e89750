"""Tokenizers: text <-> token ids, loading, saving, and training a byte-level BPE."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import first_line
from nash_mhc.storage.files import read_json
from nash_mhc.storage.folders import check_is_new, download_command, model_name, new_folder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not (yet) a character

# A folder with a tokenizer has one of these. Without them, transformers builds a tokenizer with an empty vocabulary.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
# End tokens to look for in a tokenizer.json without a tokenizer_config.json.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<s>", "<bos>")
# Of kits: each returns the tokenizer for a name, or None if the name is not its own.
TOKENIZERS: Registry[Callable[[str], Tokenizer | None]] = Registry("tokenizers", {})


class Tokenizer:
    """Text <-> token ids; the defaults are those of a tokenizer without special tokens or a chat template."""

    name: str
    vocab_size: int
    begin: int | None  # token before every document; None: documents begin with their first token
    end: int  # token after every document
    adds_begin: bool = False  # does its tokenizer.json add `begin`?
    bos: int | None = None  # its bos token, if any
    fingerprint: str  # equal for tokenizers that give equal tokens

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text of each token id, for bits per byte."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        """Tokenize text. Special-token strings in the text are treated as ordinary text."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        raise NotImplementedError

    def split_special(self, template: str) -> list[str | int]:
        """Split template text into text and the ids of special tokens."""
        return [template]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render messages (role and content) as a prompt for the next answer.

        Raise ConfigError without a chat template.
        """
        raise ConfigError(f"{self.name} has no chat template; write the prompt in the model's own format, without --chat")

    def chat_form(self) -> dict[str, Any]:
        """Return what conversations are rendered from, as plain values: the chat template with its variables, and the
        spellings of the special tokens. Raise ConfigError without a chat template."""
        raise ConfigError(f"--template tokenizer: {self.name} has no chat template; give a --template")


def prefix_of(tokenizer: Tokenizer) -> int:
    """Return the token that an empty prompt starts with: the begin, bos or end token."""
    return next(token for token in (tokenizer.begin, tokenizer.bos, tokenizer.end) if token is not None)


def with_begin(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """Prepend the begin token, if documents have one. An empty text becomes the token of `prefix_of`."""
    return [*[prefix_of(tokenizer)] * (tokenizer.begin is not None or not tokens), *tokens]


def is_of_model(name: str) -> bool:
    """Return whether this is a Hugging Face model folder. Its tokenizer then decides how documents begin."""
    folder = Path(name)
    return (folder / "config.json").is_file() and not (folder / "run.json").exists()


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens 0..255, and an end token."""

    name, fingerprint = "the byte tokenizer", "bytes"
    vocab_size = 257
    begin = end = 256

    def __init__(self) -> None:
        self.byte_lengths = np.append(np.ones(256, np.int32), 0)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(int(t) for t in np.asarray(tokens).ravel() if t < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the transformers library. Pickled copies can only encode, and do not import transformers."""

    def __init__(self, inner: Any, name: str, *, begin_with_end: bool = True) -> None:
        self._inner, self.name = inner, name
        self._backend: Any = getattr(inner, "backend_tokenizer", None)
        if self._backend is None:
            raise ConfigError(f"--tokenizer {name}: has no tokenizer.json; save it as a fast tokenizer first")
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # as text
        self.vocab_size = 1 + max(self._backend.get_vocab().values())  # ids may have gaps
        end = inner.eos_token_id if inner.eos_token_id is not None else inner.bos_token_id
        if end is None:
            raise ConfigError(f"--tokenizer {name}: has neither an eos nor a bos token to separate documents; add one to it")
        self.end = end
        added = self._backend.encode("", add_special_tokens=True).ids  # Llama's tokenizers add a bos, Qwen's nothing
        self.begin = next(iter(added), end if begin_with_end else None)
        self.adds_begin = len(added) > 0
        self.bos = inner.bos_token_id
        self.fingerprint = hashlib.sha256(f"{end} {self._backend.to_str()}".encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_inner", "byte_lengths", "_special")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True  # pickling drops it

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def split_special(self, template: str) -> list[str | int]:
        names = sorted(self._special, key=len, reverse=True)  # longest match first
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", template) if names else [template]
        return [self._special.get(piece, piece) for piece in pieces if piece]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._inner.chat_template:
            return super().render_chat(messages)
        try:
            return str(self._inner.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program and may raise anything
            raise ConfigError(f"{self.name}: its chat template rejects these messages ({first_line(error)})") from error

    def chat_form(self) -> dict[str, Any]:
        if not self._inner.chat_template:
            return super().chat_form()
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
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)  # fast: without offsets
        return [np.array(e.ids, np.int32) for e in encoded]

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._inner.decode(np.asarray(tokens).ravel().tolist(), skip_special_tokens=True))

    def save(self, folder: Path, *, begins: bool = False) -> None:
        """Write a folder that `load_tokenizer` reads; with `begins`, its tokenizer.json adds the begin token itself."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_backend(folder, begins=begins)
        end = self._backend.id_to_token(self.end)
        chat = {"bos_token": self._inner.bos_token, "chat_template": self._inner.chat_template}  # which may name the bos token
        write_tokenizer_config(folder, end, **{k: v for k, v in chat.items() if v and self._inner.chat_template})

    def save_backend(self, folder: Path, *, begins: bool) -> None:
        """Write tokenizer.json alone."""
        values = json.loads(self._backend.to_str())
        if begins and not self.adds_begin:
            values["post_processor"] = prepending_processor(self._backend.id_to_token(self.end), self.end)
        (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")


def prepending_processor(token: str, number: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that prepends this token to every text."""
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
    """Return a token's bytes of text, given its name in the vocabulary and its text when decoded on its own."""
    if "\ufffd" in text and "\ufffd" not in piece:
        # Part of a character: a byte fallback token, or a byte-level piece, whose name has one letter per byte.
        return 1 if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) else len(piece)
    # Decoding a single piece drops its leading space.
    return len(text.encode("utf-8")) + (piece.startswith("\u2581") and not text.startswith(" "))


def load_tokenizer(name: str, *, begin_with_end: bool = True) -> Tokenizer:
    """Load a tokenizer by name, folder or file, once per process. `begin_with_end` is that of DataConfig."""
    if name == "bytes":
        return ByteTokenizer()
    for of_kit in TOKENIZERS.values():
        if (tokenizer := of_kit(name)) is not None:
            return tokenizer
    path = Path(name)
    hub_name = None if path.exists() else model_name(name)
    if hub_name is None and not path.exists():
        raise ConfigError(
            f"--tokenizer {name}: neither 'bytes' nor a tokenizer.json or a folder with one; use hf:{name} or download it: "
            f"{download_command(name)}"
        )
    if path.is_dir() and not any((path / file).is_file() for file in FILES):
        raise ConfigError(f"--tokenizer {name}: this folder has no tokenizer (such as tokenizer.json); name another folder")
    files = [] if hub_name is not None else [path] if path.is_file() else sorted(path.iterdir())
    return _load_cached(name, hub_name, begin_with_end, tuple((str(file), file.stat().st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=4)
def _load_cached(name: str, hub_name: str | None, begin_with_end: bool, _: tuple[tuple[str, int], ...]) -> HuggingFaceTokenizer:
    """Load a tokenizer; the last argument changes with the files, so that changed files are loaded again."""
    return HuggingFaceTokenizer(_load_inner(Path(name), hub_name, name), name, begin_with_end=begin_with_end)


def _load_inner(path: Path, hub_name: str | None, name: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns if PyTorch is missing
    from transformers import PreTrainedTokenizerFast  # slow to import

    folder = path if path.is_dir() else path.parent
    if hub_name is None and "auto_map" in _values(folder / "tokenizer_config.json"):
        raise ConfigError(f"--tokenizer {name}: custom code is never run; remove auto_map from tokenizer_config.json")
    try:
        if hub_name is not None:
            return _auto_tokenizer().from_pretrained(hub_name, trust_remote_code=False)
        if path.is_file() and not (path.parent / "tokenizer_config.json").exists():
            bare = PreTrainedTokenizerFast(tokenizer_file=str(path))
            return PreTrainedTokenizerFast(
                tokenizer_file=str(path), eos_token=next((end for end in _END_TOKENS if end in bare.get_vocab()), None)
            )
        # If the model has custom code, AutoTokenizer would ask on the terminal whether to run it.
        has_code = "auto_map" in _values(folder / "config.json")
        kind = PreTrainedTokenizerFast if has_code or _is_plain(folder) else _auto_tokenizer()
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each parser of the library raises its own
        if hub_name is None:
            raise ConfigError(f"--tokenizer {name}: transformers cannot read this tokenizer ({first_line(error)})") from error
        raise ConfigError(
            f"--tokenizer {name}: cannot be loaded from Hugging Face ({first_line(error)}); without network access, run "
            f"AutoTokenizer.from_pretrained('{hub_name}').save_pretrained(FOLDER) on another machine and use "
            "--tokenizer FOLDER here"
        ) from error


def _auto_tokenizer() -> Any:
    from transformers import AutoTokenizer  # imports torch where it is installed: several seconds more

    return AutoTokenizer


def _values(file: Path) -> dict[str, Any]:
    """Return the values of a JSON file; empty if it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_json(file)
    return {}


def _is_plain(folder: Path) -> bool:
    """Return whether AutoTokenizer would choose PreTrainedTokenizerFast, as for the folders that we write.

    Next to a model's config.json it may choose another class.
    """
    values = _values(folder / "tokenizer_config.json")
    named = values.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    files = (folder / "tokenizer.json").is_file() and not (folder / "config.json").exists()
    return named and files and "auto_map" not in values


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield text as soon as it is final: the pieces join to decode(all tokens), and none ends within a character.

    DecodeStream of the tokenizers library serves its own tokenizers only.
    """
    seen: list[int] = []
    text, shown = "", 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(np.array(seen, np.int32))
        # A character has at most four bytes: up to three replacement characters at the end may still become one.
        incomplete = len(text) - len(text.rstrip(_REPLACEMENT))
        ready = len(text) - min(incomplete, 3)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]


BPE_END = "<|endoftext|>"
_LEAST_BPE = 256 + 1  # every byte, and the end token


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path, *, show_progress: bool = False) -> int:
    """Train a byte-level BPE tokenizer into folder `out`; return its vocabulary size (smaller if the text is short)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _LEAST_BPE:
        raise ConfigError(f"--vocab-size must be at least {_LEAST_BPE} (every byte and the end token), not {vocab_size}")
    check_is_new(out)
    nonempty = filter(None, texts)
    if (first := next(nonempty, None)) is None:
        raise ConfigError("--dataset: has no document with text to train a tokenizer on")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BPE_END], initial_alphabet=alphabet, show_progress=show_progress
    )
    backend.train_from_iterator(itertools.chain([first], nonempty), trainer)
    with new_folder(out) as folder:
        backend.save(str(folder / "tokenizer.json"))
        write_tokenizer_config(folder, BPE_END)
    return int(backend.get_vocab_size())
