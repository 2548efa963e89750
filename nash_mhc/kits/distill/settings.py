"""Keys of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nash_mhc.config.fields import ConfigError, Section, key


@dataclass(frozen=True)
class DistillConfig(Section):
    section, prefixed, of_objective = "distill", True, "distill"
    about = "distillation from a cached or online teacher (--objective distill)"

    temperature: float = key(1.0, "softmax temperature; a cache must have been made for it", above=0)
    text: float = key(0.0, "share of the loss that is the text's cross-entropy", low=0, high=1)
    hard: float = key(0.0, "share of the loss that is the cross-entropy of the teacher's top-1 token", low=0, high=1)
    teacher: str | None = key(
        None, "online teacher that reads every batch, instead of a cache: a run directory or Hugging Face folder",
        path=True, remote=True, model_folder=True,
    )  # fmt: skip
    top_k: int = key(128, "top-k logits that an online teacher gives per position", low=1)
    random: int = key(
        0, "random other tokens per position from an online teacher; a cache has its own (distill cache --random)", low=0
    )
    layers: float = key(
        0.0,
        "share of the loss that is the distance of the layers' outputs from the teacher's; needs --distill-teacher",
        low=0,
        high=1,
    )
    anchor: float = key(0.0, "weight of the divergence from the initial model (--init-from)", low=0)
    renormalised: bool = key(False, "softmax over the cached tokens alone: biased, for comparison")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text + self.hard > 1:
            raise ConfigError(
                f"--distill-text {self.text:g} and --distill-hard {self.hard:g} add up to more than 1; lower one of them"
            )

    def check_run(self, run: Any) -> None:
        for name in ("teacher", "layers", "anchor"):
            if getattr(self, name) and run.objective.name != "distill":
                raise ConfigError(f"--distill-{name} has no effect without --objective distill; add it")
