"""Configuration keys and presets of reservoir models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, key, nearest_multiple
from nash_mhc.config.model import AttendingConfig, DivisibleSize
from nash_mhc.config.presets import OPTIM, TELEMETRY, TRAIN
from nash_mhc.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig


@dataclass(frozen=True)
class ReservoirConfig(AttendingConfig):
    """Letters in shapes: D width, N units, F ffn, V vocabulary; in attention N heads, H head dim."""

    architecture = "reservoir"

    vocab_size: int = key(256 + 1, "vocabulary size (V); padded to a multiple of 128", low=2)
    width: int = key(128, "width of the residual stream (D)", low=1)
    layers: int = key(2, "number of layers (L)", low=1)
    units: int = key(256, "size of a layer's reservoir: number of complex units (N)", low=1)
    ffn: int = key(384, "width of the MLP (F)", low=1)
    unit: str = key(
        "linear",
        "type of the units: linear (complex, computed in parallel over tokens) or tanh (two nonlinear real units for each "
        "complex one, in rings of --model-ring, computed token by token)",
        choices=("linear", "tanh"),
    )
    ring: int = key(32, "tanh units per ring", low=2)
    radius: float = key(0.95, "spectral radius of every reservoir; with 1 or more it never forgets", above=0)
    leak: float = key(1.0, "leak of the fastest unit: the fraction of its state that each token replaces", above=0, high=1)
    slowest_leak: float = key(0.01, "leak of the slowest unit; the others are spaced geometrically", above=0, high=1)
    attention_every: int = key(0, "add an attention layer after every N layers (0: none)", low=0)
    heads: int = key(8, "attention heads", low=1)
    head_dim: int = key(16, "width of a head (H); even", low=2)
    window: int | None = key(None, "attention window in tokens (none: all tokens; generation caches them all)", low=1)
    rope_theta: float = key(10_000.0, "base of the RoPE frequencies", above=0)
    ridge_batches: int = key(
        0, "solve for the last readout by ridge regression over this many batches before the first step (0: no)", low=0
    )
    reservoir_seed: int = key(0, "seed of the frozen random weights, which checkpoints do not contain", low=0)
    norm_eps: float = key(1e-6, "epsilon of RMSNorm", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slowest_leak > self.leak:
            raise ConfigError(f"model.slowest_leak {self.slowest_leak:g} is larger than model.leak {self.leak:g}; swap them")
        if self.unit == "tanh" and self.units % self.ring:
            raise ConfigError(
                f"model.ring {self.ring} does not divide model.units {self.units}; the nearest multiple is "
                f"{nearest_multiple(self.units, self.ring)}"
            )
        if self.attention_every and self.layers % self.attention_every:
            raise ConfigError(
                f"model.attention_every {self.attention_every} does not divide model.layers {self.layers}; the nearest "
                f"multiple is {nearest_multiple(self.layers, self.attention_every)}"
            )
        if self.radius >= 1:
            warnings.warn(
                f"model.radius {self.radius:g}: a reservoir forgets its initial state only below 1; its states may diverge",
                stacklevel=2,
            )

    @property
    def depth(self) -> int:
        return self.layers

    def divisible_sizes(self) -> list[DivisibleSize]:
        return [
            DivisibleSize("embed", self.width, "--model-width"),
            DivisibleSize("reservoir", self.units if self.unit == "linear" else self.units // self.ring, "--model-units"),
            DivisibleSize("ffn", self.ffn, "--model-ffn"),
            *([DivisibleSize("heads", self.heads, "--model-heads")] if self.attention_every else []),
            *super().divisible_sizes(),
        ]


# Width and depth as in config/presets.py.
PRESETS: dict[str, RunConfig] = {
    "tiny": RunConfig(
        model_size="tiny",
        model=ReservoirConfig(vocab_size=257, width=128, layers=2, units=256, ffn=384),
        optim=OptimConfig(learning_rate=2.4e-3), train=TrainConfig(unroll="yes"),
    ),
    "small": RunConfig(
        model_size="small",
        model=ReservoirConfig(
            vocab_size=65_536, width=640, layers=12, units=1024, ffn=1792, slowest_leak=0.001, heads=10, head_dim=64,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=OPTIM, train=TRAIN, telemetry=TELEMETRY,
    ),
    "1b": RunConfig(
        model_size="1b",
        model=ReservoirConfig(
            vocab_size=32_768, width=2048, layers=16, units=3072, ffn=5504, slowest_leak=0.001, heads=16, head_dim=128,
            rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=4096), optim=OPTIM, train=TRAIN, telemetry=TELEMETRY,
    ),
}  # fmt: skip
