"""The registered model architectures, by the class of their configuration, and settings that depend on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import Array

from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ARCHITECTURES, ArchitectureConfig, ConfigError, LoraConfig, ModelConfig, RunConfig, Section
from nash_mhc.model import traced_memory
from nash_mhc.model.lm import LM, flops_per_token
from nash_mhc.model.lora import adapted
from nash_mhc.model.protocol import Architecture, AttentionShape
from nash_mhc.ops.attend import best_kernel, unsupported_reason

_KNOWN: dict[type[ArchitectureConfig], Architecture] = {}
_OF_KITS: Registry[Architecture] = Registry("architectures", {})
# By a kit's section: (model, section) -> the model with weight modules in the places of arrays.
WEIGHTS: Registry[Callable[[Any, Section], Any]] = Registry("weights", {})

_MOST_UNROLLED = 16  # layers up to which `--unroll auto` unrolls


def register(config: type[ArchitectureConfig], architecture: Architecture) -> None:
    """Register a model under `config.architecture`, the name that run directories store."""
    ARCHITECTURES[config.architecture] = config
    _KNOWN[config] = architecture


def architecture_of(cfg: ArchitectureConfig) -> Architecture:
    kind = type(cfg)
    return _KNOWN[kind] if kind in _KNOWN else _OF_KITS[kind.architecture]


register(
    ModelConfig,
    Architecture(
        init=LM.init,
        flops_per_token=flops_per_token,
        empty_cache=LM.empty_cache,
        decode=LM.decode,
        attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window),
        activations=traced_memory.activations,
        auxiliary_weights=lambda run: {"sparsity": run.optim.sparsity},
    ),
)


def abstract_model(cfg: ArchitectureConfig) -> Any:
    """Return the model with shapes instead of arrays."""
    return _abstract_model(cfg, architecture_of(cfg))


@functools.lru_cache(64)
def _abstract_model(cfg: ArchitectureConfig, architecture: Architecture) -> Any:
    return jax.eval_shape(lambda: architecture.init(cfg, key=jax.random.key(0)))


def as_trained(model: Any, sections: Iterable[Section], lora: LoraConfig, key: Array) -> Any:
    """Return the model with the weight modules of a run's kits and its adapters."""
    return adapted(with_weight_modules(model, sections), lora, key)


def with_weight_modules(model: Any, sections: Iterable[Section]) -> Any:
    for section in sections:
        if section.section in WEIGHTS:
            model = WEIGHTS[section.section](model, section)
    return model


def check_random_weights(cfg: ArchitectureConfig, before: dict[str, Any] | None, where: str) -> None:
    """Raise ConfigError if the frozen random weights differ on this machine from those of training."""
    now = architecture_of(cfg).random_weights(cfg)
    if now is not None and before is not None and before.get("digest") != now.digest:
        raise ConfigError(
            f"{where}: the frozen random weights of seed {now.seed} differ on this machine from those of training; "
            "use the version of jax that run.json names"
        )


def count_parameters(cfg: ArchitectureConfig) -> int:
    """Return the number of parameters, including padding of the vocabulary."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(cfg)))


def for_platform(cfg: RunConfig, platform: str) -> RunConfig:
    """Resolve the settings that are `auto`. Raise ConfigError for an attention kernel that cannot run there."""
    dtype = cfg.train.dtype if cfg.train.dtype != "auto" else ("float32" if platform == "cpu" else "bfloat16")
    attention = _attention_kernel(cfg.model, cfg.train.attention, platform, dtype, cfg.data.seq_len)
    unroll = cfg.train.unroll
    if unroll == "auto":  # not with several devices (not measured) or many layers (minutes to compile)
        one_gpu = platform == "gpu" and set(cfg.mesh.axes.values()) == {1}
        unroll = "yes" if one_gpu and cfg.model.depth <= _MOST_UNROLLED else "no"
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype, attention=attention, unroll=unroll))


def _attention_kernel(model: ArchitectureConfig, kernel: str, platform: str, dtype: str, seq_len: int) -> str:
    shape = architecture_of(model).attention(model)
    if shape is None:
        return "xla"
    args = (platform, dtype, seq_len, *shape)
    if kernel == "auto":
        return best_kernel(*args)
    if reason := unsupported_reason(kernel, *args):
        raise ConfigError(f"--attention {kernel} {reason}; use auto ({best_kernel(*args)} here)")
    return kernel
