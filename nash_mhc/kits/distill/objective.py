"""The objective `distill`: the divergence from a teacher."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.kits.distill.feed import DistillFeed
from nash_mhc.kits.distill.loss import LossWeights, layer_difference, sharded_distill
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum
from nash_mhc.objectives.registry import TEXT, ObjectiveKind


def distilled(
    model: LanguageModel, batch: Batch, *, execution: Execution, parts: LossWeights, layers: float = 0.0, anchor: float = 0.0
) -> tuple[Float[Array, ""], Aux]:
    """Return the loss and its parts.

    layers: share of the loss that is the distance of the layers' outputs from the teacher's. anchor: weight of the
    divergence from the initial model, which is added.
    """
    teacher, initial = (batch.extras.get(name) for name in ("teacher", "anchor"))
    if teacher is None:
        raise ConfigError("--objective distill: the batches contain no teacher logits; give a cache with --dataset")
    x_BTD, report = model.hidden(
        batch.inputs, batch.segments, dataclasses.replace(execution, captures=("layer_output",) if layers else ())
    )
    targets = (batch.targets, batch.weights)
    out = sharded_distill(x_BTD, model.unembed_VD, *targets, teacher._replace(layers=None), model.cfg.vocab_size, parts)
    loss = (1 - layers) * out.loss
    totals = {"loss": loss, "loss/ce": out.ce, "kl": out.kl, "agreement": out.agree}
    if parts.hard:
        totals["loss/hard"] = out.hard
    if layers and teacher.layers is not None:
        after_LBTD = model.after_layers(report)  # type: ignore[attr-defined]  # the feed checks that the model has it
        totals["loss/layers"] = jnp.sum(batch.weights * layer_difference(after_LBTD, teacher.layers))
        loss += layers * totals["loss/layers"]
    if anchor and initial is not None:
        only_kl = LossWeights(random=parts.random)
        kept = sharded_distill(x_BTD, model.unembed_VD, *targets, initial, model.cfg.vocab_size, only_kl)
        totals["loss/anchor"] = kept.loss
        loss += anchor * kept.loss
    totals |= {"loss": loss, "accuracy": out.correct}
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_distill(cfg: RunConfig, execution: Execution) -> Objective:
    d = cfg.section(DistillConfig)
    parts = LossWeights(d.text, d.hard, d.temperature, d.renormalised, d.random)
    return functools.partial(distilled, execution=execution, parts=parts, layers=d.layers, anchor=d.anchor)


DISTILL = ObjectiveKind(make_distill, examples=TEXT, feed=DistillFeed())
