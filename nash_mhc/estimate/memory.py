"""What a run needs of a device's memory, by arithmetic alone: no device, no compiler, a few milliseconds a mesh.

Parameters and moments are counted leaf by leaf from the real state and its axes, activations as the model itself says.
The rest is what XLA does with them, as its buffers show: docs/planning.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import optax

from nash_mhc.config.schema import ConfigError, DataConfig, MeshConfig, RunConfig, TrainConfig
from nash_mhc.estimate.teachers import check_all_fit, teaching
from nash_mhc.model.architectures import abstract_model, architecture_of, as_trained
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.registry import fresh_carry_of
from nash_mhc.ops.xent import chunk_length
from nash_mhc.optim.optimizers import OPTIMIZERS
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import GATHERED, RULES, logical_axes

_BATCH_BYTES = 16  # a token: input, target and segment as int32, weight as float32
# At the end of the forward pass, 5/8 of the gradients have buffers already; the others will lie where others lay.
_GRADIENTS_APART = 0.625
# Of weights that are put together once for all applications: they themselves, and what of their gradients is not yet
# split again when most is held.
_WITH_GRADIENTS = 1.35
_UPDATE_LEAVES = 0.5  # of the largest leaf, which leaves holes while its update is made


@dataclass(frozen=True)
class Memory:
    """Bytes of one device when it holds most, by what they are for."""

    parameters: float
    gradients: float
    optimizer: float  # moments, and averaged weights
    streams: float  # the residual state that enters each layer, and what the objective carries from step to step
    activations: float  # all else that is kept for the backward pass
    logits: float  # of the loss: a chunk of them, and the output projection's gradient
    collectives: float  # weights and rows that are put together from several devices
    temporaries: float  # the compiler's: what a layer works with, and copies of the state
    teachers: float = 0.0  # weights of frozen models that read every batch: a teacher, an anchor

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


class _Axes:
    """The logical axes of a leaf; no pytree, so that it can be one's leaf."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names


class _Leaf(NamedTuple):
    part: str  # parameters, trained, optimizer
    bytes: int
    item: int  # bytes of a number
    layers: int  # that a stack holds; 0: no stack
    axes: tuple[str, ...]

    def on(self, mesh: Mapping[str, int], *, whole: str | None = None) -> float:
        """Of one device; gathered over the mesh axis `whole`."""
        return self.bytes / math.prod(mesh[a] for name in self.axes for a in RULES[name] if a != whole)


class Weights(NamedTuple):
    """Trees of shapes of what a run holds from its first step on."""

    model: Any
    opt_state: Any
    ema: Any  # averaged weights; None without


def abstract_weights(cfg: RunConfig) -> Weights:
    """Return the model, optimizer state and averaged weights of a run as trees of shapes."""
    return _abstract_weights(*_key(cfg))


def _key(cfg: RunConfig) -> tuple[RunConfig, tuple[Any, ...]]:
    """Return the settings that weights depend on, and what their names stand for: both may change in a notebook."""
    rows = DataConfig(seq_len=cfg.model.some_length)
    weights = replace(cfg, data=rows, mesh=MeshConfig(), train=TrainConfig(), optim=replace(cfg.optim, warmup_steps=0))
    return weights, (architecture_of(cfg.model), OPTIMIZERS.get(cfg.optim.optimizer))


@functools.lru_cache(64)
def _abstract_weights(cfg: RunConfig, _: tuple[Any, ...]) -> Weights:
    def begin(model: Any) -> tuple[Any, Any, Any]:
        model = as_trained(cfg, model, jax.random.key(0))
        return Training.of(cfg).begin(Hyperparameters.of(cfg), model, averaged=bool(cfg.optim.ema_decay))

    return Weights(*jax.eval_shape(begin, abstract_model(cfg.model)))


@functools.lru_cache(64)
def _leaves(cfg: RunConfig, registered: tuple[Any, ...]) -> tuple[_Leaf, ...]:
    """Of the whole state."""
    state, training = _abstract_weights(cfg, registered), Training.of(cfg)
    trained, _frozen = training.split(state.model)
    is_names = lambda x: isinstance(x, tuple) and all(isinstance(name, str) for name in x)
    axes = lambda tree: jax.tree.map(_Axes, logical_axes(tree), is_leaf=is_names)
    is_gone = lambda x: isinstance(x, optax.MaskedNode)
    moments = optax.tree_utils.tree_map_params(
        training.make_optimizer(Hyperparameters.of(cfg), trained), lambda x, a: x if is_gone(x) else a,
        state.opt_state, axes(trained), transform_non_params=lambda _: _Axes(()), is_leaf=is_gone,
    )  # fmt: skip

    def listed(part: str, tree: Any, its_axes: Any) -> list[_Leaf]:
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(its_axes), strict=True)
        return [
            _Leaf(part, x.size * x.dtype.itemsize, x.dtype.itemsize, x.shape[0] if "layers" in a.names else 0, a.names)
            for x, a in pairs
        ]

    made = listed("parameters", state.model, axes(state.model)) + listed("trained", trained, axes(trained))
    made += listed("optimizer", state.opt_state, moments)
    return tuple(made + (listed("optimizer", state.ema, axes(trained)) if state.ema is not None else []))


