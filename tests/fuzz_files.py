"""Small valid inputs of every kind, for the fuzzer to damage."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import report_files
import small
from corpora import prepared as prepare_rows
from corpora import save_tokenizer
from safetensors.numpy import save_file

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_lock import acquire
from nash_mhc.config.schema import DataConfig, ModelConfig, RunConfig
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import ByteTokenizer
from nash_mhc.kits.hub.config_json import family_config, read_config
from nash_mhc.kits.hub.tensors import shapes
from nash_mhc.kits.hub.writing import write_byte_tokenizer, write_run

RECORDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"line {i} of the text", "id": i, "score": 0.5} for i in range(6)],
    "prompt": [{"prompt": f"why {i}?", "response": f"because {i}"} for i in range(6)],
    "chat": [
        {"messages": [{"role": "user", "content": f"why {i}?"}, {"role": "assistant", "content": f"because {i}"}]}
        for i in range(6)
    ],
    "fields": [{"question": f"why {i}?", "answer": f"because {i}", "level": i} for i in range(6)],
}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_YAML = """\
model_size: tiny
model:
  layers: 2
  heads: 8
  window: 8
data:
  dataset: stories
  batch_size: 8
  seq_len: 64
optim:
  learning_rate: 1e-3
  schedule: cosine
train:
  total_steps: 100
  remat: none
  deterministic: true
mesh:
  platform: cpu
"""
_CHAIN = """\
teacher:
  model_size: tiny
  total_steps: 100
cache:
  top_k: 8
student:
  batch_size: 8
stages:
  - name: first
    total_steps: 10
  - name: second
    from: fresh
    learning_rate: 1e-3
