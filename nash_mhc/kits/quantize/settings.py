"""Keys of quantization-aware training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from nash_mhc.config.fields import ConfigError, Section, key


class Bits(NamedTuple):
    """Bits of a weight and rank of its scales; rank 0: one scale per group of inputs."""

    bits: int
    rank: int


# Bits and rank of MLP weights, then of attention weights.
PRESETS = {"q2a4": "2/32,4/8", "q4a4": "4/4,4/4", "q4_r32": "4/32,4/32", "q2a2": "2/32,2/32"}


@dataclass(frozen=True)
class QuantizeConfig(Section):
    section, prefixed, switch = "quantize", True, "weights"
    about = "quantization-aware training with 2 to 4 bits"

    weights: str | None = key(
        None,
        f"quantize weights, not activations: {', '.join(PRESETS)} (q2a4: 2-bit MLP, 4-bit attention), or MLP,ATTENTION such "
        "as 2/32,4/8. Each is BITS/RANK or `none`; RANK is the rank of the matrix of scales (0: one scale per group)",
        flag="quantize",
    )
    group: int = key(
        32,
        "inputs per group. With rank 0, a group has one scale; otherwise the matrix of scales is initialized from these",
        low=2,
    )
    levels: str = key(
        "uniform", "quantization levels: uniform (evenly spaced) or table (learned)", choices=("uniform", "table")
    )
    magnitudes: bool = key(False, "split scales into unit vectors and trained magnitudes")
    rest: float = key(
        0.0,
        "freeze each magnitude once its relative change is below this in two successive windows of 100 steps (0: never)",
        low=0,
        high=1,
    )
    trains: str = key(
        "both",
        "what to train: weights (all parameters except scales), scales (nothing else), or both (all parameters)",
        choices=("weights", "scales", "both"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parts  # raises ConfigError

    @property
    def parts(self) -> dict[str, Bits | None]:
        """The bits and rank of `mlp` and `attention`; None: not quantized."""
        if self.weights is None:
            return {"mlp": None, "attention": None}
        words = [word.strip() for word in PRESETS.get(self.weights, self.weights).split(",")]
        matches = [re.fullmatch(r"([234])/(\d+)", word) for word in words]
        if len(words) != 2 or not all(match or word == "none" for match, word in zip(matches, words, strict=True)):
            raise ConfigError(
                f"--quantize {self.weights}: must be {', '.join(PRESETS)}, or BITS/RANK (2, 3 or 4 bits; or none) for MLP and "
                "attention, such as 2/32,4/8"
            )
        mlp, attention = (Bits(int(match[1]), int(match[2])) if match else None for match in matches)
        if mlp is None and attention is None:
            raise ConfigError(f"--quantize {self.weights}: quantizes nothing; remove the flag")
        return {"mlp": mlp, "attention": attention}

    def check_run(self, run: Any) -> None:
        if self.weights is None:
            return
        if run.lora.rank:
            raise ConfigError(
                "--quantize: LoRA needs a base that is already quantized; quantize the base in its own run, then give that "
                "run as "
                "--init-from, without --quantize"
            )
        if run.train.matmul_dtype == "float8":
            raise ConfigError("--matmul-dtype float8: --quantize already rounds the weights; remove one of the two flags")

    def trains_role(self, role: str) -> bool:
        return self.weights is None or self.trains == "both" or (role == "scale") == (self.trains == "scales")