def estimate(cfg: RunConfig, mesh: Mapping[str, int]) -> Memory:
    """For a configuration whose dtype, kernel and unrolling are resolved, on a mesh of that shape.

    ConfigError where the mesh does not divide it, and for a model that does not say what it holds.
    """
    check_all_fit(cfg, mesh)
    counted = architecture_of(cfg.model).activations
    if counted is None:
        raise ConfigError(
            f"model {cfg.model.architecture} does not say what its layers hold; give its Architecture activations"
        )
    leaves = _leaves(*_key(cfg))
    local = lambda part: sum((leaf.on(mesh) for leaf in leaves if leaf.part == part), 0.0)
    parameters, gradients, optimizer = local("parameters"), local("trained"), local("optimizer")
    rows = cfg.data.batch_size // math.prod(mesh[a] for a in RULES["batch"])
    tp = math.prod(mesh[a] for a in RULES["time_split"])
    execution = Execution(cfg.train.dtype, cfg.train.kept, cfg.train.attention)
    layers = counted(cfg.model, execution, rows, cfg.data.seq_len, tp)
    chunk, table = _loss(cfg, mesh, rows)
    gathered = _gathered(cfg, mesh, leaves) + layers.gathered
    batch = _BATCH_BYTES * cfg.train.grad_accum * rows * cfg.data.seq_len
    # Three moments of the step may be the worst: the end of the forward pass, whose loss works on the last chunk or
    # whose last layer is just done; the start of the backward pass; the update.
    trained = [leaf for leaf in leaves if leaf.part == "trained"]
    kept = layers.streams + layers.saved + (gradients if cfg.train.grad_accum > 1 else 0.0)
    forward = kept + _GRADIENTS_APART * gradients + table + gathered + max(layers.forward, chunk)
    backward = kept + gradients + table / 2 + gathered + layers.backward
    # Updates stay until their norm is known: of all weights, or of a part of them as large as weights of half the bits.
    update = 2 * gradients + _UPDATE_LEAVES * max(leaf.on(mesh) for leaf in trained)
    held_most = max(forward, backward, update)
    if held_most == update:  # the layers are done by then
        named = Memory(parameters, gradients, optimizer, 0.0, 0.0, 0.0, 0.0, 0.0)
    elif held_most == backward:
        named = Memory(parameters, gradients, optimizer, layers.streams, layers.saved, table / 2, gathered, 0.0)
    else:
        logits = table + (chunk if chunk > layers.forward else 0)
        named = Memory(parameters, gradients, optimizer, layers.streams, layers.saved, logits, gathered, 0.0)
    # The state is an argument, all else is the compiler's; gradients may lie where other things were.
    rest = parameters + optimizer + held_most - named.total
    streams = named.streams + _carried(cfg, mesh)
    held = replace(named, gradients=gradients + min(rest, 0.0), streams=streams, temporaries=max(rest, 0.0) + batch)
    taught = teaching(cfg, mesh)
    # Teachers read the next batch before this step has ended. What they need for it counts where a step needs less.
    reading = parameters + optimizer + _carried(cfg, mesh) + batch + taught.reading
    temporaries = held.temporaries + 2 * taught.known + taught.compared + max(0.0, reading - held.total)
    return replace(held, temporaries=temporaries, teachers=taught.weights)


def _carried(cfg: RunConfig, mesh: Mapping[str, int]) -> float:
    """What an objective takes from step to step."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: fresh_carry_of(cfg)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / math.prod(mesh[a] for a in RULES["batch"])


def _item(cfg: RunConfig) -> int:
    return 2 if cfg.train.dtype == "bfloat16" else 4


def _loss(cfg: RunConfig, mesh: Mapping[str, int], rows: int) -> tuple[float, float]:
    """(logits of a chunk with what is made of them, the gradient of the output projection and its start)."""
    columns = cfg.model.padded_vocab // math.prod(mesh[a] for a in RULES["vocab"])
    chunk = rows * chunk_length(rows, cfg.data.seq_len, columns) * columns
    width = next(length.size for length in cfg.model.lengths() if length.axis == "embed")
    return float(chunk * (4 + 4 + _item(cfg))), float(columns * width * 2 * 4)


def _gathered(cfg: RunConfig, mesh: Mapping[str, int], leaves: tuple[_Leaf, ...]) -> float:
    """One layer's weights, or all layers', and the output projection, put together over fsdp, in the compute dtype."""
    if mesh[GATHERED] == 1:
        return 0.0
    stacked = [leaf for leaf in leaves if leaf.part == "parameters" and leaf.layers and len(leaf.axes) > 2]
    numbers = lambda leaf: leaf.on(mesh, whole=GATHERED) / leaf.item
    if architecture_of(cfg.model).gathers_once:
        layer = _WITH_GRADIENTS * sum(numbers(leaf) for leaf in stacked)
    else:
        layer = sum(numbers(leaf) / leaf.layers for leaf in stacked)
    tables = [numbers(leaf) for leaf in leaves if leaf.part == "parameters" and "vocab" in leaf.axes]
    return (layer + max(tables, default=0.0)) * _item(cfg)
