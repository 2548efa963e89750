"""Small Hugging Face models with random weights, made by transformers itself, in folders as it writes them."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from nash_mhc.kits.hub.writing import write_byte_tokenizer

FAR = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = FAR | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = FAR | {"rope_type": "yarn"}


class Kind(NamedTuple):
    family: str
    tied: bool
    rope: dict
    dtype: str = "float32"
    shards: str = "1GB"  # most that a file holds
    more: tuple = ()


KINDS = {
    "llama": Kind("llama", False, {}),
    "llama, far, tied, bfloat16, in pieces": Kind("llama", True, LLAMA3, "bfloat16", "20KB"),
    "qwen2, tied": Kind("qwen2", True, {}, more=(("num_key_value_heads", 4),)),
    "qwen2, far, bfloat16": Kind("qwen2", False, YARN, "bfloat16"),
    "qwen3, far, in pieces": Kind("qwen3", False, YARN | {"beta_fast": 16.0, "attention_factor": 1.3}, shards="20KB"),
    "qwen3, tied, window": Kind(
        "qwen3", True, {"rope_type": "linear", "factor": 2.0},
        more=(("use_sliding_window", True), ("sliding_window", 24), ("max_window_layers", 0)),
    ),
}  # fmt: skip
_SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip


def save(folder: Path, kind: Kind, **changes) -> Path:
    """A model of that kind with a tokenizer of bytes; norms and biases are no ones and zeros here."""
    torch = pytest.importorskip("torch", reason="compares with transformers, which needs torch: pip install 'torch<2.14'")
    import transformers

    rope = {"rope_theta": 500.0, "rope_type": "default", **kind.rope}
    values = _SIZES | dict(kind.more) | changes | {"tie_word_embeddings": kind.tied, "rope_parameters": rope}
    config = transformers.AutoConfig.for_model(kind.family, **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, kind.dtype)).save_pretrained(folder, max_shard_size=kind.shards)
    write_byte_tokenizer(folder)
    return folder


@functools.cache
def by_torch(folder: Path):
    """The model as transformers reads it, in float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return by_torch(folder)(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


def tensors(folder: Path) -> dict[str, bytes]:
    """Type, shape and bytes of every tensor of all files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + size + start : 8 + size + stop])
    return found


def save_pieces(folder: Path, held: dict[str, np.ndarray]) -> None:
    """Every tensor in a file of its own, and the index."""
    names = {name: f"model-{i + 1:05d}-of-{len(held):05d}.safetensors" for i, name in enumerate(held)}
    for name, file in names.items():
        save_file({name: held[name]}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(a.nbytes for a in held.values())}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def piece_of(folder: Path, tensor: str) -> str:
    """The file that holds it."""
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]
