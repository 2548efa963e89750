"""The parts of a training step, each with its arrays, which `bench parts` times one by one.

The parts are the model's own classes, called in isolation. One layer of each kind is run, from the tokens to the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from nash_mhc.bench.step import DOCUMENTS
from nash_mhc.config.commands import name_hint
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, ModelConfig, RunConfig, TrainConfig
from nash_mhc.model.layer import mixer_class, residual_class
from nash_mhc.model.lm import kernel_for, stacks_of_group
from nash_mhc.model.lora import base_of
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.protocol import Execution
from nash_mhc.model.residual import StreamState
from nash_mhc.model.weights import Weight
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.vocabulary import sharded_xent
from nash_mhc.optim.adamw import Gradients
from nash_mhc.optim.optimizers import updated_average
from nash_mhc.optim.rounding import salt_of, to_float32
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import ADAPTER, GATE, HEAD, MATRIX, TABLE, Declared, DerivedParam, map_declared, named_leaves
from nash_mhc.parallel.sharding import for_compute

_LAYERS_AT_ONCE = 4  # layers of one update, whose memory is seven times that of their weights


class Part(NamedTuple):
    """A part of the step: `run(module, arrays, constants)`. FLOPs are those of matrix products, per call."""

    name: str
    times: int  # calls per step
    run: Callable[[Any, Any, Any], Any]
    flops: float
    flops_backward: float
    has_gradient: bool
    in_layer: bool = True  # runs in the compute dtype, under the run's remat
    rereads_inputs: bool = True  # whether the backward pass reads the inputs again
    unread: int = 0  # bytes of the inputs that are not read
    written: Callable[[Any], Any] = lambda out: out  # output -> the output without arrays that only pass through


class Arrays(NamedTuple):
    """The arrays of one part: stored weights, differentiable inputs, constants, and the output."""

    weights: Any
    frozen: Any
    inputs: Any
    constants: Any
    out: Any


def module_of(part: Part, arrays: Arrays, dtype: Any) -> Any:
    module = eqx.combine(arrays.weights, arrays.frozen)
    return for_compute(module, dtype) if part.in_layer else module


class _Recorder:
    """Run parts one by one and record them with their arrays."""

    def __init__(self, dtype: str, tokens: int) -> None:
        self.parts: dict[str, Part] = {}
        self.arrays: dict[str, Arrays] = {}
        self._dtype, self._tokens = jnp.dtype(dtype), tokens

    def run(
        self, name: str, times: int, run: Callable[[Any, Any, Any], Any], module: tuple[Any, Any], inputs: Any = (),
        constants: Any = (), *, flops: float = 0.0, rows: int | None = None, has_gradient: bool = True, **traits: Any,
    ) -> Any:  # fmt: skip
        """Run a part on `module`, its (trained, frozen) weights. `flops` are those without weights, forward.

        `rows` is the number of rows of a table that count as a matrix. `traits` are the optional fields of Part.
        """
        trained, frozen = module
        used, learned = (_matrix_size(tree, rows) for tree in (eqx.combine(trained, frozen), trained))
        has_gradient = has_gradient and bool(jax.tree.leaves((trained, inputs)))
        work, work_backward = flops + 2.0 * self._tokens * used, 2 * flops + 2.0 * self._tokens * (used + learned)
        part = Part(name, times, run, work, work_backward, has_gradient, **traits)
        arrays = Arrays(trained, frozen, inputs, constants, None)
        out = run(module_of(part, arrays, self._dtype), inputs, constants)
        self.parts[name], self.arrays[name] = part, arrays._replace(out=out)
        return out


def _run_parts(model: ModelConfig, train: TrainConfig, z_loss: float, sides: tuple[Any, Any], batch: Batch) -> _Recorder:
    """Run the parts of a step for one layer of each kind. `sides`: the trained and the frozen part of the model."""
    recorder = _Recorder(train.dtype, math.prod(batch.inputs.shape))
    groups, accum = model.layers // len(model.group), train.grad_accum
    whole = lambda *names: tuple(_only(side, names) for side in sides)
    group = [
        [jax.tree.map(lambda a: a[0], stack) for stack in stacks_of_group(side.layers, len(model.group))] for side in sides
    ]
    of_layer = lambda select, i=0: tuple(select(layers[i]) for layers in group)

    table = jax.tree.leaves(whole("embed_VD"))[0]
    x_BTD = recorder.run(
        "embedding", accum, lambda lm, _, tokens_BT: lm.embed_tokens(tokens_BT, train.dtype), whole("embed_VD"),
        constants=batch.inputs, in_layer=False, rereads_inputs=False, rows=0,  # a lookup, not a matmul
        unread=model.width * table.dtype.itemsize * max(0, table.shape[0] - batch.inputs.size),
    )  # fmt: skip

    state = residual_class(model).enter(model, x_BTD)
    residual_calls, norm = accum * model.mixings * model.layers, lambda own, x, _: own(x)
    if model.mixings:
        read = lambda own, xs, squares_BTR: own[0].read(StreamState(xs, squares_BTR), own[1])
        normed_BTD, maps = recorder.run(
            "mhc-read", residual_calls, read, of_layer(lambda layer: (layer.attention_residual, layer.attention_norm)),
            state.xs, state.squares_BTR, written=lambda out: (out[0], out[1]._replace(xs=())),
        )  # fmt: skip
        plain_norms = model.layers if model.mixings == 1 else 0  # mhc-layer: between mixer and ffn
        recorder.run("norm", accum * (plain_norms + 1), norm, tuple(side.norm for side in sides), x_BTD, in_layer=False)
    else:
        module = of_layer(lambda layer: layer.attention_norm)
        normed_BTD = recorder.run("norm", accum * (2 * model.layers + 1), norm, module, x_BTD)

    mixed_BTD = normed_BTD
    if model.conv_taps:
        conv = lambda own, x, segments_BT: own(x, segments_BT)
        module = of_layer(lambda layer: layer.attention_conv)
        mixed_BTD = recorder.run("conv", accum * model.layers, conv, module, mixed_BTD, batch.segments)
    y_BTD = _run_mixers(train, model, recorder, lambda i: of_layer(lambda layer: layer.attention, i), mixed_BTD, batch)

    no_weights = of_layer(lambda layer: _only(layer.attention_residual, ()))
    if model.mixings:
        # `mhc-read` computes the gradient of the old streams.
        write = lambda own, new, state: own.write(state, new[0], new[1]._replace(xs=state.xs))
        recorder.run("mhc-write", residual_calls, write, no_weights, (y_BTD, maps._replace(xs=())), state)
    else:
        add = lambda own, both, _: own.write(*both, None)
        recorder.run("add", accum * 2 * model.layers, add, no_weights, (state, y_BTD), rereads_inputs=False)

    for name, count in Counter(kind.ffn for kind in model.group).items():
        i = next(i for i, kind in enumerate(model.group) if kind.ffn == name)
        feed_forward, module = (lambda own, x, _: own(x)), of_layer(lambda layer: layer.ffn, i)
        recorder.run(f"ffn-{name}", accum * groups * count, feed_forward, module, normed_BTD)

    loss = lambda lm, x_BTD, labels: sharded_xent(
        x_BTD, lm.unembed_VD, labels[0], labels[1], model.vocab_size, z_loss
    )  # fmt: skip
    recorder.run(
        "loss", accum, loss, whole("embed_VD" if model.tied_embeddings else "output_VD"), normed_BTD,
        (batch.targets, batch.weights), in_layer=False, rereads_inputs=False, rows=model.vocab_size,
    )  # fmt: skip
    return recorder


def _run_mixers(
    train: TrainConfig, model: ModelConfig, recorder: _Recorder, module: Callable[[int], Any], x_BTD: Any, batch: Batch
) -> Any:
    """Run the mixer of each kind and window."""
    B, T = batch.segments.shape
    execution = Execution(train.dtype, train.kept, train.attention, DOCUMENTS)
    kernel = kernel_for(execution, T, model.head_dim, model.window)
    layout = attention_layout((B, T), batch.segments, model.strides, kernel, DOCUMENTS)
    y_BTD, groups = None, model.layers // len(model.group)
    for (name, window), count in Counter((kind.mixer, kind.window) for kind in model.group).items():
        i, kind = next((i, k) for i, k in enumerate(model.group) if (k.mixer, k.window) == (name, window))
        # The class counts its weights (without adapters), and three FLOPs of training per FLOP of the forward pass.
        forward = mixer_class(kind).flops_per_token(model, window, T // DOCUMENTS) / 3
        attention = forward - 2.0 * _matrix_size(base_of(eqx.combine(*module(i))), None)
        mix = lambda own, x_BTD, layout, window=window: own(x_BTD, layout, window=window, kernel=kernel)
        y_BTD = recorder.run(
            f"mixer-{name}-{window or 'full'}", train.grad_accum * groups * count, mix, module(i), x_BTD, layout,
            flops=B * T * attention,
        )  # fmt: skip
    return y_BTD


def _run_updates(
    training: Training, h: Hyperparameters, has_ema: bool, model: ModelConfig, recorder: _Recorder, trained: Any
) -> None:
    """Run the optimizer on a few layers, and on everything else.

    The step updates a stack of all layers. With the arrays of one layer, launch overhead would dominate.
    """
    others = tuple(name for name in named_leaves(trained) if not name.startswith(("layers.", "layers[")))
    stacked = model.layers // (len(trained.layers) if isinstance(trained.layers, tuple) else 1)
    few = math.gcd(stacked, _LAYERS_AT_ONCE)
    layers = jax.tree.map(lambda a: jnp.repeat(a[:1], few, axis=0), _only(trained, ("layers.", "layers[")))

    def update(_: Any, __: Any, known: Any) -> Any:
        params, sums, opt_state, ema, h, is_good = known
        gradients = Gradients(sums, jnp.ones(()), optax.tree.norm(jax.tree.map(to_float32, sums)))
        new = training.update(h, params, gradients, opt_state, is_good, salt_of(h.seed))
        return new, None if ema is None else updated_average(h, ema, new.params, jnp.zeros((), jnp.int32))

    for name, times, params in (("layers", stacked // few, layers), ("others", 1, _only(trained, others))):
        if jax.tree.leaves(params):
            ema = jax.tree.map(to_float32, params) if has_ema else None
            sums = jax.tree.map(lambda p: 0.5 * p, params)
            opt_state = training.init_optimizer(h, params)
            known = (params, sums, opt_state, ema, h, jnp.ones((), bool))
            recorder.run(
                f"update-{name}", times, update, (_only(trained, ()),) * 2, constants=known, in_layer=False, has_gradient=False
            )


def _only(module: Any, prefixes: tuple[str, ...]) -> Any:
    """Return the module with None for all arrays but those whose names have one of these prefixes."""
    named, treedef = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, Weight | DerivedParam))
    name = lambda path: jax.tree_util.keystr(path).lstrip(".")
    kept = [leaf if prefixes and name(path).startswith(prefixes) else None for path, leaf in named]
    return jax.tree.unflatten(treedef, kept)


def _matrix_size(module: Any, rows: int | None) -> int:
    """Return the number of matrix elements, counting only `rows` rows of each array if given."""
    roles = (MATRIX, GATE, TABLE, HEAD, ADAPTER)

    def count(declared: Declared, a: Any) -> int:
        if not (declared.is_matrix and declared.role in roles):
            return 0
        return a.size // a.shape[0] * (a.shape[0] if rows is None else rows)

    return sum(jax.tree.leaves(map_declared(module, count)))


class LowerBound(NamedTuple):
    """The least FLOPs and bytes of a part."""

    flops: float
    bytes: float


def lower_bound(part: Part, arrays: Arrays, *, backward: bool) -> LowerBound:
    size = lambda *trees: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees))
    read = size(arrays.weights, arrays.frozen, arrays.inputs, arrays.constants) - part.unread
    moved = read + size(part.written(arrays.out))
    if not backward:
        return LowerBound(part.flops, moved)
    moved += read * part.rereads_inputs + size(arrays.out) + size(arrays.weights, arrays.inputs)
    return LowerBound(part.flops + part.flops_backward, moved)


def check(model: ArchitectureConfig, objective: str, devices: int) -> None:
    """Raise ConfigError for a model, objective or mesh that is not supported."""
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"bench parts supports {ModelConfig.architecture}, not {model.architecture}; use bench step")
    if objective != "next_token":
        raise ConfigError(f"bench parts supports --objective next_token, not {objective}")
    if devices > 1:
        raise ConfigError(f"bench parts runs on one device, but the mesh has {devices}; leave out the --mesh flags")


def select_parts(names: list[str], wanted: str | None) -> list[str]:
    """Select parts by name or by prefix: `mixer` selects all that start with `mixer-`."""
    selected: set[str] = set()
    for word in [] if wanted is None else wanted.split(","):
        matches = {name for name in names if name == word.strip() or name.startswith(f"{word.strip()}-")}
        if not matches:
            raise ConfigError(f"--parts {word.strip()}: not a part of this model{name_hint(word.strip(), names)}")
        selected |= matches
    return [name for name in names if name in selected or wanted is None]


def one_group(model: ArchitectureConfig, groups: int = 1) -> ModelConfig:
    """Return the model cut to this many groups of layers."""
    assert isinstance(model, ModelConfig)
    return dataclasses.replace(model, layers=groups * len(model.windows))


def parts_and_arrays(cfg: RunConfig, call: Callable[[Callable[..., Any]], Any]) -> tuple[dict[str, Part], Any]:
    """Return (parts, result of `call`), where `call` runs or only traces the walk (model, batch) -> arrays by part."""
    parts: dict[str, Part] = {}

    def walk(model: Any, batch: Any) -> dict[str, Arrays]:
        assert isinstance(cfg.model, ModelConfig)
        training, h = Training.of(cfg), jax.tree.map(jnp.asarray, Hyperparameters.of(cfg.optim, cfg.train))
        sides = training.split(model)
        microbatch = jax.tree.map(lambda a: a[0], batch)
        recorder = _run_parts(cfg.model, cfg.train, cfg.optim.z_loss, sides, microbatch)
        _run_updates(training, h, bool(cfg.optim.ema_decay), cfg.model, recorder, sides[0])
        parts.update(recorder.parts)
        return recorder.arrays

    arrays = call(walk)
    return parts, arrays
