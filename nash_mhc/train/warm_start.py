"""Weights that are solved for before the first step, where a kind of model knows how (`Architecture.warm_start`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ObjectiveConfig, RunConfig
from nash_mhc.data.sources import RowSource
from nash_mhc.model.architectures import abstract_model, architecture_of
from nash_mhc.model.protocol import Execution, WarmStart
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.sharding import named_sharding, shardings
from nash_mhc.train.device_batches import host_batches, prefetched
from nash_mhc.train.programs import make_objective


def warm_model(cfg: RunConfig, source: RowSource, mesh: Mesh, say: Callable[[str], None]) -> Any | None:
    """A fresh model with the weights that one pass over the run's first batches gives; None: this kind has none.

    Sums are of all devices together. Among the solutions, the loss of one batch more decides, and it may be that the
    weights as they were drawn are the best.
    """
    how = architecture_of(cfg.model).warm_start(cfg.model)
    if how is None:
        return None
    with jax.set_mesh(mesh):
        return _solved(how, cfg, source, mesh, say)


def _solved(how: WarmStart, cfg: RunConfig, source: RowSource, mesh: Mesh, say: Callable[[str], None]) -> Any:
    whole, places = named_sharding(mesh), shardings(abstract_model(cfg.model), mesh)
    make = jax.jit(lambda key: architecture_of(cfg.model).init(cfg.model, key=key), out_shardings=places)
    model = make(jax.random.key(cfg.train.seed))
    execution = Execution(cfg.train.dtype, "none", cfg.train.attention, source.most_documents)
    plain = dataclasses.replace(cfg, objective=ObjectiveConfig())  # that of another one may want a teacher
    objective = make_objective(plain, source, most_documents=source.most_documents)

    @functools.partial(jax.jit, out_shardings=whole)
    def sums(model: Any, batch: Batch) -> Any:
        of_part = lambda part: how.sums(model, part.inputs, part.targets, part.segments, part.weights, execution)
        return jax.tree.map(lambda a: a.sum(axis=0), jax.lax.map(of_part, batch))

    @jax.jit
    def loss(model: Any, batch: Batch) -> Any:
        found = objective(model, jax.tree.map(lambda a: a[0], batch))[1].sums["loss"]
        return found.total / found.weight

    put = jax.jit(how.put, out_shardings=places)
    rows = host_batches(cfg.data, source, mesh, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed)
    total: Any = None
    try:
        batches = prefetched(itertools.islice(rows, how.batches + 1), mesh)
        for batch in itertools.islice(batches, how.batches):
            added = jax.tree.map(lambda a: np.asarray(a, np.float64), sums(model, batch))
            total = added if total is None else jax.tree.map(np.add, total, added)
        last = next(batches)
    finally:
        rows.close()  # type: ignore[attr-defined]
    best = before = float(loss(model, last))
    for weights in how.solutions(total):
        solved = put(model, weights)
        if (found := float(loss(solved, last))) < best or math.isnan(best):
            model, best = solved, found
    say(f"solved for weights from {how.batches} batches: loss {before:.4f} -> {best:.4f} on the next one")
    return model
