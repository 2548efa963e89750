"""The kinds of models that there are, by the class of their configuration. Everything outside of `model/` asks here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import Array

from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ARCHITECTURES, ArchitectureConfig, ConfigError, ModelConfig, RunConfig, Section
from nash_mhc.model import activations as counted
from nash_mhc.model import traced_memory
from nash_mhc.model.lm import LM, flops_per_token
from nash_mhc.model.lora import adapted
from nash_mhc.model.protocol import Activations, Architecture, AttentionShape, Execution

_KNOWN: dict[type[ArchitectureConfig], Architecture] = {}
_OF_KITS: Registry[Architecture] = Registry("architectures", {})
# By a kit's section: (model, section) -> the model with weight modules in the places of arrays.
WEIGHTS: Registry[Callable[[Any, Section], Any]] = Registry("weights", {})


def register(config: type[ArchitectureConfig], architecture: Architecture) -> None:
    """Makes a kind of model known under `config.architecture`; a run's folder holds no more of it than that name."""
    ARCHITECTURES[config.architecture] = config
    _KNOWN[config] = architecture


def architecture_of(cfg: ArchitectureConfig) -> Architecture:
    kind = type(cfg)
    return _KNOWN[kind] if kind in _KNOWN else _OF_KITS[kind.architecture]


def _activations(cfg: ModelConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Return the bytes of a batch: counted for the blocks of the package, traced for registered ones."""
    ours = {(kind.mixer, kind.ffn) for kind in cfg.group} <= {("attention", "swiglu"), ("multiscale", "swiglu")}
    count = counted.activations if ours and cfg.pattern is None else traced_memory.activations
    return count(cfg, execution, rows, seq_len, tp)


register(
    ModelConfig,
    Architecture(
        init=LM.init,
        flops_per_token=flops_per_token,
        empty_cache=LM.empty_cache,
        decode=LM.decode,
        attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window),
        activations=_activations,
        penalties=lambda run: {"sparsity": run.optim.sparsity},
    ),
)


def abstract_model(cfg: ArchitectureConfig) -> Any:
    """The model's tree with shapes for arrays."""
    return _abstract_model(cfg, architecture_of(cfg))


@functools.lru_cache(64)
def _abstract_model(cfg: ArchitectureConfig, architecture: Architecture) -> Any:
    return jax.eval_shape(lambda: architecture.init(cfg, key=jax.random.key(0)))


def as_trained(cfg: RunConfig, model: Any, key: Array) -> Any:
    """Return the model with the weight modules of kits and with adapters, where the run asks for them."""
    return adapted(with_weight_modules(model, cfg.of_kits), cfg.lora, key)


def with_weight_modules(model: Any, sections: Iterable[Section]) -> Any:
    for section in sections:
        if section.section in WEIGHTS:
            model = WEIGHTS[section.section](model, section)
    return model


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