pack: [second]
"""
_LLAMA = ModelConfig(
    vocab_size=257, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=8, scales=1, conv_taps=0, residual="plain",
    window=None, embed_scale="table",
)  # fmt: skip


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def packed_documents(folder: Path) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS["text"]).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.CompressedOutputStream(str(folder / "b.jsonl.zst"), "zstd") as out:
        out.write(lines)
    pq.write_table(pa.table({"text": [record["text"] for record in RECORDS["text"]]}), folder / "c.parquet")
    (folder / "d.txt").write_text("naïve café\n" * 9)


def tokenizer(folder: Path) -> None:
    save_tokenizer(folder / "tok")
    (folder / "tok" / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    write_jsonl(folder / "a.jsonl", RECORDS["text"])


def chat_template(folder: Path) -> None:
    save_tokenizer(folder / "tok")
    (folder / "tok" / "chat_template.jinja").write_text(_TEMPLATE)
    write_jsonl(folder / "a.jsonl", RECORDS["chat"])


def prepared(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", RECORDS["text"])
    prepare_rows(folder / "rows", folder / "a.jsonl", align=16, seq_len=64)
    shutil.move(folder / "a.jsonl", folder / "rows" / "elsewhere.jsonl")


def puzzles(folder: Path) -> None:
    grid = "1234341221434321"
    hidden = [grid[:i] + "." * 3 + grid[i + 3 :] for i in range(0, 12, 2)]
    (folder / "a.csv").write_text("question,answer,rating\n" + "".join(f"{q},{grid},{i}\n" for i, q in enumerate(hidden)))


def streaming(folder: Path) -> DataConfig:
    return DataConfig(dataset=str(folder / "c.parquet"), cache_dir=str(folder / "cache"), seq_len=64, streaming=True)


def streamed(folder: Path) -> None:
    texts = [f"line {i} of the text " * 20 for i in range(60)]
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    open_source(streaming(folder), ByteTokenizer(), split="train", seed=0).take([0, 1])


def settings(folder: Path) -> None:
    (folder / "run.yaml").write_text(_YAML)


def chain(folder: Path) -> None:
    (folder / "chain.yaml").write_text(_CHAIN)


def prompts(folder: Path) -> None:
    write_jsonl(folder / "p.jsonl", RECORDS["prompt"][:2] + RECORDS["chat"][:2])


def run(folder: Path) -> None:
    """Of three steps, with two checkpoints, whose model is too small to be of use."""
    cfg = small.config()
    cfg = RunConfig.from_dict(cfg.to_dict() | {"model": vars(_LLAMA), "model_kind": "nash-mhc"})
    values = {"step": 3, "config": cfg.to_dict(), "data": {"rows": "none"}, "evaluation": {"eval/loss": 1.5}, "tokens_seen": 9}
    write_run(folder / "run", jax.device_put(small.generic_model(cfg.model)), cfg.to_dict(), parameters=9)
    shutil.copytree(folder / "run" / "checkpoints" / "0", folder / "run" / "checkpoints" / "3")
    (folder / "run" / "checkpoints" / "3" / "values" / "metadata").write_text(json.dumps(values))
    manifest.write(folder / "run" / "checkpoints" / "3")
    rows = [report_files.row(i, **{"health/rms": [1.0, 2.0], "time/step": 1.5}) for i in (1, 2, 3)]
    write_jsonl(folder / "run" / "metrics.jsonl", rows)
    write_jsonl(folder / "run" / "eval.jsonl", [{"step": 3, "eval/loss": 1.5, "sample": "a text", "health/a": [[1.0, 2.0]]}])
    info = json.loads((folder / "run" / "run.json").read_text())
    info |= {
        "floor": {"nats_per_token": 0.5, "bits_per_byte": 0.7},
        "history": [{"step": 1, "changed": {"train.seed": [1, 2]}}],
    }
    info |= {"devices": {"platform": "cpu", "kind": "cpu", "count": 1}, "mesh": {"data": 1, "fsdp": 1, "tp": 1}}
    info |= {"versions": {"jax": "0.10.2"}, "expected": {"tokens_per_s": 1.5, "gib": 1.0}, "flops_per_token": 100}
    (folder / "run" / "run.json").write_text(json.dumps(info))
    (folder / "run" / "result.json").write_text(json.dumps({"step": 3, "test": {"test/loss": 1.5}, "questions": []}))
    (folder / "run" / "parameters.txt").write_text("embed_VD 257 8\n")


def run_on_stories(folder: Path) -> None:
    """The same, without the hash of its data."""
    run(folder)
    info = json.loads((folder / "run" / "run.json").read_text())
    del info["rows"]
    (folder / "run" / "run.json").write_text(json.dumps(info))


def lock(folder: Path) -> None:
    (folder / "run").mkdir()
    with_lock = acquire(folder / "run", wait=0)
    with_lock.release()
    (folder / "run" / ".lock").write_text(json.dumps({"id": "a", "machine": ["b"], "pid": 3, "since": "then", "beat": 0}))


def hub_model(folder: Path) -> None:
    """In two files, with an index."""
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(family_config(_LLAMA, "llama", 64)))
    (folder / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    write_byte_tokenizer(folder / "hf")
    rng = np.random.default_rng(0)
    wanted = shapes(read_config(family_config(_LLAMA, "llama", 64), "here").model)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in wanted.items()}
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / "hf" / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 4}, "weight_map": where}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))


def adapters(folder: Path) -> None:
    hub_model(folder)
    (folder / "peft").mkdir()
    about = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj"],
        "use_rslora": False, "base_model_name_or_path": "hf", "fan_in_fan_out": False, "init_lora_weights": True,
    }  # fmt: skip
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(about))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): np.ones((2, 8), np.float32), name.format("B"): np.ones((8, 2), np.float32)}
    save_file(weights, folder / "peft" / "adapter_model.safetensors", metadata={"format": "pt"})


def packed(folder: Path) -> None:
    (folder / "packed").mkdir()
    about = {"version": 1, "weights": {"a": {"bits": 2, "inputs": 1}}, "config": RunConfig().to_dict()}
    (folder / "packed" / "packed.json").write_text(json.dumps(about))
