"""A model of ours -> a folder that Hugging Face's libraries load: weights, configuration, tokenizer, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from nash_mhc import __version__
from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.data.tokenizer import HuggingFaceTokenizer, prefix_of
from nash_mhc.hub import byte_tokenizer, nash_tensors
from nash_mhc.hub.config_json import family_of, is_tied, read_config, written_config
from nash_mhc.hub.folder import CONFIG, INDEX, WEIGHTS, files_beside, tensor_dtypes
from nash_mhc.hub.folder import DTYPES as HUB_DTYPES
from nash_mhc.hub.load import Loaded
from nash_mhc.hub.narrowed import narrowed
from nash_mhc.hub.tensors import tensors, written
from nash_mhc.model.weights import has_derived, materialized
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.folders import new_folder

_TABLE, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # some write both for a tied model, too
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def export(
    loaded: Loaded, out: Path, *, dtype: str | None, shard_bytes: int, card: str, say: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """The files of the new folder, which appears when it is whole, or not at all. ConfigError.

    `dtype`: of all tensors; None: each leaves in the one that it came in, and those of ours are float32.
    """
    if not isinstance(loaded.config.model, ModelConfig):
        raise ConfigError(f"a model of the kind {loaded.config.model.architecture!r} cannot be exported")
    came = tensor_dtypes(loaded.beside) if loaded.beside is not None else {}
    rest = DTYPES[dtype or imported_dtype(loaded)]
    own = {name: HUB_DTYPES[kind] for name, kind in came.items() if kind in HUB_DTYPES} if dtype is None else {}
    with new_folder(out) as part:
        found = named_tensors(loaded, twice=_OUTPUT in came)
        _write_weights(found, part, lambda name: own.get(name, rest), shard_bytes, say)
        _write_beside(loaded, part, dtype)
        (part / "README.md").write_text(card, encoding="utf-8")
    return sorted(out.iterdir())


def imported_dtype(loaded: Loaded) -> str:
    """What config.json says of all tensors, for those of which nobody knows more; ours are float32."""
    if loaded.beside is None:
        return "float32"
    values = json.loads((loaded.beside / CONFIG).read_text())
    found = str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch.")
    return found if found in DTYPES else "float32"


def named_tensors(loaded: Loaded, *, twice: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under the name that it has there, float32, one at a time; of a tied model `twice` the one table."""
    plain = jax.jit(materialized)(loaded.model) if has_derived(loaded.model) else loaded.model
    cfg, leaves = loaded.config.model, named_leaves(plain)
    assert isinstance(cfg, ModelConfig)
    for name, array in written(leaves, cfg.layers, tensors(cfg)):
        yield name, array
        if twice and is_tied(cfg) and name == _TABLE:
            yield _OUTPUT, array


def _write_weights(
    found: Iterator[tuple[str, np.ndarray]],
    folder: Path,
    dtype_of: Callable[[str], Any],
    shard_bytes: int,
    say: Callable[[str], None],
) -> None:
    """Files of at most so many bytes (a tensor is never cut), and an index where there are several."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        say(f"writing {sum(a.nbytes for a in held.values()) / 1e6:,.0f} MB ...")
        save_file(held, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        (folder / f"{len(shards)}.part").chmod(0o644)  # the library lets nobody else read it
        shards.append(list(held))
        held.clear()

    for name, wide in found:
        array = narrowed(name, wide, dtype_of(name), "bfloat16 or float32")
        if held and sum(a.nbytes for a in held.values()) + array.nbytes > shard_bytes:
            write()
        held[name] = array
        total += array.nbytes
    write()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / WEIGHTS)
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    where = {tensor: names[i] for i, shard in enumerate(shards) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_beside(loaded: Loaded, folder: Path, dtype: str | None) -> None:
    """Configuration and tokenizer: those that the model came with, where it is still that model; byte for byte, unless
    all tensors were given another `dtype`."""
    cfg, tokenizer = loaded.config.model, loaded.tokenizer
    assert isinstance(cfg, ModelConfig)
    positions, family = loaded.config.data.seq_len, family_of(cfg)
    if family is None:
        shutil.copy(nash_tensors.CODE, folder)
    if loaded.beside is not None:
        for name in files_beside(loaded.beside):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(loaded.beside / name, folder / name)
        if tokenizer.begin is not None and isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.adds_begin:
            tokenizer.save_backend(folder, begins=True)  # it was trained on documents that begin with the end token
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
            byte_tokenizer.write(folder)
        _write_json(folder / "generation_config.json", {"bos_token_id": prefix_of(tokenizer), "eos_token_id": tokenizer.end})
    if family is None:
        values = nash_tensors.config_json(cfg, max_position_embeddings=positions)
    else:
        values = written_config(cfg, family, positions)
    said = dtype or imported_dtype(loaded)
    ends = {"bos_token_id": prefix_of(tokenizer), "eos_token_id": tokenizer.end, "pad_token_id": None}
    _write_json(folder / CONFIG, values | ends | {"dtype": said, "torch_dtype": said})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_card(loaded: Loaded, origin: str, figures: dict[str, Any]) -> str:
    """What someone who is handed the folder wants to know first."""
    cfg = loaded.config
    assert isinstance(cfg.model, ModelConfig)
    family = family_of(cfg.model)
    flag = "" if family else ", trust_remote_code=True"
    what = f"a {family} model" if family else "a Nash-MHC model, with its code in `modeling_nash_mhc.py`"
    rows = "".join(f"| {name} | {value} |\n" for name, value in figures.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {origin}
Exported by nash_mhc {__version__} from `{origin}`: {what}.

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
