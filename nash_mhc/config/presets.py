"""Presets: one complete configuration per model size. docs/presets.md has the exact parameter counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.fields import Settings
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TelemetryConfig,
    TrainConfig,
    architecture_config,
)

# One learning rate for all sizes: optim/schedule.py scales it by role and width.
OPTIM = OptimConfig(learning_rate=3e-3, warmup_steps=200, min_lr_ratio=0.1)
# On an H200, `small` takes 8 ms/token: a sample of 32 at every evaluation costs less than 1% of its time.
TELEMETRY = TelemetryConfig(sample_tokens=32)
TRAIN = TrainConfig(total_steps=10_000, log_interval=10, eval_interval=500, checkpoint_interval=500)


def _preset(name: str, seq_len: int, **model: Any) -> RunConfig:
    """Return a size for accelerators."""
    return RunConfig(
        model_size=name, model=ModelConfig(window=512, rope_theta=500_000.0, **model),
        data=DataConfig(batch_size=8, seq_len=seq_len), optim=OPTIM, train=TRAIN, telemetry=TELEMETRY,
    )  # fmt: skip


_NASH_MHC: dict[str, RunConfig] = {
    # Learns the synthetic stories on a laptop in three minutes. Other keys have the defaults of model.py.
    "tiny": RunConfig(
        model_size="tiny",
        model=ModelConfig(
            vocab_size=257, width=128, layers=2, heads=8, kv_heads=8, head_dim=16, ffn=384, window=32, rope_theta=10_000.0,
        ),
        train=TrainConfig(unroll="yes"),  # on a CPU, two layers: 0.8 s more to compile, 1% faster steps
    ),
    "small": _preset(
        "small", 2048, vocab_size=65_536, width=640, layers=12, heads=10, kv_heads=10, head_dim=64, ffn=1792,
    ),
    "medium": _preset(
        "medium", 2048, vocab_size=65_536, width=1024, layers=14, heads=16, kv_heads=8, head_dim=64, ffn=2816,
    ),
    "big": _preset(
        "big", 2048, vocab_size=65_536, width=1536, layers=16, heads=12, kv_heads=12, head_dim=128, ffn=4096,
    ),
    "max": _preset(
        "max", 4096, vocab_size=65_536, width=1792, layers=18, heads=14, kv_heads=14, head_dim=128, ffn=4608,
    ),
    "1b": _preset(
        "1b", 4096, vocab_size=32_768, width=2048, layers=16, heads=16, kv_heads=16, head_dim=128, ffn=5504,
        tied_embeddings=False,
    ),
    "3b": _preset(
        "3b", 4096, vocab_size=65_536, width=2816, layers=28, heads=22, kv_heads=22, head_dim=128, ffn=7680,
        tied_embeddings=False,
    ),
}  # fmt: skip

_SIZES: Registry[dict[str, RunConfig]] = Registry("presets", {ModelConfig.architecture: _NASH_MHC})


def _of_kind(kind: str) -> dict[str, RunConfig]:
    """Return the presets of a kind of model; a kind without presets has its defaults."""
    known = architecture_config(kind)
    return _SIZES[kind] if kind in _SIZES else {"tiny": RunConfig(model_size="tiny", model=known())}


def sizes(kind: str = ModelConfig.architecture) -> tuple[str, ...]:
    return tuple(_of_kind(kind))


def run(name: str = "tiny", kind: str = ModelConfig.architecture) -> RunConfig:
    """Return the configuration that `--model-size NAME` starts from."""
    known = _of_kind(kind)
    if name not in known:
        raise ConfigError(f"unknown size {name!r} of --model-kind {kind}; choose from {', '.join(known)}")
    return known[name]


def model(name: str = "tiny") -> ModelConfig:
    """Return the model of a preset."""
    found = run(name).model
    assert isinstance(found, ModelConfig)
    return found


# Factor on the preset's batch size, which is small enough for a CPU (`tiny`) or a small accelerator. A TPU's matrix
# unit works on multiples of eight sequences.
_BATCH_FACTOR = {"cpu": 1, "gpu": 4, "tpu": 8}


def profile_settings(platform: str, values: Mapping[str, Any]) -> Settings:
    """Return the batch size and learning rate for a platform.

    The batch is scaled by a factor, and Adam's learning rate by its square root, because gradient noise falls.
    """
    factor = _BATCH_FACTOR[platform]
    found = {
        "data.batch_size": values["data.batch_size"] * factor,
        "optim.learning_rate": float(f"{values['optim.learning_rate'] * math.sqrt(factor):.3g}"),
    }
    return {path: (value, f"--profile-for {platform}") for path, value in found.items()}
