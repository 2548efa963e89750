"""What a run carries from step to step, and how it lies on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from nash_mhc.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig
from nash_mhc.model.architectures import abstract_model, architecture_of, as_trained
from nash_mhc.model.lora import adapters_of
from nash_mhc.objectives import registry
from nash_mhc.optim import optimizers
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import named_sharding, shardings
from nash_mhc.runtime.compiler_options import compiler_options
from nash_mhc.train.spikes import Recent

_KEPT = 16  # shapes and programs, for later runs of the same process


class TrainState(eqx.Module):
    step: Int[Array, ""]  # updates made: the run's step, less those that were skipped
    model: Any  # a LanguageModel, float32 (or as --weights-dtype says)
    opt_state: PyTree
    ema: Any  # averaged weights of what is trained, when ema_decay asks for them; else None
    recent: Recent  # losses and gradient norms of the last steps, skipped ones included: what a spike is judged by
    carry: Any = None  # what the objective takes from step to step, a part a row of the batch; else None

    @property
    def best_model(self) -> Any:
        """With the averaged weights, where they are kept."""
        return self.model if self.ema is None else eqx.combine(self.ema, self.model)


def shaping(cfg: RunConfig) -> RunConfig:
    """Those settings that the state's shape and the compiled programs depend on; all others are as they are by default.

    The rest comes as arguments: the optimizer's numbers, the seed, rows of whatever size.
    """
    names: tuple[str, ...] = ("z_loss", "sparsity", "optimizer", "freeze", "train_only")
    optim = OptimConfig(**{name: getattr(cfg.optim, name) for name in names}, ema_decay=0.5 * bool(cfg.optim.ema_decay))
    names = ("dtype", "matmul_dtype", "remat", "remat_keep", "attention", "deterministic", "unroll")
    train = TrainConfig(**{name: getattr(cfg.train, name) for name in names})
    rows = DataConfig(seq_len=cfg.model.some_length)
    if registry.carries(cfg):  # what is carried has the shape of a batch
        rows = DataConfig(seq_len=cfg.data.seq_len, batch_size=cfg.data.batch_size)
        train = dataclasses.replace(train, grad_accum=cfg.train.grad_accum)
    return RunConfig(
        model=cfg.model,
        data=rows,
        optim=optim,
        train=train,
        objective=cfg.objective,
        lora=cfg.lora,
        distill=cfg.distill,
        precision=cfg.precision,
        of_kits=cfg.of_kits,
    )


def registered(cfg: RunConfig) -> tuple[Any, ...]:
    """What the names in a configuration stand for now:
    in a notebook, another function may be registered under the same one."""
    return (
        architecture_of(cfg.model),
        optimizers.OPTIMIZERS.get(cfg.optim.optimizer),
        registry.OBJECTIVES.get(cfg.objective.name),
    )


def initial_state(cfg: RunConfig, model: Any) -> TrainState:
    """The state before the first step of a model;
    pure, so it can be traced for shapes alone or made in place on a mesh."""
    model, opt_state, ema = Training.of(cfg).begin(Hyperparameters.of(cfg), model, averaged=bool(cfg.optim.ema_decay))
    return TrainState(jnp.zeros((), jnp.int32), model, opt_state, ema, Recent.empty(), registry.fresh_carry_of(cfg))


def abstract_state(cfg: RunConfig) -> TrainState:
    return _abstract_state(shaping(cfg), registered(cfg))


@functools.lru_cache(_KEPT)
def _abstract_state(cfg: RunConfig, _: tuple[Any, ...]) -> TrainState:
    begin = lambda model: initial_state(cfg, as_trained(cfg, model, jax.random.key(0)))
    return jax.eval_shape(begin, abstract_model(cfg.model))


def state_shardings(cfg: RunConfig, mesh: Mesh) -> TrainState:
    """The state's tree with a sharding in each place: moments and averages lie exactly as their parameters do."""
    return _state_shardings(shaping(cfg), mesh, registered(cfg))


@functools.lru_cache(_KEPT)
def _state_shardings(cfg: RunConfig, mesh: Mesh, _: tuple[Any, ...]) -> TrainState:
    shape, training = abstract_state(cfg), Training.of(cfg)
    trained_shape, _ = training.split(shape.model)
    model, trained = shardings(shape.model, mesh), shardings(trained_shape, mesh)
    replicated = named_sharding(mesh)
    is_gone = lambda x: isinstance(x, optax.MaskedNode)  # what another part of the optimizer takes care of
    opt_state = optax.tree_utils.tree_map_params(
        training.make_optimizer(Hyperparameters.of(cfg), trained_shape), lambda x, s: x if is_gone(x) else s,
        shape.opt_state, trained, transform_non_params=lambda _: replicated, is_leaf=is_gone,
    )  # fmt: skip
    recent = jax.tree.map(lambda _: replicated, shape.recent)
    carry = jax.tree.map(lambda a: named_sharding(mesh, *("parts", "batch", "time", "width")[: a.ndim]), shape.carry)
    trees = (replicated, model, opt_state, None if shape.ema is None else trained, recent, carry)
    parts = lambda s: (s.step, s.model, s.opt_state, s.ema, s.recent, s.carry)
    return eqx.tree_at(parts, shape, trees, is_leaf=lambda x: x is None)


def sharded_abstract_state(cfg: RunConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without an array:
    what restoring and ahead-of-time compiling start from."""
    place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    return jax.tree.map(place, abstract_state(cfg), state_shardings(cfg, mesh))


def create_state(cfg: RunConfig, mesh: Mesh, model: Any | None = None) -> TrainState:
    """The initial state, each shard made on its own device; `model`, if there is one, becomes part of it.

    It has no adapters, and gets the run's.
    """
    begin_fresh, begin_from = _makers(shaping(cfg), mesh, registered(cfg))
    key = np.asarray(jax.random.key_data(jax.random.key(cfg.train.seed)))
    with jax.set_mesh(mesh):
        return begin_fresh(key) if model is None else begin_from(model, key)


@functools.lru_cache(_KEPT)
def _makers(
    cfg: RunConfig, mesh: Mesh, _: tuple[Any, ...]
) -> tuple[Callable[[np.ndarray], TrainState], Callable[[Any, np.ndarray], TrainState]]:
    """From the data of a key, which is no part of the program either, and from a model, whose place the state takes."""
    init, out = architecture_of(cfg.model).init, state_shardings(cfg, mesh)

    def given(model: Any, key: Any) -> TrainState:
        return initial_state(cfg, as_trained(cfg, model, jax.random.wrap_key_data(key)))

    fresh = lambda key: given(init(cfg.model, key=jax.random.wrap_key_data(key)), key)
    # As the step is compiled: of these draws, a CPU's compiler at its own level gives the same bits a fifth later.
    options = compiler_options(mesh.devices.flat[0].platform, deterministic=False)
    jit = functools.partial(jax.jit, out_shardings=out, compiler_options=options)
    return jit(fresh), jit(given, donate_argnums=0)


def saved_part(cfg: RunConfig, state: TrainState) -> TrainState:
    """What a checkpoint holds of a state: all of it, but of a model with adapters, these alone. Their base stays where
    it is, and is known by its hash."""
    if not cfg.lora.rank:
        return state
    return eqx.tree_at(lambda s: s.model, state, adapters_of(state.model))
