"""The configuration of recursive models: a small net that is applied to its own state again and again."""

from __future__ import annotations

from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, key
from nash_mhc.config.model import AttendingConfig, Length


@dataclass(frozen=True)
class RecursiveConfig(AttendingConfig):
    """Letters in shapes: D width, N heads, H head dim, F ffn, V vocabulary, C cells."""

    architecture = "recursive"

    vocab_size: int = key(256 + 1, "tokens in the vocabulary (V); padded up to a multiple of 128 inside", low=2)
    width: int = key(128, "width of both states (D)", low=1)
    layers: int = key(2, "layers of the net", low=1)
    heads: int = key(8, "heads of attention (N)", low=1)
    head_dim: int = key(16, "width of one head (H), an even number", low=2)
    ffn: int = key(384, "width of the feed-forward layer (F)", low=1)
    nets: int = key(1, "nets: one for both states (TRM), or one for each (HRM)", low=1, high=2)
    inner_cycles: int = key(3, "updates of the lower state before one of the upper (n)", low=1)
    outer_cycles: int = key(2, "updates of the upper state in one pass", low=1)
    gradient_cycles: int = key(1, "how many of these, the last, the gradient goes through", low=1)
    mixer: str = key(
        "attention", "what tells places of each other; cells: a layer across all of them", choices=("attention", "cells")
    )
    causal: bool = key(True, "a place sees those before it alone, as a language model must; false: a puzzle's cells see all")
    cells: int | None = key(None, "places of a row, which `mixer cells` has weights for", low=2)
    most_passes: int = key(16, "passes over a puzzle, each with an answer and a loss, until the net is to stop", low=1)
    explore: float = key(
        0.1, "share of the puzzles that stay for a random number of passes whatever the net says", low=0, high=1
    )
    rope_theta: float = key(10_000.0, "base of the rotary position frequencies", above=0)
    norm_eps: float = key(1e-6, "epsilon inside RMSNorm", above=0)
    state_seed: int = key(0, "what the states of a puzzle begin with is drawn from: part of no checkpoint", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_cycles > self.outer_cycles:
            raise ConfigError(
                f"model.gradient_cycles {self.gradient_cycles} is more than model.outer_cycles {self.outer_cycles}; lower it"
            )
        if self.mixer == "cells" and self.causal:
            raise ConfigError(
                "model.mixer cells sees all places, and model.causal allows those before one alone; set --no-model-causal for "
                "puzzles, or --model-mixer attention"
            )
        if self.mixer == "cells" and self.cells is None:
            raise ConfigError("model.mixer cells has weights for every place; say how many with --model-cells")

    @property
    def applications(self) -> int:
        """Of the net in one pass."""
        return self.outer_cycles * (self.inner_cycles + 1)

    @property
    def depth(self) -> int:
        return self.layers * self.applications

    @property
    def cells_ffn(self) -> int:
        """Width between the two layers across cells: as much wider as the other is, in whole multiples of 16."""
        return -(-(self.cells or 1) * self.ffn // self.width // 16) * 16

    def lengths(self) -> list[Length]:
        return [
            Length("embed", self.width, "--model-width"),
            Length("heads", self.heads, "--model-heads"),
            Length("ffn", self.ffn, "--model-ffn"),
            *super().lengths(),
        ]

    def check_rows(self, seq_len: int) -> None:
        if self.cells is not None and seq_len != self.cells:
            raise ConfigError(
                f"data.seq_len {seq_len}: the model has weights for model.cells {self.cells} places; make them equal"
            )
