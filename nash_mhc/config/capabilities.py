"""Sections of what a run may do besides pretraining: `--help` names them, and `--help SECTION` shows one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from nash_mhc.config.fields import ConfigError, Section, key


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    section = "objective"

    name: str = key(
        "next_token",
        "what is minimized: next_token, smoothed, distill (from a teacher), puzzle (every cell's answer), or a registered one",
        flag="objective",
    )
    label_smoothing: float = key(0.1, "share of a target that `smoothed` gives to the whole vocabulary", above=0, high=0.99)


@dataclass(frozen=True)
class LoraConfig(Section):
    section = "lora"

    rank: int = key(0, "rank of the adapters, of which alone is trained then (0: none; all weights are trained)", low=0)
    alpha: float | None = key(None, "their product is multiplied by this over the rank (none: twice the rank)", above=0)
    dropout: float = key(0.0, "share of an adapter's inputs that training leaves out", low=0, high=0.9)
    targets: str = key(
        "all", "all, attention, mlp, names such as q_proj,v_proj, or names as in parameters.txt, with commas between them"
    )
    rslora: bool = key(False, "divide alpha by the root of the rank instead, which suits large ranks")
    base_dtype: str = key("float32", "how the weights that stay are kept", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(word.strip() for word in self.targets.split(",")):
            raise ConfigError(f"--lora-targets {self.targets}: has an empty name; write names with single commas between them")


@dataclass(frozen=True)
class DistillConfig(Section):
    section = "distill"

    temperature: float = key(1.0, "both softmaxes are of logits over this; one that the cache was made for", above=0)
    text: float = key(0.0, "share of the loss that is the cross-entropy of the text itself", low=0, high=1)
    hard: float = key(0.0, "share of the loss that is the cross-entropy of the teacher's first choice", low=0, high=1)
    teacher: str | None = key(
        None, "folder of a model that reads every batch on the same devices, instead of a cache; a run's, or Hugging Face's",
        path=True, remote=True,
    )  # fmt: skip
    top_k: int = key(128, "tokens of each place that such a teacher names", low=1)
    random: int = key(0, "tokens drawn at random that it names besides; a cache says so itself (distill cache --random)", low=0)
    layers: float = key(
        0.0,
        "share of the loss that is how far each layer is from the teacher's, which needs a --distill-teacher",
        low=0,
        high=1,
    )
    anchor: float = key(0.0, "weight of the divergence from the model that the run began with (--init-from)", low=0)
    renormalised: bool = key(False, "compare the cached tokens alone, and forget the rest: biased, for comparison")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text + self.hard > 1:
            raise ConfigError(f"--distill-text {self.text:g} and --distill-hard {self.hard:g} are more than all of the loss")


class Bits(NamedTuple):
    """Of a weight: its bits, and the rank of its scales (0: one for each group)."""

    bits: int
    rank: int


# Bits and rank of the feed-forward layers' weights, then of attention's.
QUANTIZED = {"q2a4": "2/32,4/8", "q4a4": "4/4,4/4", "q4_r32": "4/32,4/32", "q2a2": "2/32,2/32"}


@dataclass(frozen=True)
class QuantizeConfig(Section):
    section = "quantize"

    weights: str | None = key(
        None,
        f"train with weights of few bits: {', '.join(QUANTIZED)}, or bits/rank of the feed-forward layers and of attention, "
        "such as 2/32,4/8 (rank 0: a scale for each group; none instead of either: as it is)",
        flag="quantize",
    )
    group: int = key(32, "inputs that share a scale, where scales have no rank, and at the start where they have one", low=2)
    levels: str = key("uniform", "of the codes: in equal steps, or a table that is trained", choices=("uniform", "table"))
    magnitudes: bool = key(False, "scales of some rank as unit vectors times magnitudes, which are trained beside them")
    rest: float = key(
        0.0, "magnitudes that move less than this share in 100 steps, twice, stay there (0: none do)", low=0, high=1
    )
    trains: str = key(
        "both", "the weights that are rounded, their scales alone, or both with all else", choices=("weights", "scales", "both")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.mlp, self.attention

    @property
    def mlp(self) -> Bits | None:
        """None: as they are."""
        return self._parsed()[0]

    @property
    def attention(self) -> Bits | None:
        return self._parsed()[1]

    def _parsed(self) -> tuple[Bits | None, Bits | None]:
        if self.weights is None:
            return None, None
        parts = QUANTIZED.get(self.weights, self.weights).split(",")
        found = [re.fullmatch(r"([234])/(\d+)", part.strip()) for part in parts]
        if len(parts) != 2 or not all(match or part.strip() == "none" for match, part in zip(found, parts, strict=True)):
            raise ConfigError(
                f"--quantize {self.weights}: must be {', '.join(QUANTIZED)}, or bits (2, 3 or 4) and rank of the feed-forward "
                "layers and of attention, such as 2/32,4/8"
            )
        mlp, attention = (Bits(int(match[1]), int(match[2])) if match else None for match in found)
        if mlp is None and attention is None:
            raise ConfigError(f"--quantize {self.weights}: leaves every weight as it is; leave it out")
        return mlp, attention


@dataclass(frozen=True)
class PrecisionConfig(Section):
    section = "precision"

    weights_dtype: str = key(
        "float32",
        "how matrices and tables are kept between steps; bfloat16: half the memory, rounded by chance so that small updates "
        "add up",
        choices=("float32", "bfloat16"),
    )
    moments_dtype: str = key("float32", "how AdamW's moments of them are kept, likewise", choices=("float32", "bfloat16"))


@dataclass(frozen=True)
class TelemetryConfig(Section):
    section = "telemetry"

    wandb: str | None = key(None, "project at Weights & Biases that gets the numbers as well (none: no project)")
    wandb_mode: str = key("online", "offline: kept in the run's folder for wandb sync", choices=("online", "offline"))
    log_format: str = key("text", "json: an object a line on stdout, for machines", choices=("text", "json"))
    profile: str | None = key(
        None, "steps to profile, such as 50:55: a trace in the run's folder, and the ten most costly parts of the step"
    )
    sample_tokens: int = key(160, "length of the sample that is written at every evaluation (0: none)", low=0)
    sample_prompt: str | None = key(None, "text that samples go on from (none: they begin a new text)")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.profiled

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last of the steps to profile."""
        if self.profile is None:
            return None
        first, colon, last = self.profile.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ConfigError(f"telemetry.profile {self.profile!r}: must be the first and the last step, such as 50:55")
        return int(first), int(last)
