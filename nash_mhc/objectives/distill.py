"""Learning from a teacher: `distill`, whose batches have what it knows of every place."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum
from nash_mhc.objectives.vocabulary import sharded_distill
from nash_mhc.ops.distill import Weights


def distilled(model: LanguageModel, batch: Batch, *, execution: Execution, parts: Weights) -> tuple[Float[Array, ""], Aux]:
    """The divergence from the teacher, and what of the text itself and of its first choice was asked for."""
    if batch.teacher is None:
        raise ConfigError("--objective distill: these rows were read by no teacher; name a cache with --dataset")
    x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
    V = model.cfg.vocab_size
    out = sharded_distill(x_BTD, model.unembed_VD, batch.targets, batch.weights, batch.teacher, V, parts)
    totals = {"loss": out.loss, "loss/ce": out.ce, "kl": out.kl, "agreement": out.agree}
    if parts.hard:
        totals["loss/hard"] = out.hard
    totals["accuracy"] = out.correct
    return out.loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_distill(cfg: RunConfig, execution: Execution) -> Objective:
    d = cfg.distill
    parts = Weights(d.text, d.hard, d.temperature, d.renormalised)
    return functools.partial(distilled, execution=execution, parts=parts)
