"""A folder as Hugging Face's libraries write it: config.json, safetensors in one file or several, tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError
from nash_mhc.hub.config_json import DEFAULTS, Imported, read_config
from nash_mhc.hub.tensors import Reader, shapes
from nash_mhc.storage.errors import reason

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What belongs to a model beside its weights, and goes with it wherever it goes.
_BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "*.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
TENSOR_DTYPES = "tensor_dtypes.json"  # in a folder of ours, beside these: the dtype that each tensor came in
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
}  # fmt: skip
_FILE = re.compile(r"[\w .+-]{1,240}\.safetensors", re.ASCII)  # a plain name, as long as file systems take
_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")  # in files of years ago: computed, not learned
_CHUNK = 1 << 24  # bytes of two tensors that are compared at a time


def is_hub_folder(path: str | Path) -> bool:
    """Of Hugging Face's kind, and no run of ours."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "run.json").exists()


def files_beside(folder: Path) -> list[str]:
    """The files that belong to a model, weights excepted: their names in its folder."""
    found = {path for pattern in _BESIDE for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """The dtype that each tensor of a model came in, by name: from the weights' headers, or as was noted beside a copy
    without weights. Empty: nobody knows. ConfigError."""
    if (folder / INDEX).is_file() or (folder / WEIGHTS).is_file():
        return {name: entry.dtype for name, entry in HubFolder(folder).entries().items()}
    return _json(folder / TENSOR_DTYPES) if (folder / TENSOR_DTYPES).is_file() else {}


class Entry(NamedTuple):
    """Of a tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def reader(self) -> Reader:
        """Reads parts of the tensor, straight from the file: not even a copy of a part comes into memory by this."""
        mapped = np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)
        return lambda part: mapped[part]


class HubFolder:
    """Opened, its configuration is understood; `check` compares what is in its files with that. ConfigError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.values = _json(self.path / CONFIG)
        self.imported: Imported = read_config(self.values, str(self.path / CONFIG))

    def stops(self) -> list[int]:
        """Tokens that end a text, where the model names any."""
        own = _json(self.path / "generation_config.json") if self._has("generation_config.json") else {}
        said = DEFAULTS[self.imported.family] | self.values | own
        found = said.get("eos_token_id")
        ends = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(end) is int for end in ends):
            raise ConfigError(f"{self.path}: eos_token_id {_short(json.dumps(found))} is no token id and no list of them")
        return ends

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def entries(self) -> dict[str, Entry]:
        """Every tensor by name, from the files' headers alone."""
        if self._has(INDEX):
            found: dict[str, Entry] = {}
            for file in self._indexed():
                header = _header(file)
                if twice := header.keys() & found.keys():
                    name = min(twice)
                    raise ConfigError(f"{file}: holds {_short(name)}, which {found[name].file.name} holds too; save it again")
                found |= header
            return found
        if not self._has(WEIGHTS):
            raise ConfigError(f"{self.path}: has neither {WEIGHTS} nor {INDEX}; save the model with safe_serialization")
        return _header(self.path / WEIGHTS)

    def _indexed(self) -> list[Path]:
        """The files that the index names, all of them in this folder; ConfigError."""
        where, index = self.path / INDEX, _json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ConfigError(f"{where}: weight_map must map tensors to files; copy the index again")
        files: dict[str, Path] = {}
        for tensor, name in index.items():
            # A path would lead anywhere. Links are followed: the cache of Hugging Face's libraries consists of them.
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise ConfigError(
                    f"{where}: {_short(tensor)} is in {_short(str(name))}, which is not the name of a .safetensors file here"
                )
            if name not in files and not (self.path / name).is_file():
                raise ConfigError(f"{where}: {name} is not there, which holds {_short(tensor)}; copy it as well")
            files[name] = self.path / name
        return [files[name] for name in sorted(files)]

    def check(self) -> dict[str, Entry]:
        """The entries, which are those that the configuration asks for; ConfigError names the first that is not."""
        found, cfg = self.entries(), self.imported.model
        if cfg.layers > len(found):  # asked first: a number without bounds would be a list without bounds
            raise ConfigError(f"{self.path}: {CONFIG} asks for {cfg.layers} layers, and its files hold {len(found)} tensors")
        wanted = shapes(cfg)
        for name, shape in wanted.items():
            if name not in found:
                hint = did_you_mean(name, [_short(other) for other in found if other not in wanted])
                raise ConfigError(f"{self.path}: the tensor {name} is missing{hint}")
            if found[name].shape != shape:
                raise ConfigError(
                    f"{found[name].file}: {name} is {_short(str(list(found[name].shape)))}, and {CONFIG} asks for {list(shape)}"
                )
            if found[name].dtype not in DTYPES:
                raise ConfigError(
                    f"{found[name].file}: {name} is {found[name].dtype}; what can be read are {', '.join(DTYPES)}"
                )
        extra = [name for name in found if name not in wanted and not _BUFFER.fullmatch(name)]
        if extra == ["lm_head.weight"] and self.imported.model.tied_embeddings:
            self._check_tied(found)
        elif extra:
            raise ConfigError(f"{found[extra[0]].file}: holds {_short(extra[0])}, for which {CONFIG} has no place")
        return found

    def _check_tied(self, found: Mapping[str, Entry]) -> None:
        """Some write the table twice. As long as both are the same, that is no harm."""
        one, other = "model.embed_tokens.weight", "lm_head.weight"
        rows = max(1, _CHUNK // (2 * found[one].shape[1]))
        for at in range(0, found[one].shape[0], rows):
            part = (slice(at, at + rows), slice(None))
            if found[one].shape != found[other].shape or not np.array_equal(
                found[one].reader()(part), found[other].reader()(part)
            ):
                raise ConfigError(f"{found[other].file}: holds {other} beside {one}, and {CONFIG} says that they are one")


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply for JSON of a model; copy it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no settings")
    return values


def _short(text: str) -> str:
    """For one line: names in files may be of any length and hold any character."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 120 else f"{shown[:100]}... ({len(text):,} characters)"


def _header(file: Path) -> dict[str, Entry]:
    """The tensors of a file. Whether it is one, and whole, the library decides; ConfigError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({reason(error)})") from None
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file}: is damaged, or no safetensors file; copy it again ({_short(str(error))})") from None
    return {
        name: Entry(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
