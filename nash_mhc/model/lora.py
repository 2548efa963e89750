"""LoRA: a trainable low-rank update of a frozen weight (arXiv 2106.09685; rank-stabilized scaling: 2312.03732).

    y = x W + factor * dropout(x) A B

An adapter is a `Weight` module that replaces the weight it updates. It works wherever `project` is used: on every mesh,
in training and in decoding. B is initially zero, so the model is unchanged at first.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from nash_mhc.config.commands import name_hint
from nash_mhc.config.schema import ConfigError, LoraConfig
from nash_mhc.model.weights import GROUPS, PROJECTIONS, Weight, array_of, project
from nash_mhc.parallel.params import ADAPTER, MATRIX, Declared, map_declared, named_leaves, param


class Lora(Weight):
    base: Any = param("inputs", "outputs")
    lora_a: Array = param("inputs", "rank", role=ADAPTER)
    lora_b: Array = param("rank", "outputs", role=ADAPTER)
    key_2: UInt32[Array, "..."] | None = param("vector", default=None)  # of dropout; set only within a training step
    inputs: int = eqx.field(static=True, default=1)  # number of input axes
    factor: float = eqx.field(static=True, default=1.0)
    dropout: float = eqx.field(static=True, default=0.0)

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the stack axes: () for one layer's adapter."""
        return self.lora_a.shape[: -self.inputs - 1]

    def array(self) -> Array:
        return array_of(self.base) + self.factor * jnp.tensordot(self.lora_a, self.lora_b, axes=1)

    def project(self, x: Array, equation: str | None) -> Array:
        sides = (tuple(range(x.ndim - self.inputs, x.ndim)), tuple(range(self.inputs)))
        narrow = jnp.tensordot(self._dropped(x), self.lora_a, axes=sides)
        return project(x, self.base, equation) + self.factor * jnp.tensordot(narrow, self.lora_b, axes=1)

    def _dropped(self, x: Array) -> Array:
        if self.key_2 is None or not self.dropout:
            return x
        # 16 random bits resolve the dropout rate to 1e-5 and cost half of 32.
        bits = jax.random.bits(jax.random.wrap_key_data(self.key_2), x.shape, jnp.uint16)
        is_kept = bits >= jnp.uint16(round(self.dropout * 2**16))
        return jnp.where(is_kept, x / (1 - self.dropout), jnp.zeros_like(x))


def _is_lora(x: Any) -> bool:
    return isinstance(x, Lora)


def alpha_of(cfg: LoraConfig) -> float:
    return 2.0 * cfg.rank if cfg.alpha is None else cfg.alpha


def scaling_of(cfg: LoraConfig) -> float:
    """Return the LoRA scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
    return alpha_of(cfg) / (math.sqrt(cfg.rank) if cfg.rslora else cfg.rank)


def targets(model: Any, wanted: str) -> set[str]:
    """Return the names of the parameters that get an adapter. Raise ConfigError for a target that matches none."""
    names = list(named_leaves(map_declared(model, lambda declared, leaf: leaf if _is_projection(declared) else None)))
    chosen: set[str] = set()
    for word in (word.strip() for word in wanted.split(",")):
        ends = [PROJECTIONS[name] for name in GROUPS.get(word, [word]) if name in PROJECTIONS]
        matches = [
            name
            for name in names
            if name.rpartition(".")[2] in ends or fnmatch.fnmatchcase(name, word) or name.startswith(f"{word}.")
        ]
        if not matches:
            known = name_hint(word, [*GROUPS, *PROJECTIONS])
            raise ConfigError(f"--lora-targets {word} matches no matrix (a run's parameters.txt lists them all){known}")
        chosen.update(matches)
    return chosen


def _is_projection(declared: Declared) -> bool:
    return declared.role == MATRIX and declared.is_matrix


def adapted(model: Any, cfg: LoraConfig, key: Array) -> Any:
    """Return the model with new adapters, and its frozen weights in `--lora-base-dtype`."""
    if not cfg.rank:
        return model
    chosen = targets(model, cfg.targets)
    names, number = iter(named_leaves(model)), 0

    def replace(declared: Declared, array: Any) -> Any:
        nonlocal number
        name = next(names)
        # Large weights are rounded to the compute dtype before use anyway, so storing them in bfloat16 loses nothing.
        base = array.astype(cfg.base_dtype) if declared.is_large else array
        if name not in chosen:
            return base
        number += 1
        stack, inputs, outputs = declared.split(array.shape)
        bound = 1 / math.sqrt(math.prod(inputs))
        a = jax.random.uniform(jax.random.fold_in(key, number), (*stack, *inputs, cfg.rank), minval=-bound, maxval=bound)
        b = jnp.zeros((*stack, cfg.rank, *outputs))
        return Lora(base, a, b, inputs=declared.inputs, factor=scaling_of(cfg), dropout=cfg.dropout)

    return map_declared(model, replace)


def base_of(model: Any) -> Any:
    """Return the model without its adapters."""
    return _each(model, lambda lora: lora.base)


def adapters_of(model: Any) -> Any:
    """Return only the adapters, with None in place of all other leaves."""
    return map_declared(model, lambda declared, leaf: leaf if declared.role == ADAPTER else None)


def on_base(adapters: Any, base: Any) -> Any:
    """Combine the result of `adapters_of` with the weights of a base model."""
    put = lambda x, weight: dataclasses.replace(x, base=weight) if _is_lora(x) else weight
    return jax.tree.map(put, adapters, base, is_leaf=lambda x: _is_lora(x) or x is None)


def merged(model: Any) -> Any:
    """Return the model with adapters merged into plain arrays, in float32."""
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), model)
    with jax.default_matmul_precision("highest"):
        return _each(wide, _stacked_array)


def _stacked_array(lora: Lora) -> Array:
    array = Lora.array
    for _ in lora.stack:
        array = jax.vmap(array)
    return array(lora)


def has_dropout(model: Any) -> bool:
    """Return whether the model has dropout."""
    return any(_is_lora(x) and x.dropout for x in jax.tree.leaves(model, is_leaf=_is_lora))


def with_dropout(model: Any, key: Array) -> Any:
    """Seed the dropout of one training step, separately for every adapter and layer."""
    number = 0

    def seed(lora: Lora) -> Lora:
        nonlocal number
        number += 1
        own = jax.random.fold_in(key, number)
        data = jax.random.key_data(jax.random.split(own, lora.stack) if lora.stack else own)
        return dataclasses.replace(lora, key_2=data)

    return _each(model, seed)


def _each(model: Any, change: Callable[[Lora], Any]) -> Any:
    return jax.tree.map(lambda x: change(x) if _is_lora(x) else x, model, is_leaf=_is_lora)
