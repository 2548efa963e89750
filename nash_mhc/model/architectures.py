"""The kinds of models that there are, by the class of their configuration. Everything outside of `model/` asks here."""

from __future__ import annotations

import functools
from typing import Any

import jax

from nash_mhc.config.schema import ARCHITECTURES, ArchitectureConfig, ConfigError, ModelConfig, RecursiveConfig, ReservoirConfig
from nash_mhc.model import (
    incremental,
    recursive,
    recursive_activations,
    reservoir,
    reservoir_activations,
    reservoir_memory,
    reservoir_ridge,
)
from nash_mhc.model.activations import activations
from nash_mhc.model.lm import LM, flops_per_token
from nash_mhc.model.protocol import Architecture, AttentionShape

_KNOWN: dict[type[ArchitectureConfig], Architecture] = {}


def register(config: type[ArchitectureConfig], architecture: Architecture) -> None:
    """Makes a kind of model known under `config.architecture`; a run's folder holds no more of it than that name."""
    ARCHITECTURES[config.architecture] = config
    _KNOWN[config] = architecture


def architecture_of(cfg: ArchitectureConfig) -> Architecture:
    return _KNOWN[type(cfg)]


register(
    ModelConfig,
    Architecture(
        init=LM.init,
        flops_per_token=flops_per_token,
        empty_cache=incremental.empty_cache,
        decode=incremental.step,
        attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window),
        activations=activations,
    ),
)


register(
    ReservoirConfig,
    Architecture(
        init=reservoir.Reservoir.init,
        flops_per_token=reservoir.flops_per_token,
        empty_cache=reservoir.empty_state,
        decode=reservoir.decode,
        attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window) if cfg.attention_every else None,
        activations=reservoir_activations.activations,
        drawn=reservoir.drawn,
        remembers=reservoir_memory.as_dict,
        warm_start=reservoir_ridge.warm_start,
    ),
)

register(
    RecursiveConfig,
    Architecture(
        init=recursive.Recursive.init,
        flops_per_token=recursive.flops_per_token,
        empty_cache=recursive.empty_cache,
        decode=recursive.decode,
        attention=lambda cfg: AttentionShape(cfg.head_dim, None) if cfg.mixer == "attention" and cfg.causal else None,
        activations=recursive_activations.activations,
        gathers_once=True,
        drawn=recursive.drawn,
    ),
)


def abstract_model(cfg: ArchitectureConfig) -> Any:
    """The model's tree with shapes for arrays."""
    return _abstract_model(cfg, architecture_of(cfg))


@functools.lru_cache(64)
def _abstract_model(cfg: ArchitectureConfig, architecture: Architecture) -> Any:
    return jax.eval_shape(lambda: architecture.init(cfg, key=jax.random.key(0)))


def check_drawn(cfg: ArchitectureConfig, before: dict[str, Any] | None, where: str) -> None:
    """ConfigError where the seed gives other numbers here than those that a run was trained with."""
    now = architecture_of(cfg).drawn(cfg)
    if now is not None and before is not None and before.get("digest") != now.digest:
        raise ConfigError(
            f"{where}: what its model has drawn from seed {now.seed} comes out otherwise here, and its weights fit nothing "
            "else; use the version of jax that run.json names"
        )


def count_parameters(cfg: ArchitectureConfig) -> int:
    """Exact number of parameters, padding of the vocabulary included."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(cfg)))
