"""What teachers need of a device's memory: frozen models that read every batch before the student does."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from nash_mhc.config.schema import ConfigError, Length, RunConfig
from nash_mhc.hub.load import shape_of
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution
from nash_mhc.ops.xent import chunk_length
from nash_mhc.parallel.mesh import check_fit, misfits
from nash_mhc.parallel.sharding import RULES, logical_axes

_KNOWN_BYTES = 6  # of a token that a teacher names: its id as int32, its logit as float16


class Teaching(NamedTuple):
    """Bytes of one device."""

    weights: float  # of all teachers
    known: float  # what they say of a batch
    compared: float  # layers of the student, where they are held against a teacher's
    reading: float  # while the one that needs most reads a batch


@functools.lru_cache(8)
def _shape(folder: str, flag: str) -> tuple[RunConfig, Any]:
    return shape_of(folder, flag)


def teachers_of(cfg: RunConfig) -> list[tuple[RunConfig, Any]]:
    """(configuration, tree of shapes) of each model that reads the batches: the teacher, and what the run began with.

    ConfigError for a folder that holds no model.
    """
    if cfg.objective.name != "distill":
        return []
    named = [("--distill-teacher", cfg.distill.teacher), ("--init-from", cfg.train.init_from if cfg.distill.anchor else None)]
    return [_shape(name, flag) for flag, name in named if name is not None]


def all_misfits(cfg: RunConfig, mesh: Mapping[str, int]) -> list[Length]:
    """Every size of the model and of its teachers that the mesh does not divide."""
    models = [cfg.model, *(its.model for its, _ in teachers_of(cfg))]
    return [length for model in models for length in misfits(cfg.data, model, mesh)]


def check_all_fit(cfg: RunConfig, mesh: Mapping[str, int]) -> None:
    """ConfigError where the mesh does not divide the model, or one of its teachers."""
    check_fit(cfg, mesh)
    for its, _ in teachers_of(cfg):
        try:
            check_fit(dataclasses.replace(cfg, model=its.model), mesh, model_is_given=True)
        except ConfigError as error:
            raise ConfigError(f"the teacher: {error}") from None


def reading_flops(cfg: RunConfig) -> float:
    """Matrix work of all teachers on one token: a forward pass, which is a third of a training step."""
    return sum(architecture_of(its.model).flops_per_token(its.model, cfg.data.seq_len) / 3 for its, _ in teachers_of(cfg))


def teaching(cfg: RunConfig, mesh: Mapping[str, int]) -> Teaching:
    """Of a resolved configuration, on a mesh that its teachers divide over."""
    if cfg.objective.name != "distill":
        return Teaching(0.0, 0.0, 0.0, 0.0)
    rows, d = cfg.data.batch_size // _split(mesh, "batch"), cfg.distill
    tokens = cfg.train.grad_accum * rows * cfg.data.seq_len
    teachers = teachers_of(cfg)
    each = _KNOWN_BYTES * (min(d.top_k, cfg.model.vocab_size) + d.random) + 4
    known = float(tokens * each * (1 + bool(d.anchor)))
    width = next(length.size for length in cfg.model.lengths() if length.axis == "embed")
    compared = tokens * cfg.model.depth * width * (2.0 if cfg.train.dtype == "bfloat16" else 4.0) * bool(d.layers)
    weights = sum(_weights(model, mesh) for _, model in teachers)
    reading = max((_reading(its, cfg, mesh, rows) for its, _ in teachers), default=0.0)
    return Teaching(weights, known + compared, compared, reading)


def _split(mesh: Mapping[str, int], axis: str) -> int:
    return math.prod(mesh[a] for a in RULES[axis])


def _weights(model: Any, mesh: Mapping[str, int]) -> float:
    is_names = lambda x: isinstance(x, tuple) and all(isinstance(name, str) for name in x)
    names = jax.tree.leaves(logical_axes(model), is_leaf=is_names)
    local = lambda array, axes: array.size * array.dtype.itemsize / math.prod(_split(mesh, axis) for axis in axes)
    return sum(local(array, axes) for array, axes in zip(jax.tree.leaves(model), names, strict=True))


def _reading(its: RunConfig, cfg: RunConfig, mesh: Mapping[str, int], rows: int) -> float:
    """What one layer works with, or a chunk of the logits: without a gradient, nothing is kept."""
    counted = architecture_of(its.model).activations
    if counted is None:
        return 0.0
    T, tp = cfg.data.seq_len, _split(mesh, "time_split")
    held = counted(its.model, Execution(cfg.train.dtype, "none", cfg.train.attention), rows, T, tp)
    columns = its.model.padded_vocab // _split(mesh, "vocab")
    chunk = rows * chunk_length(rows, T, columns) * columns * 8.0
    layer = 2 * held.streams / its.model.depth + held.forward
    return max(layer, chunk) + held.gathered
