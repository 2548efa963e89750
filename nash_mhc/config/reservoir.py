"""The configuration of reservoir models: recurrences that are never trained, and what reads them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, key, nearest_multiple
from nash_mhc.config.model import AttendingConfig, Length


@dataclass(frozen=True)
class ReservoirConfig(AttendingConfig):
    """Letters in shapes: D width, N units, F ffn, V vocabulary; in attention N heads, H head dim."""

    architecture = "reservoir"

    vocab_size: int = key(256 + 1, "tokens in the vocabulary (V); padded up to a multiple of 128 inside", low=2)
    width: int = key(128, "width of the residual stream (D)", low=1)
    layers: int = key(2, "number of layers (L)", low=1)
    units: int = key(256, "complex numbers that a layer's reservoir remembers (N)", low=1)
    ffn: int = key(384, "width of the feed-forward layer (F)", low=1)
    unit: str = key(
        "linear",
        "linear: complex units, all tokens at once; tanh: pairs of real ones in rings, token by token",
        choices=("linear", "tanh"),
    )
    ring: int = key(32, "tanh units of one ring", low=2)
    radius: float = key(0.95, "spectral radius of every reservoir, exactly; from 1 on it forgets nothing", above=0)
    leak: float = key(1.0, "share of its state that the quickest unit replaces at a token", above=0, high=1)
    slowest_leak: float = key(0.01, "and the slowest; the others are spread between them, by factors", above=0, high=1)
    attention_every: int = key(0, "attention stands after every so many layers, with weights of its own; 0: nowhere", low=0)
    heads: int = key(8, "heads of that attention", low=1)
    head_dim: int = key(16, "width of one head (H), an even number", low=2)
    window: int | None = key(None, "tokens that it sees, itself included; none: all before it, and all of them are kept", low=1)
    rope_theta: float = key(10_000.0, "base of its rotary position frequencies", above=0)
    ridge_batches: int = key(
        0,
        "before the first step, solve for the last readout in one pass over so many batches (ridge regression)",
        low=0,
    )
    reservoir_seed: int = key(0, "what the reservoirs are drawn from: they are part of no checkpoint", low=0)
    norm_eps: float = key(1e-6, "epsilon inside RMSNorm", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slowest_leak > self.leak:
            raise ConfigError(f"model.slowest_leak {self.slowest_leak:g} is quicker than model.leak {self.leak:g}; swap them")
        if self.unit == "tanh" and self.units % self.ring:
            raise ConfigError(
                f"model.ring {self.ring} does not divide model.units {self.units}; the nearest that it divides is "
                f"{nearest_multiple(self.units, self.ring)}"
            )
        if self.attention_every and self.layers % self.attention_every:
            raise ConfigError(
                f"model.attention_every {self.attention_every} does not divide model.layers {self.layers}; the nearest that it "
                f"divides is {nearest_multiple(self.layers, self.attention_every)}"
            )
        if self.radius >= 1:
            warnings.warn(
                f"model.radius {self.radius:g}: a reservoir forgets where it began only below 1; states may grow without end",
                stacklevel=2,
            )

    @property
    def depth(self) -> int:
        return self.layers

    def lengths(self) -> list[Length]:
        return [
            Length("embed", self.width, "--model-width"),
            Length("reservoir", self.units if self.unit == "linear" else self.units // self.ring, "--model-units"),
            Length("ffn", self.ffn, "--model-ffn"),
            *([Length("heads", self.heads, "--model-heads")] if self.attention_every else []),
            *super().lengths(),
        ]
