"""Keys of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nash_mhc.config.fields import ConfigError, Section, key


@dataclass(frozen=True)
class DistillConfig(Section):
    section, prefixed, of_objective = "distill", True, "distill"
    about = "distillation from a cached or online teacher (--objective distill)"

    temperature: float = key(
        1.0, "softmax temperature; with a cache, one that it was made for (`distill cache --temperatures`)", above=0
    )
    text: float = key(0.0, "weight of the cross-entropy with the data's next token, as a fraction of the loss", low=0, high=1)
    hard: float = key(
        0.0, "weight of the cross-entropy with the teacher's most likely token, as a fraction of the loss", low=0, high=1
    )
    teacher: str | None = key(
        None, "run directory or Hugging Face folder of an online teacher, which runs on every batch and replaces the cache",
        path=True, remote=True, model_folder=True,
    )  # fmt: skip
    top_k: int = key(128, "top logits to use per position of an online teacher (K)", low=1)
    random: int = key(
        0, "random tokens to use per position, in addition to the top K (for a cache: distill cache --random)", low=0
    )
    layers: float = key(
        0.0,
        "weight of the distance between layer outputs of student and teacher, as a fraction of the loss; needs "
        "--distill-teacher",
        low=0,
        high=1,
    )
    anchor: float = key(0.0, "weight of the divergence from the initial model (--init-from)", low=0)
    renormalised: bool = key(False, "softmax over only the cached tokens, which is biased (for comparison)")

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
