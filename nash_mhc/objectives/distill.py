"""Learning from a teacher: `distill`, whose batches have what it knows of every place."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum
from nash_mhc.objectives.vocabulary import sharded_distill
from nash_mhc.ops.distill import Weights, layer_difference


def distilled(
    model: LanguageModel,
    batch: Batch,
    *,
    execution: Execution,
    parts: Weights,
    layers: float = 0.0,
    anchor: float = 0.0,
) -> tuple[Float[Array, ""], Aux]:
    """The divergence from the teacher, and what of the text itself and of its first choice was asked for.

    `layers` of the loss is how far the layers are from the teacher's; `anchor` times the divergence from what the run
    began with is added.
    """
    teacher, anchored = (batch.extras.get(name) for name in ("teacher", "anchor"))
    if teacher is None:
        raise ConfigError("--objective distill: these rows were read by no teacher; name a cache with --dataset")
    x_BTD, report = model.hidden(
        batch.inputs, batch.segments, dataclasses.replace(execution, captures=("layer_output",) if layers else ())
    )
    known = (batch.targets, batch.weights)
    out = sharded_distill(x_BTD, model.unembed_VD, *known, teacher._replace(layers=None), model.cfg.vocab_size, parts)
    loss = (1 - layers) * out.loss
    totals = {"loss": loss, "loss/ce": out.ce, "kl": out.kl, "agreement": out.agree}
    if parts.hard:
        totals["loss/hard"] = out.hard
    if layers and teacher.layers is not None:
        after_LBTD = model.after_layers(report)  # type: ignore[attr-defined]  # asked for before the run began
        totals["loss/layers"] = jnp.sum(batch.weights * layer_difference(after_LBTD, teacher.layers))
        loss += layers * totals["loss/layers"]
    if anchor and anchored is not None:
        held = sharded_distill(x_BTD, model.unembed_VD, *known, anchored, model.cfg.vocab_size, Weights(random=parts.random))
        totals["loss/anchor"] = held.loss
        loss += anchor * held.loss
    totals |= {"loss": loss, "accuracy": out.correct}
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_distill(cfg: RunConfig, execution: Execution) -> Objective:
    d = cfg.distill
    parts = Weights(d.text, d.hard, d.temperature, d.renormalised, d.random)
    return functools.partial(distilled, execution=execution, parts=parts, layers=d.layers, anchor=d.anchor)
