"""A configuration small enough to compile in seconds, with every axis divisible by 8, and what the step tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from nash_mhc.config.schema import DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from nash_mhc.data.pack import Rows
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.feed import to_device
from nash_mhc.train.run import compile_train_step
from nash_mhc.train.state import TrainState, create_state

_SIZES = {"vocab_size": 257, "width": 32, "layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 4, "ffn": 64}
MODEL = ModelConfig(**_SIZES, scales=1, residual="plain")  # dense: what is tested with it does not depend on the architecture
NASH = ModelConfig(**_SIZES, scales=3, window=8)  # the whole architecture, small


def config(**changes: Any) -> RunConfig:
    """The small run; `changes` are section.key values written section__key=value."""
    base = RunConfig(
        model=MODEL,
        data=DataConfig(batch_size=8, seq_len=32),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=2),
        train=TrainConfig(total_steps=10, dtype="float32", attention="xla", log_interval=2, eval_interval=0, eval_batches=2),
    )
    for name, value in changes.items():
        section, key = name.split("__")
        base = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{key: value})})
    return base


def mesh_config(cfg: RunConfig, data: int = 1, fsdp: int = 1, tp: int = 1) -> RunConfig:
    return dataclasses.replace(cfg, mesh=MeshConfig(data=data, fsdp=fsdp, tp=tp))


def random_rows(cfg: RunConfig, seed: int, *, parts: int | None = None, batch: int | None = None) -> Rows:
    """Rows of two or three documents with some padding at the end: every mask has something to hide."""
    rng = np.random.default_rng(seed)
    A, B, T = parts or cfg.train.grad_accum, batch or cfg.data.batch_size, cfg.data.seq_len
    tokens = rng.integers(0, cfg.model.vocab_size, (A, B, T + 1), np.int32)
    segments = np.sort(rng.integers(1, 4, (A, B, T), np.int32), axis=-1)
    segments[..., T - rng.integers(1, T // 4) :] = 0
    return Rows(tokens[..., :-1], tokens[..., 1:], segments, (segments > 0).astype(np.float32))


@functools.cache
def _compiled(cfg: RunConfig) -> tuple[Any, Any]:
    mesh = make_mesh(cfg.mesh)
    return mesh, compile_train_step(cfg, mesh)


def train(cfg: RunConfig, batches: list[Rows]) -> tuple[TrainState, list[dict[str, float]], Any]:
    """Takes a step on each batch: (last state on the host, metrics of each step, the compiled step)."""
    mesh, step = _compiled(cfg)
    state, history = create_state(cfg, mesh), []
    for rows in batches:
        state, metrics = step(state, to_device(rows, mesh))
        history.append({k: float(v) for k, v in jax.device_get(metrics).items()})
    return jax.device_get(state), history, step
