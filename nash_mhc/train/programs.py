"""What a run has compiled: the step and the evaluation.
The same ones serve every later run of the process that needs them.

A notebook that trains again, with another rate, seed, text or folder, does not wait for the compiler a second time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.mixture import RowSource
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch, Objective, Sums
from nash_mhc.objectives.registry import objective_of
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.state import registered, shaping, state_shardings
from nash_mhc.train.step import make_train_step

_PLACES = 128  # rows of attention come in whole multiples of this, where they are spread out
_KEPT = 16  # programs of each kind


def make_objective(cfg: RunConfig, source: RowSource | None = None, *, most_documents: int | None = None) -> Objective:
    """For rows of that source, whose documents begin where it says.

    `most_documents`: what a row holds at most, where that is known: attention need not find out then.
    """
    return _objective(shaping(cfg), most_documents, room_for(cfg, source))


def room_for(cfg: RunConfig, source: RowSource | None) -> int | None:
    """Places of a row of attention, where documents begin anywhere:
    whole blocks of the coarsest scale, and few lengths."""
    if source is None or source.room is None:
        return None
    stride = cfg.model.alignment
    unit = math.lcm(_PLACES, stride) if _PLACES % stride == 0 or stride % _PLACES == 0 else stride
    return -(-source.room // unit) * unit


def _objective(
    cfg: RunConfig, most_documents: int | None, room: int | None, *, unroll: bool = False, evaluates: bool = False
) -> Objective:
    how = (cfg.train.dtype, cfg.train.kept, cfg.train.attention, most_documents, room)
    execution = Execution(*how, unroll=unroll, evaluates=evaluates, float8=cfg.train.matmul_dtype == "float8")
    return objective_of(cfg, execution)


def compile_train_step(
    cfg: RunConfig,
    mesh: Mesh,
    source: RowSource | None = None,
    *,
    most_documents: int | None = None,
    warn: Callable[[str], None] = print,
) -> CompiledStep:
    """The real step, donated, with the state pinned to its shardings:
    what the run, the benchmark and the tests all use."""
    most_documents = source.most_documents if source is not None else most_documents
    return _train_step(shaping(cfg), mesh, most_documents, room_for(cfg, source), registered(cfg)).with_constants(
        [Hyperparameters.of(cfg)], warn
    )


@functools.lru_cache(_KEPT)
def _train_step(cfg: RunConfig, mesh: Mesh, most_documents: int | None, room: int | None, _: tuple[Any, ...]) -> CompiledStep:
    out = (state_shardings(cfg, mesh), named_sharding(mesh))  # the metrics lie everywhere: every process reads them
    step = make_train_step(_objective(cfg, most_documents, room, unroll=cfg.train.unroll == "yes"), Training.of(cfg))
    return CompiledStep(step, mesh, donate=True, out_shardings=out, deterministic=cfg.train.deterministic)


def compile_evaluation(cfg: RunConfig, mesh: Mesh, held_out: RowSource | None = None) -> CompiledStep:
    """(model, batch) -> sums over the batch."""
    return _evaluation(shaping(cfg), mesh, room_for(cfg, held_out), registered(cfg)).with_constants()


@functools.lru_cache(_KEPT)
def _evaluation(cfg: RunConfig, mesh: Mesh, room: int | None, _: tuple[Any, ...]) -> CompiledStep:
    objective = _objective(cfg, None, room, evaluates=True)

    def sums(model: LanguageModel, batch: Batch) -> Sums:
        return objective(model, jax.tree.map(lambda a: a[0], batch))[1].sums

    return CompiledStep(sums, mesh, out_shardings=named_sharding(mesh))  # every process reads them
