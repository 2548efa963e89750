"""What of a model is trained: gradients, moments, averages and clipping know nothing of the rest,
which stays as it is."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, RunConfig, Section
from nash_mhc.optim import adamw
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import is_plain_adamw, make_optimizer
from nash_mhc.optim.rounding import Salt, map_numbered, salt_of, stored, wide
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.parallel.params import ADAPTER, STATE, Declared, map_declared, named_leaves


class Training(NamedTuple):
    """How a model is trained, as far as the state's shape and the compiled program depend on it."""

    optimizer: str = "adamw"
    freeze: str | None = None  # patterns, with commas between them
    train_only: str | None = None
    adapters: bool = False  # nothing else
    sections: tuple[Section, ...] = ()  # of kits, which may freeze parameters by their role
    weights: str = "float32"  # how they are kept from step to step, the large ones
    moments: str = "float32"

    @staticmethod
    def of(cfg: RunConfig) -> Training:
        optim, kept = cfg.optim, cfg.precision
        adapters = cfg.lora.rank > 0
        what = (
            optim.optimizer,
            optim.freeze,
            optim.train_only,
            adapters,
            cfg.of_kits,
        )
        return Training(*what, kept.weights_dtype, kept.moments_dtype)

    def split(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """(the trained part, the frozen part): the same model twice, with None for what is in the other one.

        ConfigError for a pattern that fits no parameter, and where nothing is left to train.
        """
        names = list(named_leaves(map_declared(model, lambda declared, _: self._trains(declared) or None)))
        if self.freeze is None and self.train_only is None and len(names) == len(named_leaves(model)):
            return model, jax.tree.map(lambda _: None, model)
        only = _matching(names, self.train_only, "--train-only") if self.train_only is not None else set(names)
        trained = only - (_matching(names, self.freeze, "--freeze") if self.freeze is not None else set())
        if not trained:
            raise ConfigError("--freeze and --train-only leave no parameter to train; freeze fewer")
        mask = jax.tree.unflatten(jax.tree.structure(model), [name in trained for name in named_leaves(model)])
        return eqx.partition(model, mask)

    def _trains(self, declared: Declared) -> bool:
        """Whether parameters of this role are trained."""
        if self.adapters:
            return declared.role == ADAPTER
        return declared.role != STATE and all(section.trains_role(declared.role.name) for section in self.sections)

    def kept(self, model: PyTree) -> PyTree:
        """The model as it is kept from step to step."""
        if self.weights == "float32":  # what is smaller already (a base of adapters) stays so
            return model
        return map_declared(model, lambda declared, w: w.astype(self.weights) if declared.is_large else w)

    def make_optimizer(self, h: Hyperparameters, trained: PyTree) -> optax.GradientTransformation:
        return make_optimizer(h, trained, self.optimizer)

    def fresh_state(self, h: Hyperparameters, trained: PyTree) -> PyTree:
        """The optimizer's, before the first step. ConfigError for moments that are not AdamW's own."""
        if self.moments != "float32" and not self.is_adamw:
            raise ConfigError(f"--moments-dtype {self.moments}: adamw alone can; leave it out, or --optimizer {self.optimizer}")
        state = self.make_optimizer(h, trained).init(jax.tree.map(wide, trained))
        return adamw.with_smaller_moments(state, trained, self.moments)

    def begin(self, h: Hyperparameters, model: PyTree, *, averaged: bool) -> tuple[PyTree, PyTree, PyTree]:
        """Return the stored model, the optimizer's state and the averaged weights (or None) before the first step."""
        model = self.kept(model)
        trained, _ = self.split(model)
        # A copy: a state whose leaves share a buffer cannot be donated. bfloat16 is too coarse to average in.
        ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), trained) if averaged else None
        return model, self.fresh_state(h, trained), ema

    @property
    def is_adamw(self) -> bool:
        """Our own, and nothing that was registered under its name."""
        return self.optimizer == "adamw" and is_plain_adamw()

    def update(
        self, h: Hyperparameters, trained: PyTree, gradients: Gradients, opt_state: PyTree, good: Bool[Array, ""], salt: Salt
    ) -> adamw.Updated:
        """Weights and state after a step; where it is not a good one, as they were."""
        if self.is_adamw:
            return adamw.update(h, trained, gradients, opt_state, good, salt)
        optimizer, whole = self.make_optimizer(h, trained), jax.tree.map(wide, trained)
        updates, new_state = optimizer.update(gradients.scaled(), opt_state, whole)
        # Chosen element by element, where the update is written anyway: no branch, no word to the host.
        chosen = lambda new, old: jnp.where(good, new, old)
        add = lambda number, p, u: chosen(stored(wide(p) + u, p.dtype, lambda: salt_of(salt, number)), p)
        changed = jax.tree.map(chosen, new_state, opt_state)
        return adamw.Updated(map_numbered(add, trained, updates), changed, optax.tree.norm(updates))


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
