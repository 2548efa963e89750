"""What a run carries from step to step, and how it lies on the mesh."""

from __future__ import annotations

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
from nash_mhc.model.architectures import abstract_model, architecture_of
from nash_mhc.objectives import registry
from nash_mhc.optim import optimizers
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import named, shardings
from nash_mhc.train.spikes import Recent

_KEPT = 16  # shapes and programs, for later runs of the same process


class TrainState(eqx.Module):
    step: Int[Array, ""]  # updates made: the run's step, less those that were skipped
    model: Any  # a LanguageModel, float32
    opt_state: PyTree
    ema: Any  # averaged weights of what is trained, when ema_decay asks for them; else None
    recent: Recent  # losses and gradient norms of the last steps, skipped ones included: what a spike is judged by

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
    names = ("dtype", "remat", "attention", "deterministic", "unroll")
    train = TrainConfig(**{name: getattr(cfg.train, name) for name in names})
    any_rows = DataConfig(seq_len=64 * cfg.model.alignment)  # of a length that every model with this alignment takes
    return RunConfig(model=cfg.model, data=any_rows, optim=optim, train=train, objective=cfg.objective)


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
    training = Training.of(cfg.optim)
    trained, _ = training.split(model)
    optimizer = training.make_optimizer(Hyperparameters.of(cfg), trained)
    # A copy: a state whose leaves share a buffer could not be donated.
    ema = jax.tree.map(jnp.copy, trained) if cfg.optim.ema_decay else None
    return TrainState(jnp.zeros((), jnp.int32), model, optimizer.init(trained), ema, Recent.empty())


def abstract_state(cfg: RunConfig) -> TrainState:
    return _abstract_state(shaping(cfg), registered(cfg))


@functools.lru_cache(_KEPT)
def _abstract_state(cfg: RunConfig, _: tuple[Any, ...]) -> TrainState:
    return jax.eval_shape(lambda model: initial_state(cfg, model), abstract_model(cfg.model))


def state_shardings(cfg: RunConfig, mesh: Mesh) -> TrainState:
    """The state's tree with a sharding in each place: moments and averages lie exactly as their parameters do."""
    return _state_shardings(shaping(cfg), mesh, registered(cfg))


@functools.lru_cache(_KEPT)
def _state_shardings(cfg: RunConfig, mesh: Mesh, _: tuple[Any, ...]) -> TrainState:
    shape, training = abstract_state(cfg), Training.of(cfg.optim)
    trained_shape, _ = training.split(shape.model)
    model, trained = shardings(shape.model, mesh), shardings(trained_shape, mesh)
    replicated = named(mesh)
    is_gone = lambda x: isinstance(x, optax.MaskedNode)  # what another part of the optimizer takes care of
    opt_state = optax.tree_utils.tree_map_params(
        training.make_optimizer(Hyperparameters.of(cfg), trained_shape), lambda x, s: x if is_gone(x) else s,
        shape.opt_state, trained, transform_non_params=lambda _: replicated, is_leaf=is_gone,
    )  # fmt: skip
    recent = jax.tree.map(lambda _: replicated, shape.recent)
    trees = (replicated, model, opt_state, None if shape.ema is None else trained, recent)
    parts = lambda s: (s.step, s.model, s.opt_state, s.ema, s.recent)
    return eqx.tree_at(parts, shape, trees, is_leaf=lambda x: x is None)


def sharded_abstract_state(cfg: RunConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without an array:
    what restoring and ahead-of-time compiling start from."""
    place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    return jax.tree.map(place, abstract_state(cfg), state_shardings(cfg, mesh))


def create_state(cfg: RunConfig, mesh: Mesh, model: Any | None = None) -> TrainState:
    """The initial state, each shard made on its own device; `model`, if there is one, becomes part of it."""
    begin_fresh, begin_from = _makers(shaping(cfg), mesh, registered(cfg))
    with jax.set_mesh(mesh):
        if model is not None:
            return begin_from(model)
        return begin_fresh(np.asarray(jax.random.key_data(jax.random.key(cfg.train.seed))))


@functools.lru_cache(_KEPT)
def _makers(
    cfg: RunConfig, mesh: Mesh, _: tuple[Any, ...]
) -> tuple[Callable[[np.ndarray], TrainState], Callable[[Any], TrainState]]:
    """From the data of a key, which is no part of the program either, and from a model, whose place the state takes."""
    init = architecture_of(cfg.model).init
    fresh = lambda key: initial_state(cfg, init(cfg.model, key=jax.random.wrap_key_data(key)))
    out = state_shardings(cfg, mesh)
    given = jax.jit(lambda model: initial_state(cfg, model), out_shardings=out, donate_argnums=0)
    return jax.jit(fresh, out_shardings=out), given
