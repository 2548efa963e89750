"""Estimate the memory of a run per device by arithmetic: without a device or the compiler, in milliseconds per mesh.

Parameters and moments are counted from the real state and its axes, activations by the model. The other terms follow
XLA's buffer assignment (docs/planning.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax

from nash_mhc.config.schema import ArchitectureConfig, ConfigError, DataConfig, MeshConfig, RunConfig, TrainConfig
from nash_mhc.model.architectures import abstract_model, architecture_of, as_trained
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.registry import feed_of, fresh_carry_of
from nash_mhc.ops.xent import chunk_length
from nash_mhc.optim.optimizers import OPTIMIZERS
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import check_fit
from nash_mhc.parallel.sharding import GATHERED, RULES, logical_axes

_BATCH_BYTES = 16  # per token: input, target and segment as int32, weight as float32
# At the end of the forward pass, 5/8 of the gradients have buffers already; the others reuse buffers of other arrays.
_GRADIENTS_APART = 0.625
# Weights that are gathered once for all applications: the weights, and the unsharded part of their gradients at peak.
_WITH_GRADIENTS = 1.35
_UPDATE_LEAVES = 0.5  # share of the largest leaf, lost to fragmentation during the update


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one device, by purpose."""

    parameters: float
    gradients: float
    optimizer: float  # moments and averaged weights
    streams: float  # the residual state that enters each layer, and the objective's carry
    activations: float  # everything else that is saved for the backward pass
    logits: float  # a chunk of logits, and the gradient of the output projection
    collectives: float  # weights and activations gathered from several devices
    temporaries: float  # the compiler's: the working memory of a layer, and copies of the state
    teachers: float = 0.0  # frozen models that read every batch

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


class Weights(NamedTuple):
    """The arrays that a run holds throughout training, as trees of shapes."""

    model: Any
    opt_state: Any
    ema: Any  # averaged weights, or None


@dataclass(frozen=True)
class WeightsKey:
    """The settings that weights depend on, and what their names refer to: both may change in a notebook."""

    cfg: RunConfig  # all other settings have their default values
    registered: tuple[Any, ...]

    @staticmethod
    def of(cfg: RunConfig) -> WeightsKey:
        data, optim = DataConfig(seq_len=cfg.model.some_length), replace(cfg.optim, warmup_steps=0)
        weights = replace(cfg, data=data, mesh=MeshConfig(), train=TrainConfig(), optim=optim)
        return WeightsKey(weights, (architecture_of(cfg.model), OPTIMIZERS.get(cfg.optim.optimizer)))

    @property
    def hyperparameters(self) -> Hyperparameters:
        return Hyperparameters.of(self.cfg.optim, self.cfg.train)


@functools.lru_cache(64)
def abstract_weights(key: WeightsKey) -> Weights:
    """Return the model, optimizer state and averaged weights of a run as trees of shapes."""

    def begin(model: Any) -> tuple[Any, Any, Any]:
        model = as_trained(model, key.cfg.of_kits, key.cfg.lora, jax.random.key(0))
        return Training.of(key.cfg).begin(key.hyperparameters, model, averaged=bool(key.cfg.optim.ema_decay))

    return Weights(*jax.eval_shape(begin, abstract_model(key.cfg.model)))


