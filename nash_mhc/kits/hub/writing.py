"""Write a model as a Hugging Face folder (weights, configuration, tokenizer, model card) or as a run directory."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from nash_mhc import __version__
from nash_mhc.checkpoint.run_folder import RUN
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, prefix_of, prepending_processor, write_tokenizer_config
from nash_mhc.kits.hub.config_json import CODE, family_config, family_of, is_tied, nash_config, read_config
from nash_mhc.kits.hub.folder import CONFIG, GENERATION, INDEX, WEIGHTS, companions, tensor_dtypes
from nash_mhc.kits.hub.tensors import DTYPES, EMBEDDING, OUTPUT, export_tensors, tensors
from nash_mhc.loading.formats import RUN_COPY, cast, copied_companions, save_tensors
from nash_mhc.loading.load import Loaded, load
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.weights import has_derived, materialized
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.folders import check_is_new, new_folder

log = logging.getLogger(__name__)
_END = "<|endoftext|>"


def export(loaded: Loaded, out: Path, *, dtype: str | None, shard_bytes: int, card: str) -> list[Path]:
    """Write a Hugging Face folder, all of it or nothing, and return its files.

    Tensors are cast to `dtype`. None: each has the dtype it was imported from, else float32.
    """
    cfg = loaded.config.model
    if not isinstance(cfg, ModelConfig):
        raise ConfigError(f"models of --model-kind {cfg.architecture} cannot be exported")
    imported = tensor_dtypes(loaded.beside) if loaded.beside is not None else {}
    default = np.dtype(dtype or imported_dtype(loaded))
    own = {name: DTYPES[kind] for name, kind in imported.items() if kind in DTYPES} if dtype is None else {}
    with new_folder(out) as part:
        found = named_tensors(loaded, write_tied_twice=OUTPUT in imported)
        cast_tensors = ((name, cast(name, x, own.get(name, default), "bfloat16 or float32")) for name, x in found)
        _write_weights(cast_tensors, part, shard_bytes)
        _write_companions(loaded, cfg, part, dtype)
        (part / "README.md").write_text(card, encoding="utf-8")
    return sorted(out.iterdir())


def imported_dtype(loaded: Loaded) -> str:
    """Return the dtype that config.json gives for all tensors; float32 for our own models."""
    if loaded.beside is None:
        return "float32"
    values = json.loads((loaded.beside / CONFIG).read_text())
    dtype = str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch.")
    return dtype if dtype in [known.name for known in DTYPES.values()] else "float32"


def named_tensors(loaded: Loaded, *, write_tied_twice: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 array) of every tensor of the exported folder, one at a time."""
    model = jax.jit(materialized)(loaded.model) if has_derived(loaded.model) else loaded.model
    cfg = loaded.config.model
    assert isinstance(cfg, ModelConfig)
    for name, array in export_tensors(named_leaves(model), cfg.layers, tensors(cfg)):
        yield name, array
        if write_tied_twice and is_tied(cfg) and name == EMBEDDING:
            yield OUTPUT, array


def _write_weights(arrays: Iterator[tuple[str, np.ndarray]], folder: Path, shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` (tensors are not split), and an index if there are several."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = size = 0

    def write() -> None:
        log.info(f"writing {size / 1e6:,.0f} MB ...")
        save_tensors(pending, folder / f"{len(shards)}.part", {"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, array in arrays:
        if pending and size + array.nbytes > shard_bytes:
            write()
            size = 0
        pending[name] = array
        size += array.nbytes
        total += array.nbytes
    write()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / WEIGHTS)
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    weight_map = {tensor: names[i] for i, shard in enumerate(shards) for tensor in shard}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_companions(loaded: Loaded, cfg: ModelConfig, folder: Path, dtype: str | None) -> None:
    """Write configuration and tokenizer. Files of an imported model are copied if they still describe this model."""
    tokenizer, positions, family = loaded.tokenizer, loaded.config.data.seq_len, family_of(cfg)
    ends = {"bos_token_id": prefix_of(tokenizer), "eos_token_id": tokenizer.end}
    if family is None:
        shutil.copy(CODE, folder)
    if loaded.beside is not None:
        for name in companions(loaded.beside):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(loaded.beside / name, folder / name)
        if tokenizer.begin is not None and isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.adds_begin:
            tokenizer.save_backend(folder, begins=True)  # trained on documents that begin with the end token
        original = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if read_config(original, CONFIG).model == cfg:
            key = "torch_dtype" if "torch_dtype" in original and "dtype" not in original else "dtype"
            if dtype is not None:
                _write_json(folder / CONFIG, original | {key: dtype})
            return
    else:
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer.save(folder, begins=tokenizer.begin is not None)
        else:
            write_byte_tokenizer(folder)
        _write_json(folder / GENERATION, ends)
    values = family_config(cfg, family, positions) if family else nash_config(cfg, max_position_embeddings=positions)
    dtype = dtype or imported_dtype(loaded)
    _write_json(folder / CONFIG, values | ends | {"pad_token_id": None, "dtype": dtype, "torch_dtype": dtype})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte tokenizer: the id of a byte's token is its value."""
    # The byte-level format writes each byte as a letter: itself if it is printable, else the next free code point.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": ByteTokenizer.end, "content": _END, "single_word": False, "lstrip": False, "rstrip": False}
    values: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": prepending_processor(_END, ByteTokenizer.end), "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {letter: byte for byte, letter in sorted(letters.items())}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")
    write_tokenizer_config(folder, _END)


def model_card(loaded: Loaded, origin: str, figures: dict[str, Any]) -> str:
    """Return the README.md of an exported model."""
    cfg = loaded.config
    assert isinstance(cfg.model, ModelConfig)
    family = family_of(cfg.model)
    flag = "" if family else ", trust_remote_code=True"
    kind = f"a {family} model" if family else "a Nash-MHC model, with its code in `modeling_nash_mhc.py`"
    rows = "".join(f"| {name} | {value} |\n" for name, value in figures.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {origin}
Exported by nash_mhc {__version__} from `{origin}`: {kind}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{flag})
tokenizer = AutoTokenizer.from_pretrained("FOLDER"{flag})
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

| what | value |
|---|---|
{rows}"""


class _Weights(eqx.Module):
    """A training state with nothing but the model."""

    model: Any


def import_folder(folder: Path, out: Path) -> Loaded:
    """Convert a Hugging Face folder to a run directory, all of it or nothing."""
    check_is_new(out)
    loaded = load(folder)
    with new_folder(out) as part:
        config = loaded.config.recorded()
        config["data"]["tokenizer"] = str(out / RUN_COPY)
        log.info(f"writing {out} ...")
        parameters = count_parameters(loaded.config.model)
        write_run(part, loaded.model, config, copy_from=folder, imported=folder.name, parameters=parameters)
    return loaded


def write_run(
    folder: Path, model: Any, config: dict[str, Any], *, copy_from: Path | None = None, base: Any = None, **metadata: Any
) -> None:
    """Write a run directory that holds a configuration and one checkpoint with nothing but weights.

    `copy_from`: model whose tokenizer and other files are copied. `base`: the record of the weights that adapters
    belong to. `metadata`: other keys of run.json.
    """
    for name, content in copied_companions(copy_from).items() if copy_from is not None else ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    values = {"step": 0, "config": config, "data": {"rows": "none"}} | ({} if base is None else {"base": base})
    with Store(folder) as store:
        store.save(0, _Weights(model), values)
    run = {"config": config, "rows": "none", "init_from": base, "versions": {"nash_mhc": __version__}} | metadata
    (folder / RUN).write_text(json.dumps(run, indent=2) + "\n")
