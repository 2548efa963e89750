"""Read a Hugging Face model folder: config.json, safetensors in one file or several, tokenizer."""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, DataConfig, ModelConfig, RunConfig
from nash_mhc.kits.hub.config_json import DEFAULTS, Imported, family_config, family_of, read_config, shown
from nash_mhc.kits.hub.tensors import DTYPES, EMBEDDING, OUTPUT, Reader, Tensor, shapes, tensors
from nash_mhc.loading.formats import HUB as CONFIG
from nash_mhc.loading.formats import ModelFormat
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.errors import reason
from nash_mhc.storage.files import digest_of, digests_of_files, read_json

log = logging.getLogger(__name__)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
# Small files that accompany the weights and are copied with the model.
_COMPANIONS = (
    CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "*.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_TENSOR_DTYPES = "tensor_dtypes.json"  # in a run's copy of these files: the dtype that each tensor was imported from
_FILE = re.compile(r"[\w .+-]{1,240}\.safetensors", re.ASCII)  # no path
_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")  # computed, but saved by old versions of transformers
_CHUNK = 1 << 24  # bytes of two tensors compared at a time
_REPORT_INTERVAL = 2.0  # seconds


def companions(folder: Path) -> list[str]:
    """Return the names of a model's files other than its weights."""
    found = {path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the companion files and the dtypes of the tensors: name -> content."""
    found = {name: (folder / name).read_bytes() for name in companions(folder)}
    if dtypes := tensor_dtypes(folder):
        found[_TENSOR_DTYPES] = (json.dumps(dtypes, indent=0) + "\n").encode()
    return found


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype each tensor was imported from, by name; empty if unknown."""
    if (folder / INDEX).is_file() or (folder / WEIGHTS).is_file():
        return {name: entry.dtype for name, entry in HubFolder(folder).entries().items()}
    return read_json(folder / _TENSOR_DTYPES) if (folder / _TENSOR_DTYPES).is_file() else {}


class Entry(NamedTuple):
    """Where a tensor is stored."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def reader(self) -> Reader:
        """Return a function that reads slices of the tensor from a memory map, without a copy."""
        mapped = np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)
        return lambda index: mapped[index]


class HubFolder:
    """A Hugging Face folder. The constructor parses config.json, `check` compares the weight files with it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.values = read_json(self.path / CONFIG)
        self.imported: Imported = read_config(self.values, str(self.path / CONFIG))

    def stop_tokens(self) -> list[int]:
        """Return the end-of-text tokens that the files name."""
        generation = read_json(self.path / GENERATION) if self._has(GENERATION) else {}
        ends = (DEFAULTS[self.imported.family] | self.values | generation).get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if not all(type(end) is int for end in ends):
            raise ConfigError(f"{self.path}: eos_token_id {shown(ends)} must be a token id or a list of token ids")
        return ends

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def entries(self) -> dict[str, Entry]:
        """Return every tensor by name, from the headers of the weight files."""
        if not self._has(INDEX):
            if not self._has(WEIGHTS):
                raise ConfigError(f"{self.path}: has neither {WEIGHTS} nor {INDEX}; save the model with safe_serialization")
            return _read_header(self.path / WEIGHTS)
        found: dict[str, Entry] = {}
        for file in self._indexed_files():
            header = _read_header(file)
            if duplicates := header.keys() & found.keys():
                name = min(duplicates)
                raise ConfigError(f"{file}: tensor {shown(name)} is also in {found[name].file.name}; save the model again")
            found |= header
        return found

    def _indexed_files(self) -> list[Path]:
        path = self.path / INDEX
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ConfigError(f"{path}: weight_map must map tensors to files; copy the index again")
        for tensor, name in index.items():
            # No paths: nothing outside the folder is read. Links are followed, since Hugging Face's cache uses them.
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise ConfigError(
                    f"{path}: {shown(tensor)} is in {shown(name)}, which must be the name of a .safetensors file without a path"
                )
        names = sorted(set(index.values()))
        if missing := [name for name in names if not self._has(name)]:
            tensor = next(tensor for tensor, name in index.items() if name == missing[0])
            raise ConfigError(f"{path}: {missing[0]}, which contains {shown(tensor)}, is missing; copy that file, too")
        return [self.path / name for name in names]

    def check(self) -> dict[str, Entry]:
        """Return the entries; raise ConfigError naming the first tensor that does not match the configuration."""
        found, cfg = self.entries(), self.imported.model
        if cfg.layers > len(found):  # before `shapes`, which would fill the memory for a huge number
            raise ConfigError(
                f"{self.path}: {CONFIG} describes {cfg.layers} layers, but the files contain {len(found)} tensors"
            )
        expected = shapes(cfg)
        for name, shape in expected.items():
            if name not in found:
                others = [other for other in found if other not in expected and other.isprintable() and len(other) < 120]
                raise ConfigError(f"{self.path}: the tensor {name} is missing{did_you_mean(name, others)}")
            entry = found[name]
            if entry.shape != shape:
                raise ConfigError(f"{entry.file}: {name} has shape {shown(entry.shape)}, but {CONFIG} needs {list(shape)}")
            if entry.dtype not in DTYPES:
                raise ConfigError(f"{entry.file}: {name} has dtype {entry.dtype}; supported dtypes: {', '.join(DTYPES)}")
        extra = [name for name in found if name not in expected and not _BUFFER.fullmatch(name)]
        if extra == [OUTPUT] and cfg.tied_embeddings:
            self._check_tied(found)
        elif extra:
            raise ConfigError(f"{found[extra[0]].file}: {CONFIG} describes a model without the tensor {shown(extra[0])}")
        return found

    def _check_tied(self, found: Mapping[str, Entry]) -> None:
        """Accept a tied table that was saved twice if both copies are equal."""
        one, other = found[EMBEDDING], found[OUTPUT]
        rows = max(1, _CHUNK // (2 * one.shape[1]))
        slices = [(slice(start, start + rows), slice(None)) for start in range(0, one.shape[0], rows)]
        if one.shape != other.shape or not all(np.array_equal(one.reader()(at), other.reader()(at)) for at in slices):
            raise ConfigError(f"{other.file}: {OUTPUT} differs from {EMBEDDING}, but {CONFIG} ties them")


def _read_header(file: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # validates the file
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({reason(error)})") from None
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file}: is damaged, or not a safetensors file ({shown(str(error))}); copy it again") from None
    return {
        name: Entry(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class _Programs(NamedTuple):
    """Compiled functions for parameters of one shape and sharding."""

    empty: Callable[[], Array]  # allocates a stack of layers
    put: Callable[[Array, Array, int], Array]  # writes one layer into the stack
    cast: Callable[[Array], Array]


@functools.cache
def _programs(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> _Programs:
    put = lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer.astype(dtype), i, 0)
    return _Programs(
        jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding),
        jax.jit(put, donate_argnums=0, out_shardings=sharding),
        jax.jit(lambda x: x.astype(dtype), donate_argnums=0, out_shardings=sharding),
    )


def read_weights(folder: HubFolder, like: Any) -> Any:
    """Load the weights as `like` (ShapeDtypeStructs with shardings) describes them, one layer of a tensor at a time.

    Every process of a mesh calls this and reads what its own devices hold. The folder is checked first.
    """
    entries, layers, leaves = folder.check(), folder.imported.model.layers, named_leaves(like)
    by_parameter = {tensor.parameter: tensor for tensor in tensors(folder.imported.model)}
    total = sum(leaf.size for leaf in leaves.values())
    loaded: dict[str, Array] = {}
    done, reported = 0, time.monotonic()
    for parameter, leaf in leaves.items():
        tensor, programs = by_parameter[parameter], _programs(leaf.sharding, leaf.shape, leaf.dtype)
        if "{i}" in tensor.name:
            stack, sharding = programs.empty(), _layer_sharding(leaf.sharding)
            for i in range(layers):
                # No name for the layer, and no next one before this is in place: that bounds the host's memory.
                entry = entries[tensor.name.format(i=i)]
                stack = programs.put(stack, _read_tensor(entry, tensor, leaf.shape[1:], sharding), i)
                jax.block_until_ready(stack)
            loaded[parameter] = stack
        else:
            array = _read_tensor(entries[tensor.name], tensor, leaf.shape, leaf.sharding)
            loaded[parameter] = array if array.dtype == leaf.dtype else jax.block_until_ready(programs.cast(array))
        done += leaf.size
        if time.monotonic() - reported > _REPORT_INTERVAL:
            reported = time.monotonic()
            log.info(f"reading {folder.path}: {done / 1e6:,.0f} of {total / 1e6:,.0f} million parameters ...")
    return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in leaves])


def _read_tensor(entry: Entry, tensor: Tensor, shape: tuple[int, ...], sharding: Sharding) -> Array:
    read = entry.reader()
    # Always a copy: the memory map must not become an array that a step donates.
    copy: Callable[[Any], np.ndarray] = lambda index: np.array(tensor.read(read, index, shape), order="C")
    return jax.make_array_from_callback(shape, sharding, copy)


def _layer_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of one layer of a stack."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else sharding


def _run_config(path: Path) -> RunConfig:
    imported = HubFolder(path).imported
    data = DataConfig(tokenizer=str(path.expanduser()), begin_with_end=False, seq_len=imported.positions)
    return RunConfig(model=imported.model, data=data)


def _identity(path: Path) -> str:
    """Return a digest of all weight files and config.json."""
    files = sorted({*path.glob("*.safetensors"), path / CONFIG})
    return digest_of([[file.name, digest] for file, digest in zip(files, digests_of_files(files), strict=True)])


def _transformers_config(cfg: RunConfig) -> dict[str, Any] | None:
    """Return the config.json of the same architecture in transformers; None if only Nash-MHC has it."""
    if not isinstance(cfg.model, ModelConfig) or (family := family_of(cfg.model)) is None:
        return None
    return family_config(cfg.model, family, cfg.data.seq_len)


FORMAT = ModelFormat(
    config=_run_config,
    read=lambda path, like: read_weights(HubFolder(path), like),
    check=lambda path: HubFolder(path).check(),
    stops=lambda path: HubFolder(path).stop_tokens(),
    dtype="bfloat16",
    is_initial=True,
    identity=_identity,
    companions=_contents,
    transformers_config=_transformers_config,
)
