"""Configuration keys and presets of recursive models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nash_mhc.config.fields import ConfigError, Settings, key
from nash_mhc.config.kits import Generator
from nash_mhc.config.model import AttendingConfig, DivisibleSize
from nash_mhc.config.presets import OPTIM, TELEMETRY, TRAIN
from nash_mhc.config.schema import DataConfig, ObjectiveConfig, OptimConfig, RunConfig, TelemetryConfig, TrainConfig


@dataclass(frozen=True)
class RecursiveConfig(AttendingConfig):
    """Letters in shapes: D width, N heads, H head dim, F ffn, V vocabulary, C cells."""

    architecture = "recursive"

    vocab_size: int = key(256 + 1, "vocabulary size (V); padded to a multiple of 128", low=2)
    width: int = key(128, "width of both states (D)", low=1)
    layers: int = key(2, "number of layers of a net", low=1)
    heads: int = key(8, "attention heads (N)", low=1)
    head_dim: int = key(16, "width of a head (H); even", low=2)
    ffn: int = key(384, "width of the MLP (F)", low=1)
    nets: int = key(1, "number of nets: 1 for both states (TRM), or 2, one for each (HRM)", low=1, high=2)
    inner_cycles: int = key(3, "updates of the lower state per update of the upper state", low=1)
    outer_cycles: int = key(2, "updates of the upper state per pass", low=1)
    gradient_cycles: int = key(1, "number of final outer cycles that are backpropagated through", low=1)
    mixer: str = key(
        "attention", "sequence mixer: attention, or cells (an MLP across all positions)", choices=("attention", "cells")
    )
    causal: bool = key(True, "causal attention; false for puzzles, where all cells attend to each other")
    cells: int | None = key(None, "number of positions per sequence, for --model-mixer cells", low=2)
    most_passes: int = key(16, "maximum number of passes over a puzzle", low=1)
    explore: float = key(0.1, "probability that a puzzle gets a random minimum number of passes", low=0, high=1)
    rope_theta: float = key(10_000.0, "base of the RoPE frequencies", above=0)
    norm_eps: float = key(1e-6, "epsilon of RMSNorm", above=0)
    state_seed: int = key(0, "seed of the initial states of a puzzle", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_cycles > self.outer_cycles:
            raise ConfigError(
                f"model.gradient_cycles {self.gradient_cycles} is more than model.outer_cycles {self.outer_cycles}; lower it"
            )
        if self.mixer == "cells" and self.causal:
            raise ConfigError(
                "model.mixer cells sees all positions, so it cannot be causal; set --no-model-causal for puzzles, or "
                "--model-mixer attention"
            )
        if self.mixer == "cells" and self.cells is None:
            raise ConfigError("model.mixer cells has weights for every position; set --model-cells")

    @property
    def applications(self) -> int:
        """Applications of the net in one pass."""
        return self.outer_cycles * (self.inner_cycles + 1)

    @property
    def depth(self) -> int:
        return self.layers * self.applications

    @property
    def some_length(self) -> int:
        return self.cells or super().some_length

    @property
    def cells_ffn(self) -> int:
        """Hidden width of the MLP over cells: the ratio of the other MLP, rounded up to a multiple of 16."""
        return -(-(self.cells or 1) * self.ffn // self.width // 16) * 16

    @classmethod
    def infers(cls, values: Mapping[str, Any], found: Settings) -> Settings:
        """Take the number of cells from the dataset."""
        cells = found.get("data.seq_len")
        return {"model.cells": cells} if values.get("model.mixer") == "cells" and cells is not None else {}

    def check_run(self, run: Any) -> None:
        if not self.causal and run.objective.name in ("next_token", "distill"):
            raise ConfigError(
                f"--no-model-causal: with --objective {run.objective.name}, every position would see its own answer; use "
                "--objective puzzle, or a causal model"
            )

    def divisible_sizes(self) -> list[DivisibleSize]:
        return [
            DivisibleSize("embed", self.width, "--model-width"),
            DivisibleSize("heads", self.heads, "--model-heads"),
            DivisibleSize("ffn", self.ffn, "--model-ffn"),
            *super().divisible_sizes(),
        ]

    def check_rows(self, seq_len: int) -> None:
        if self.cells is not None and seq_len != self.cells:
            raise ConfigError(
                f"data.seq_len {seq_len}: the model has weights for model.cells {self.cells} positions; set both to the same "
                "number"
            )


_NO_SAMPLES, _OBJECTIVE = TelemetryConfig(sample_tokens=0), ObjectiveConfig(name="puzzle")

PRESETS: dict[str, RunConfig] = {
    "tiny": RunConfig(
        model_size="tiny",
        model=RecursiveConfig(vocab_size=257, width=128, layers=2, heads=8, head_dim=16, ffn=384),
    ),
    "small": RunConfig(
        model_size="small",
        model=RecursiveConfig(
            vocab_size=65_536, width=1024, layers=4, heads=16, head_dim=64, ffn=2816, rope_theta=500_000.0,
        ),
        data=DataConfig(batch_size=8, seq_len=2048), optim=OPTIM, train=TRAIN, telemetry=TELEMETRY,
    ),
    # Learns 4x4 sudoku on two CPU cores in a few minutes.
    "sudoku4": RunConfig(
        model_size="sudoku4",
        model=RecursiveConfig(
            vocab_size=6, width=64, layers=2, heads=4, head_dim=16, ffn=192, inner_cycles=2, outer_cycles=2, mixer="cells",
            cells=16, causal=False, most_passes=8,
        ),
        data=DataConfig(dataset="sudoku4", tokenizer="sudoku4", batch_size=64, seq_len=16), objective=_OBJECTIVE,
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=50, ema_decay=0.99, optimizer="muon"),
        train=TrainConfig(total_steps=800, log_interval=50, eval_interval=200, checkpoint_interval=200),
        telemetry=_NO_SAMPLES,
    ),
    # As large as TRM (arXiv 2510.04871); needs an accelerator.
    "sudoku9": RunConfig(
        model_size="sudoku9",
        model=RecursiveConfig(
            vocab_size=11, width=512, layers=2, heads=8, head_dim=64, ffn=1536, inner_cycles=6, outer_cycles=3, mixer="cells",
            cells=81, causal=False,
        ),
        data=DataConfig(dataset="sudoku9", tokenizer="sudoku9", batch_size=768, seq_len=81), objective=_OBJECTIVE,
        # Strong weight decay keeps a net that is applied 20 times from amplifying its input.
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=500, weight_decay=10.0, ema_decay=0.999, optimizer="muon"),
        train=TrainConfig(
            total_steps=12_000, log_interval=50, eval_interval=1000, checkpoint_interval=1000, eval_batches=2,
            unroll="yes",  # 94 ms/step instead of 185 on an H200, for 9 s of compilation
        ),
        telemetry=_NO_SAMPLES,
    ),
}  # fmt: skip

PUZZLE = Generator(
    "CELLS", "puzzle to solve, for a run on puzzles; such as ..2.4......1.3..", "nash_mhc.kits.recursive.objective:solve"
)
