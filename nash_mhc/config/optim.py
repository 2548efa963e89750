"""The section of the optimizer. No jax, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, key

# Parameter groups of `normuon` and the default multipliers of their learning rates. A model that uses one table as
# embedding and head has the group `tied`. docs/experiments.md compares the factors.
RATE_FACTORS = {
    "matrix": 9.5, "embedding": 9.0, "tied": 3.0, "value": 76.0, "head": 0.5, "gate": 0.25, "vector": 4.0, "adapter": 1.0,
}  # fmt: skip


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True)
class OptimConfig(Section):
    section = "optim"

    learning_rate: float = key(
        1.2e-3,
        "peak learning rate of weight matrices at the reference width 640; scaled for other widths and parameter types",
        above=0,
    )
    min_lr_ratio: float = key(0.05, "final learning rate as a fraction of the peak", low=0, high=1)
    warmup_steps: int = key(25, "steps of linear warm-up", low=0)
    optimizer: str = key(
        "adamw",
        "optimizer: adamw, normuon or muon (for matrices; AdamW for the rest), or a registered one",
        seam="optimizers",
    )
    freeze: str | None = key(
        None, "parameters not to train: comma-separated names from parameters.txt, or prefixes of them; * matches anything"
    )
    train_only: str | None = key(None, "parameters to train, written as for --freeze; all others are frozen")
    rate_factors: str | None = key(
        None,
        "learning-rate multipliers of normuon's parameter groups, such as embedding=2,head=1; groups: "
        + ", ".join(RATE_FACTORS),
        further="tuning",
    )
    schedule: str = key("cosine", "learning rate schedule after the warm-up", choices=("cosine", "wsd", "constant"))
    decay_fraction: float = key(0.2, "fraction of the steps, at the end of the run, in which wsd decays", low=0, high=1)
    weight_decay: float = key(0.1, "weight decay of matrices; normuon multiplies it by 2.8, or by less in long runs", low=0)
    b1: float = key(0.9, "decay of AdamW's first moment", low=0, high=1)
    b2: float = key(0.95, "decay of AdamW's second moment", low=0, high=1)
    eps: float = key(1e-8, "epsilon of AdamW", above=0)
    max_grad_norm: float = key(1.0, "clip gradients to this global norm (0: no clipping; normuon never clips)", low=0)
    z_loss: float = key(0.0, "weight of the squared log-partition term in the loss", low=0)
    sparsity: float = key(0.0, "weight of the entropy penalty on the mixing weights of the attention scales", low=0)
    ema_decay: float = key(0.0, "decay of the averaged weights (0: no averaging)", low=0, high=0.999999)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_factors is not None and self.optimizer != "normuon":
            raise ConfigError(f"--rate-factors works only with --optimizer normuon, not {self.optimizer}; leave it out")
        self.group_rates  # noqa: B018  checks the text

    @property
    def group_rates(self) -> dict[str, float]:
        """Return each group's factor on the learning rate under normuon."""
        factors = dict(RATE_FACTORS)
        for entry in (self.rate_factors or "").split(",") if self.rate_factors else ():
            group, _, factor = entry.strip().partition("=")
            if group not in factors or not _is_positive(factor):
                raise ConfigError(
                    f"optim.rate_factors {self.rate_factors!r}: {entry.strip()!r} is not GROUP=FACTOR with a positive "
                    f"factor; the groups are {', '.join(factors)}"
                )
            factors[group] = float(factor)
        return factors
