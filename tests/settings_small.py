"""A small run whose sizes divide by many meshes, for tests of meshes that train nothing."""

import dataclasses
from typing import Any

from nash_mhc.config.schema import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

SMALL = RunConfig(
    model=ModelConfig(vocab_size=257, width=16, layers=1, heads=4, kv_heads=4, head_dim=4, ffn=16, scales=4, ratio=2),
    data=DataConfig(batch_size=8, seq_len=64),
    optim=OptimConfig(warmup_steps=0),
    train=TrainConfig(total_steps=1, eval_batches=1),
)


def changed(cfg: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    return dataclasses.replace(cfg, **{k: dataclasses.replace(getattr(cfg, k), **v) for k, v in sections.items()})
