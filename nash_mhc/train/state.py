"""The state of a run: its arrays, their creation, and their sharding over the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from nash_mhc.config.schema import DataConfig, LoraConfig, OptimConfig, RunConfig, TrainConfig
from nash_mhc.model.architectures import abstract_model, architecture_of, as_trained
from nash_mhc.model.lora import adapters_of
from nash_mhc.objectives import registry
from nash_mhc.optim import optimizers
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import named_sharding, shardings
from nash_mhc.runtime.compiler_options import compiler_options
from nash_mhc.train.spikes import Recent

CACHED = 16  # shapes and programs of this many configurations stay cached for later runs of the process


class TrainState(eqx.Module):
    step: Int[Array, ""]  # updates applied: steps of the run minus skipped updates
    model: Any  # a LanguageModel with weights in --weights-dtype
    opt_state: PyTree
    ema: Any  # moving average of the trained weights; None without --ema-decay
    recent: Recent  # recent losses and gradient norms, to detect spikes
    carry: Any = None  # values that the objective passes to the next step, sharded like the batch; usually None

    @property
    def averaged_model(self) -> Any:
        """Return the model with averaged weights if the run has them, else the model."""
        return self.model if self.ema is None else eqx.combine(self.ema, self.model)


@dataclass(frozen=True)
class ProgramKey:
    """The settings that determine the state's shapes and the compiled programs: runs with equal keys share them.

    Optimizer numbers, the seed and the batches are arguments of the programs, so they are not part of the key.
    """

    cfg: RunConfig  # all other settings have their default values
    registered: tuple[Any, ...]  # the objects named in `cfg`: a notebook may register others under the same names

    @staticmethod
    def of(cfg: RunConfig) -> ProgramKey:
        names: tuple[str, ...] = ("z_loss", "sparsity", "optimizer", "freeze", "train_only")
        optim = OptimConfig(**{name: getattr(cfg.optim, name) for name in names}, ema_decay=0.5 * bool(cfg.optim.ema_decay))
        names = ("dtype", "matmul_dtype", "remat", "remat_keep", "attention", "deterministic", "unroll")
        train = TrainConfig(**{name: getattr(cfg.train, name) for name in names})
        data = DataConfig(seq_len=cfg.model.some_length)
        if registry.carries(cfg.objective.name):  # the carry has the shape of a batch
            data = DataConfig(seq_len=cfg.data.seq_len, batch_size=cfg.data.batch_size)
            train = dataclasses.replace(train, grad_accum=cfg.train.grad_accum)
        names = ("model", "objective", "lora", "precision", "of_kits")
        shaping = RunConfig(data=data, optim=optim, train=train, **{name: getattr(cfg, name) for name in names})
        optimizer, objective = optimizers.OPTIMIZERS.get(cfg.optim.optimizer), registry.OBJECTIVES.get(cfg.objective.name)
        return ProgramKey(shaping, (architecture_of(cfg.model), optimizer, objective))


def initial_state(key: ProgramKey, model: Any) -> TrainState:
    """Return the state before the first step of this model; a pure function that can be traced or jitted."""
    cfg = key.cfg
    h = Hyperparameters.of(cfg.optim, cfg.train)
    model, opt_state, ema = Training.of(cfg).begin(h, model, averaged=bool(cfg.optim.ema_decay))
    return TrainState(jnp.zeros((), jnp.int32), model, opt_state, ema, Recent.empty(), registry.fresh_carry_of(cfg))


def abstract_state(cfg: RunConfig) -> TrainState:
    """Return the state as a tree of shapes and dtypes."""
    return _abstract_state(ProgramKey.of(cfg))


@functools.lru_cache(CACHED)
def _abstract_state(key: ProgramKey) -> TrainState:
    cfg = key.cfg
    begin = lambda model: initial_state(key, as_trained(model, cfg.of_kits, cfg.lora, jax.random.key(0)))
    return jax.eval_shape(begin, abstract_model(key.cfg.model))


@functools.lru_cache(CACHED)
def state_shardings(key: ProgramKey, mesh: Mesh) -> TrainState:
    """Return the state as a tree of shardings: moments and averages are sharded like their parameters."""
    shape, training = _abstract_state(key), Training.of(key.cfg)
    h = Hyperparameters.of(key.cfg.optim, key.cfg.train)
    trained_shape, _ = training.split(shape.model)
    model, trained = shardings(shape.model, mesh), shardings(trained_shape, mesh)
    replicated = named_sharding(mesh)
    opt_state = training.per_moment(h, trained_shape, shape.opt_state, trained, replicated)
    recent = jax.tree.map(lambda _: replicated, shape.recent)
    carry = jax.tree.map(lambda a: named_sharding(mesh, *("parts", "batch", "time", "width")[: a.ndim]), shape.carry)
    trees = (replicated, model, opt_state, None if shape.ema is None else trained, recent, carry)
    fields = lambda s: (s.step, s.model, s.opt_state, s.ema, s.recent, s.carry)
    return eqx.tree_at(fields, shape, trees, is_leaf=lambda x: x is None)


def sharded_abstract_state(cfg: RunConfig, mesh: Mesh) -> TrainState:
    """Return the state as a tree of shapes, dtypes and shardings, for restoring and ahead-of-time compilation."""
    sharded = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    return jax.tree.map(sharded, abstract_state(cfg), state_shardings(ProgramKey.of(cfg), mesh))


def create_state(cfg: RunConfig, mesh: Mesh, model: Any | None = None) -> TrainState:
    """Create the initial state, each shard on its own device.

    The state takes over (and donates) `model` if it is given, and adds the run's adapters to it.
    """
    from_seed, from_model = _initializers(ProgramKey.of(cfg), mesh)
    seed = np.asarray(jax.random.key_data(jax.random.key(cfg.train.seed)))
    with jax.set_mesh(mesh):
        return from_seed(seed) if model is None else from_model(model, seed)


@functools.lru_cache(CACHED)
def _initializers(
    key: ProgramKey, mesh: Mesh
) -> tuple[Callable[[np.ndarray], TrainState], Callable[[Any, np.ndarray], TrainState]]:
    """Return the jitted functions (seed -> state) and (model, seed -> state); the seed is the data of a random key."""
    cfg = key.cfg
    init, out = architecture_of(cfg.model).init, state_shardings(key, mesh)

    def from_model(model: Any, seed: Any) -> TrainState:
        return initial_state(key, as_trained(model, cfg.of_kits, cfg.lora, jax.random.wrap_key_data(seed)))

    from_seed = lambda seed: from_model(init(cfg.model, key=jax.random.wrap_key_data(seed)), seed)
    # Compiled like the step: at its default level the CPU compiler gives the same bits, but takes a fifth longer.
    options = compiler_options(mesh.devices.flat[0].platform, deterministic=False)
    jit = functools.partial(jax.jit, out_shardings=out, compiler_options=options)
    return jit(from_seed), jit(from_model, donate_argnums=0)


def saved_part(state: TrainState, lora: LoraConfig) -> TrainState:
    """Return the part of the state that checkpoints hold: with LoRA, the adapters without their base model."""
    return eqx.tree_at(lambda s: s.model, state, adapters_of(state.model)) if lora.rank else state
