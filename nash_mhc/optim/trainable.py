"""What of a model is trained: gradients, moments, averages and clipping know nothing of the rest,
which stays as it is."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.optim.optimizers import make_optimizer
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.parallel.params import ADAPTER, map_declared, named_leaves


class Training(NamedTuple):
    """How a model is trained, as far as the state's shape and the compiled program depend on it."""

    optimizer: str = "adamw"
    freeze: str | None = None  # patterns, with commas between them
    train_only: str | None = None
    adapters: bool = False  # nothing else

    @staticmethod
    def of(cfg: RunConfig) -> Training:
        return Training(cfg.optim.optimizer, cfg.optim.freeze, cfg.optim.train_only, adapters=cfg.lora.rank > 0)

    def split(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """(the trained part, the frozen part): the same model twice, with None for what is in the other one.

        ConfigError for a pattern that fits no parameter, and where nothing is left to train.
        """
        if self.freeze is None and self.train_only is None and not self.adapters:
            return model, jax.tree.map(lambda _: None, model)
        names = list(named_leaves(model))
        if self.adapters:
            names = list(named_leaves(map_declared(model, lambda declared, _: declared.role == ADAPTER or None)))
        only = _matching(names, self.train_only, "--train-only") if self.train_only is not None else set(names)
        trained = only - (_matching(names, self.freeze, "--freeze") if self.freeze is not None else set())
        if not trained:
            raise ConfigError("--freeze and --train-only leave no parameter to train; freeze fewer")
        mask = jax.tree.unflatten(jax.tree.structure(model), [name in trained for name in named_leaves(model)])
        return eqx.partition(model, mask)

    def make_optimizer(self, h: Hyperparameters, trained: PyTree) -> optax.GradientTransformation:
        return make_optimizer(h, trained, self.optimizer)


def _matching(names: list[str], patterns: str, flag: str) -> set[str]:
    """A pattern is a name as in parameters.txt, the beginning of one up to a dot, or has * for any characters."""
    found: set[str] = set()
    for pattern in (p.strip() for p in patterns.split(",")):
        fits = [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not fits:
            parts = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
            beginnings = ", ".join(sorted(part for part in parts if "." not in part))
            remedy = did_you_mean(pattern, sorted(parts)) or f"; names begin with {beginnings}"
            raise ConfigError(f"{flag} {pattern}: no parameter is named so (a run's parameters.txt lists them){remedy}")
        found.update(fits)
    return found
