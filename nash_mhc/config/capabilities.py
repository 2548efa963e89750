"""Config sections of optional features; `--help SECTION` shows one."""

from __future__ import annotations

from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, key
from nash_mhc.config.logs import HELP, LEVELS


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    section = "objective"

    name: str = key(
        "next_token",
        "objective to minimize: next_token, smoothed, or a registered one",
        flag="objective",
        seam="objectives",
    )
    label_smoothing: float = key(0.1, "label smoothing of `smoothed`", above=0, high=0.99)


@dataclass(frozen=True)
class LoraConfig(Section):
    section, prefixed = "lora", True

    rank: int = key(0, "LoRA rank; only adapters are trained (0: no LoRA, train all weights)", low=0)
    alpha: float | None = key(None, "LoRA alpha: adapters are scaled by alpha / rank (none: twice the rank)", above=0)
    dropout: float = key(0.0, "dropout of the adapters' inputs", low=0, high=0.9)
    targets: str = key(
        "all", "LoRA targets: all, attention, mlp, or comma-separated names such as q_proj,v_proj or those of parameters.txt"
    )
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead, for large ranks")
    base_dtype: str = key("float32", "dtype of the frozen weights", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(word.strip() for word in self.targets.split(",")):
            raise ConfigError(f"--lora-targets {self.targets}: has an empty name; write names with single commas between them")


@dataclass(frozen=True)
class PrecisionConfig(Section):
    section = "precision"

    weights_dtype: str = key(
        "float32",
        "dtype of matrices and tables between steps; bfloat16 halves memory, with stochastic rounding",
        choices=("float32", "bfloat16"),
    )
    moments_dtype: str = key(
        "float32", "dtype of the optimizer's moments of matrices and tables", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True)
class TelemetryConfig(Section):
    section = "telemetry"

    wandb: str | None = key(None, "Weights & Biases project to log to (none: no logging)")
    wandb_mode: str = key("online", "offline: store in the run directory, for wandb sync", choices=("online", "offline"))
    log_format: str = key("text", "json: one JSON object per line on stdout", choices=("text", "json"))
    log_level: str = key("info", HELP, choices=LEVELS)
    profile: str | None = key(None, "steps to profile, such as 50:55: writes a trace and prints the ten most costly parts")
    sample_tokens: int = key(160, "tokens of the sample written at every evaluation (0: none)", low=0)
    sample_prompt: str | None = key(None, "prompt of the samples (none: start of a document)")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.profiled

    @property
    def profiled(self) -> tuple[int, int] | None:
        """Return the first and the last step to profile."""
        if self.profile is None:
            return None
        first, colon, last = self.profile.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ConfigError(f"telemetry.profile {self.profile!r}: must be the first and the last step, such as 50:55")
        return int(first), int(last)
