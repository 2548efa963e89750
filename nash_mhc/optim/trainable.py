"""Which parameters are trained, and how: gradients, moments, averages and clipping only see those."""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, RunConfig, Section
from nash_mhc.optim import adamw, normuon
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import OPTIMIZERS, is_plain_adamw, make_optimizer
from nash_mhc.optim.rounding import Salt, map_with_index, round_to, salt_of, to_float32
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.parallel.params import ADAPTER, STATE, Declared, map_declared, named_leaves


class Training(NamedTuple):
    """The settings of training that determine the state's shapes and the compiled step."""

    optimizer: str = "adamw"
    freeze: str | None = None  # comma-separated patterns
    train_only: str | None = None  # comma-separated patterns
    adapters: bool = False  # train only LoRA adapters
    sections: tuple[Section, ...] = ()  # of kits, which may freeze parameters by role
    weights: str = "float32"  # dtype of large weights in the state
    moments: str = "float32"  # dtype of large moments in the state
    compute: str = "float32"  # dtype of the products of normuon

    @staticmethod
    def of(cfg: RunConfig) -> Training:
        optim, precision = cfg.optim, cfg.precision
        return Training(
            optim.optimizer, optim.freeze, optim.train_only, cfg.lora.rank > 0, cfg.of_kits,
            precision.weights_dtype, precision.moments_dtype, "bfloat16" if cfg.train.dtype == "bfloat16" else "float32",
        )  # fmt: skip

    def split(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """Return (trained, frozen): the same model twice, with None in place of the other part's parameters.

        Raise ConfigError for a pattern that matches no parameter, or if no parameter is left to train.
        """
        names = list(named_leaves(map_declared(model, lambda declared, _: self._trains(declared) or None)))
        if self.freeze is None and self.train_only is None and len(names) == len(named_leaves(model)):
            return model, jax.tree.map(lambda _: None, model)
        only = _matching(names, self.train_only, "--train-only") if self.train_only is not None else set(names)
        trained = only - (_matching(names, self.freeze, "--freeze") if self.freeze is not None else set())
        if not trained:
            raise ConfigError("--freeze and --train-only leave no parameter to train; freeze fewer parameters")
        mask = jax.tree.unflatten(jax.tree.structure(model), [name in trained for name in named_leaves(model)])
        return eqx.partition(model, mask)

    def _trains(self, declared: Declared) -> bool:
        """Return whether parameters of this role are trained."""
        if self.adapters:
            return declared.role == ADAPTER
        return declared.role != STATE and all(section.trains_role(declared.role.name) for section in self.sections)

    def cast_weights(self, model: PyTree) -> PyTree:
        """Return the model with large weights in the dtype of the state."""
        if self.weights == "float32":  # without casting the base of adapters, which may be smaller
            return model
        return map_declared(model, lambda declared, w: w.astype(self.weights) if declared.is_large else w)

    def make_optimizer(self, h: Hyperparameters, trained: PyTree) -> optax.GradientTransformation:
        return make_optimizer(h, trained, self.optimizer)

    def begin(self, h: Hyperparameters, model: PyTree, *, averaged: bool) -> tuple[PyTree, PyTree, PyTree]:
        """Return the model, the optimizer state and the averaged weights (or None) before the first step."""
        if self.moments != "float32" and not (self.is_adamw or self.is_normuon):
            raise ConfigError(
                f"--moments-dtype {self.moments} needs --optimizer adamw or normuon, not {self.optimizer}; leave out "
                "--moments-dtype or change --optimizer"
            )
        model = self.cast_weights(model)
        trained, _ = self.split(model)
        # A copy, because leaves that share a buffer cannot be donated. bfloat16 is too coarse for averages.
        ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), trained) if averaged else None
        return model, self.init_optimizer(h, trained), ema

    def init_optimizer(self, h: Hyperparameters, trained: PyTree) -> PyTree:
        """Return the optimizer's state before the first step."""
        if self.is_normuon:
            return normuon.init(trained, self.moments)
        state = self.make_optimizer(h, trained).init(jax.tree.map(to_float32, trained))
        return adamw.cast_moments(state, self.moments)

    def per_moment(self, h: Hyperparameters, trained: PyTree, state: PyTree, like: PyTree, other: Any) -> PyTree:
        """Return the optimizer's state with each moment replaced by its parameter's value in `like`.

        Arrays that do not have the shape of a parameter become `other`. `trained` and `state` are trees of shapes.
        """
        if self.is_normuon:
            of_leaf = lambda x, p, value: value if x.shape == p.shape else other
            return normuon.State(other, like, jax.tree.map(of_leaf, state.nu, trained, like))
        is_masked = lambda x: isinstance(x, optax.MaskedNode)  # a leaf that another part of a partitioned optimizer updates
        return optax.tree_utils.tree_map_params(
            self.make_optimizer(h, trained), lambda x, s: x if is_masked(x) else s,
            state, like, transform_non_params=lambda _: other, is_leaf=is_masked,
        )  # fmt: skip

    @property
    def is_adamw(self) -> bool:
        """Whether the optimizer is our AdamW, not one that was registered under its name."""
        return self.optimizer == "adamw" and is_plain_adamw()

    @property
    def is_normuon(self) -> bool:
        """Whether the optimizer is our NorMuon, not one that was registered under its name."""
        return self.optimizer == "normuon" and "normuon" not in OPTIMIZERS

    def update(
        self, h: Hyperparameters, trained: PyTree, gradients: Gradients, opt_state: PyTree, good: Bool[Array, ""], salt: Salt
    ) -> adamw.Updated:
        """Return weights and optimizer state after a step; if it is not `good`, they stay the same."""
        if self.is_adamw:
            return adamw.update(h, trained, gradients, opt_state, good, salt)
        if self.is_normuon:
            return normuon.update(h, trained, gradients, opt_state, good, salt, jnp.dtype(self.compute))
        optimizer, params = self.make_optimizer(h, trained), jax.tree.map(to_float32, trained)
        updates, new_state = optimizer.update(gradients.scaled(), opt_state, params)
        # Selected elementwise while the update is written anyway: no branch, no synchronization with the host.
        select = lambda new, old: jnp.where(good, new, old)
        add = lambda index, p, u: select(round_to(to_float32(p) + u, p.dtype, lambda: salt_of(salt, index)), p)
        state = jax.tree.map(select, new_state, opt_state)
        return adamw.Updated(map_with_index(add, trained, updates), state, optax.tree.norm(updates))


def _matching(names: list[str], patterns: str, flag: str) -> set[str]:
    """Return the names that match a pattern: a name, the beginning of a name up to a dot, or a glob with *."""
    found: set[str] = set()
    for pattern in (p.strip() for p in patterns.split(",")):
        fits = [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not fits:
            parts = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
            modules = ", ".join(sorted(part for part in parts if "." not in part))
            remedy = did_you_mean(pattern, sorted(parts)) or f"; names begin with {modules}"
            raise ConfigError(f"{flag} {pattern}: matches no parameter (a run's parameters.txt lists them){remedy}")
        found.update(fits)
    return found
