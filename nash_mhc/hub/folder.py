"""A folder as Hugging Face's libraries write it: config.json, safetensors in one file or several, tokenizer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError
from nash_mhc.hub.config_json import Imported, read_config
from nash_mhc.hub.tensors import Reader, shapes
from nash_mhc.storage.errors import reason

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What belongs to a model beside its weights, and goes with it wherever it goes.
BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
}  # fmt: skip
_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")  # in files of years ago: computed, not learned
_CHUNK = 1 << 24  # bytes of two tensors that are compared at a time


def is_hub_folder(path: str | Path) -> bool:
    """Of Hugging Face's kind, and no run of ours."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "run.json").exists()


class Entry(NamedTuple):
    """Of a tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def reader(self) -> Reader:
        """Reads parts of the tensor, straight from the file: not even a copy of a part comes into memory by this."""
        mapped = np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)
        return lambda part: mapped[part]


class HubFolder:
    """Opened, its configuration is understood; `check` compares what is in its files with that. ConfigError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.values = _json(self.path / CONFIG)
        self.imported: Imported = read_config(self.values, str(self.path / CONFIG))

    def stops(self) -> list[int]:
        """Tokens that end a text, where the model names any."""
        said = self.values | (_json(self.path / "generation_config.json") if self._has("generation_config.json") else {})
        found = said.get("eos_token_id")
        return [] if found is None else [int(x) for x in (found if isinstance(found, list) else [found])]

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def entries(self) -> dict[str, Entry]:
        """Every tensor by name, from the files' headers alone."""
        if self._has(INDEX):
            index = _json(self.path / INDEX).get("weight_map", {})
            found: dict[str, Entry] = {}
            for file in sorted({self.path / str(name) for name in index.values()}):
                if not file.is_file():
                    lost = next(name for name, held in index.items() if self.path / str(held) == file)
                    raise ConfigError(f"{self.path / INDEX}: {file.name} is not there, which holds {lost}")
                found |= _header(file)
            return found
        if not self._has(WEIGHTS):
            raise ConfigError(f"{self.path}: has neither {WEIGHTS} nor {INDEX}; save the model with safe_serialization")
        return _header(self.path / WEIGHTS)

    def check(self) -> dict[str, Entry]:
        """The entries, which are those that the configuration asks for; ConfigError names the first that is not."""
        found, wanted = self.entries(), shapes(self.imported.model)
        for name, shape in wanted.items():
            if name not in found:
                hint = did_you_mean(name, [other for other in found if other not in wanted])
                raise ConfigError(f"{self.path}: the tensor {name} is missing{hint}")
            if found[name].shape != shape:
                raise ConfigError(
                    f"{found[name].file}: {name} is {list(found[name].shape)}, and {CONFIG} asks for {list(shape)}"
                )
            if found[name].dtype not in _DTYPES:
                raise ConfigError(
                    f"{found[name].file}: {name} is {found[name].dtype}; what can be read are {', '.join(_DTYPES)}"
                )
        extra = [name for name in found if name not in wanted and not _BUFFER.fullmatch(name)]
        if extra == ["lm_head.weight"] and self.imported.model.tied_embeddings:
            self._check_tied(found)
        elif extra:
            raise ConfigError(f"{found[extra[0]].file}: holds {extra[0]}, for which {CONFIG} has no place")
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
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no settings")
    return values


def _header(file: Path) -> dict[str, Entry]:
    """What a file says that it holds; ConfigError names a tensor of which a part is missing."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                raise ConfigError(f"{file}: is cut within its header; copy it again")
            header = json.loads(opened.read(length))
        entries, header = {}, {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][1]):
            shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
            if 8 + length + stop > size:
                raise ConfigError(f"{file}: is cut: the end of {name} is missing; copy it again")
            if entry["dtype"] in _DTYPES and stop - start != math.prod(shape) * _DTYPES[entry["dtype"]].itemsize:
                raise ConfigError(f"{file}: {name} has {stop - start} bytes, which is not {entry['dtype']} of {list(shape)}")
            entries[name] = Entry(file, entry["dtype"], shape, 8 + length + start)
        return entries
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({reason(error)})") from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file}: is no safetensors file, or its header is damaged") from None
