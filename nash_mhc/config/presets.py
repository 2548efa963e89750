"""Named starting points: functions that return complete configurations. They set keys, they never add any."""

from __future__ import annotations

import dataclasses

from nash_mhc.config.schema import ConfigError, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig

# width, layers, heads, kv_heads, head_dim, ffn, vocabulary, T of each size; docs/presets.md has the exact counts.
_SHAPES: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "tiny": (128, 2, 8, 8, 16, 384, 257, 256),
    "small": (640, 12, 10, 10, 64, 1792, 65_536, 2048),
    "medium": (1024, 14, 16, 8, 64, 2816, 65_536, 2048),
    "big": (1536, 16, 12, 12, 128, 4096, 65_536, 2048),
    "max": (1792, 18, 14, 14, 128, 4608, 65_536, 4096),
    "1b": (2048, 16, 16, 16, 128, 5504, 32_768, 4096),
    "3b": (2816, 28, 22, 22, 128, 7680, 65_536, 4096),
}


def sizes() -> tuple[str, ...]:
    return tuple(_SHAPES)


def model(name: str = "tiny") -> ModelConfig:
    """The model of that size."""
    if name not in _SHAPES:
        raise ConfigError(f"unknown model size {name!r}; there are {', '.join(_SHAPES)}")
    width, layers, heads, kv_heads, head_dim, ffn, vocab, _ = _SHAPES[name]
    return ModelConfig(
        vocab_size=vocab, width=width, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
        window=32 if name == "tiny" else 512,
        rope_theta=10_000.0 if name == "tiny" else 500_000.0, tied_embeddings=name not in ("1b", "3b"),
    )  # fmt: skip


def run(name: str = "tiny") -> RunConfig:
    """A whole run with that model: what `--model-size` starts from."""
    config = RunConfig(model_size=name, model=model(name))
    if name == "tiny":
        return config
    return dataclasses.replace(
        config,
        data=DataConfig(batch_size=8, seq_len=_SHAPES[name][-1]),
        # One rate for all: a parameter's role and width do the rest (`rates` in optim/roles.py).
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=200, min_lr_ratio=0.1),
        train=TrainConfig(total_steps=10_000, remat="dots", log_interval=10, eval_interval=500, checkpoint_interval=500),
    )