class _Axes:
    """The logical axes of a leaf; not a pytree, so that trees can have it as a leaf."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names


class _Leaf(NamedTuple):
    part: str  # parameters, trained, optimizer
    bytes: int
    itemsize: int
    layers: int  # number of layers of a stack, else 0
    axes: tuple[str, ...]

    def on(self, mesh: Mapping[str, int], *, gathered: str | None = None) -> float:
        """Return the bytes on one device, after a gather over the mesh axis `gathered`."""
        return self.bytes / math.prod(mesh[a] for name in self.axes for a in RULES[name] if a != gathered)


@functools.lru_cache(64)
def _leaves(key: WeightsKey) -> tuple[_Leaf, ...]:
    """Return all arrays of the state."""
    state, training = abstract_weights(key), Training.of(key.cfg)
    trained, _frozen = training.split(state.model)
    is_names = lambda x: isinstance(x, tuple) and all(isinstance(name, str) for name in x)
    axes = lambda tree: jax.tree.map(_Axes, logical_axes(tree), is_leaf=is_names)
    moments = training.per_moment(key.hyperparameters, trained, state.opt_state, axes(trained), _Axes(()))

    def leaves(part: str, tree: Any, its_axes: Any) -> list[_Leaf]:
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(its_axes), strict=True)
        return [
            _Leaf(part, x.size * x.dtype.itemsize, x.dtype.itemsize, x.shape[0] if "layers" in a.names else 0, a.names)
            for x, a in pairs
        ]

    found = leaves("parameters", state.model, axes(state.model)) + leaves("trained", trained, axes(trained))
    found += leaves("optimizer", state.opt_state, moments)
    return tuple(found + (leaves("optimizer", state.ema, axes(trained)) if state.ema is not None else []))


def estimate(cfg: RunConfig, mesh: Mapping[str, int]) -> Memory:
    """Estimate the memory of a configuration with resolved dtype, kernel and unrolling on a mesh of this shape.

    Raise ConfigError if the mesh does not divide it, or its model has no estimate.
    """
    check_fit(cfg.data, cfg.model, mesh, resizable=cfg.resizable)
    for model in feed_of(cfg.objective.name).models(cfg):
        try:
            check_fit(cfg.data, model, mesh, resizable=())
        except ConfigError as error:
            raise ConfigError(f"the teacher: {error}") from None
    activations = architecture_of(cfg.model).activations
    if activations is None:
        raise ConfigError(
            f"--model-kind {cfg.model.architecture} has no memory estimate; define `activations` in its Architecture"
        )
    leaves = _leaves(WeightsKey.of(cfg))
    local = lambda part: sum((leaf.on(mesh) for leaf in leaves if leaf.part == part), 0.0)
    parameters, gradients, optimizer = local("parameters"), local("trained"), local("optimizer")
    shards = math.prod(mesh[a] for a in RULES["batch"])
    sequences, itemsize = cfg.data.batch_size // shards, compute_itemsize(cfg.train.dtype)
    tp = math.prod(mesh[a] for a in RULES["time_split"])
    execution = Execution(cfg.train.dtype, cfg.train.kept, cfg.train.attention)
    layers = activations(cfg.model, execution, sequences, cfg.data.seq_len, tp)
    chunk, table = _loss(cfg.model, cfg.data.seq_len, sequences, itemsize, mesh)
    gathered = _gathered(cfg.model, itemsize, mesh, leaves) + layers.gathered
    batch = _BATCH_BYTES * cfg.train.grad_accum * sequences * cfg.data.seq_len
    # The peak is at one of three moments: the end of the forward pass, while the loss works on the last chunk or the
    # last layer has just finished; the start of the backward pass; the update.
    saved = layers.streams + layers.saved + (gradients if cfg.train.grad_accum > 1 else 0.0)
    forward = saved + _GRADIENTS_APART * gradients + table + gathered + max(layers.forward, chunk)
    backward = saved + gradients + table / 2 + gathered + layers.backward
    # Updates stay until their norm is known. For bfloat16 weights, only a part as large as the weights does.
    update = 2 * gradients + _UPDATE_LEAVES * max(leaf.on(mesh) for leaf in leaves if leaf.part == "trained")
    peak = max(forward, backward, update)
    of_forward = table + (chunk if chunk > layers.forward else 0)
    of_layers = (layers.streams, layers.saved, table / 2 if peak == backward else of_forward, gathered)
    if peak == update:  # the layers are done by then
        of_layers = (0.0, 0.0, 0.0, 0.0)
    named = Memory(parameters, gradients, optimizer, *of_layers, 0.0)
    # The state is an argument, the rest is allocated by the compiler; gradients may reuse other buffers.
    rest = parameters + optimizer + peak - named.total
    carry_leaves = jax.tree.leaves(jax.eval_shape(lambda: fresh_carry_of(cfg)))
    carry = sum(leaf.size * leaf.dtype.itemsize for leaf in carry_leaves) / shards
    held = replace(
        named, gradients=gradients + min(rest, 0.0), streams=named.streams + carry, temporaries=max(rest, 0.0) + batch
    )
    # The feed's models read the next batch before the step ends; their memory counts only where the step needs less.
    feed = feed_of(cfg.objective.name).memory(cfg, mesh)
    reading = parameters + optimizer + carry + batch + feed.reading
    temporaries = held.temporaries + 2 * feed.fields + feed.activations + max(0.0, reading - held.total)
    return replace(held, temporaries=temporaries, teachers=feed.weights)


def compute_itemsize(dtype: str) -> int:
    """Return the bytes of a number in the compute dtype."""
    return 2 if dtype == "bfloat16" else 4


def _loss(
    model: ArchitectureConfig, seq_len: int, sequences: int, itemsize: int, mesh: Mapping[str, int]
) -> tuple[float, float]:
    """Return the bytes of a chunk of logits with its derivatives, and of the output projection's gradient."""
    columns = model.padded_vocab // math.prod(mesh[a] for a in RULES["vocab"])
    chunk = sequences * chunk_length(sequences, seq_len, columns) * columns
    width = next(length.size for length in model.divisible_sizes() if length.axis == "embed")
    return float(chunk * (4 + 4 + itemsize)), float(columns * width * 2 * 4)


def _gathered(model: ArchitectureConfig, itemsize: int, mesh: Mapping[str, int], leaves: tuple[_Leaf, ...]) -> float:
    """Return the bytes of one layer's weights (or all layers') and the output projection, gathered over fsdp."""
    if mesh[GATHERED] == 1:
        return 0.0
    stacked = [leaf for leaf in leaves if leaf.part == "parameters" and leaf.layers and len(leaf.axes) > 2]
    numbers = lambda leaf: leaf.on(mesh, gathered=GATHERED) / leaf.itemsize
    if architecture_of(model).gathers_once:
        layer = _WITH_GRADIENTS * sum(numbers(leaf) for leaf in stacked)
    else:
        layer = sum(numbers(leaf) / leaf.layers for leaf in stacked)
    tables = [numbers(leaf) for leaf in leaves if leaf.part == "parameters" and "vocab" in leaf.axes and not leaf.layers]
    return (layer + max(tables, default=0.0)) * itemsize
