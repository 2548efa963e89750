"""Next-token prediction: `next_token`, and `smoothed`, with label smoothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from jaxtyping import Array, Float

from nash_mhc.config.schema import RunConfig
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum, auxiliary_losses
from nash_mhc.objectives.vocabulary import sharded_xent


def next_token(
    model: LanguageModel,
    batch: Batch,
    *,
    execution: Execution,
    z_weight: float = 0.0,
    smoothing: float = 0.0,
    auxiliary_weights: Mapping[str, float] = {},
) -> tuple[Float[Array, ""], Aux]:
    """Sum the cross-entropy of the next token, the z-loss, and the weighted auxiliary losses of the model.

    `smoothing` is the share of each target that is spread over the whole vocabulary.
    """
    x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
    V = model.cfg.vocab_size
    out = sharded_xent(x_BTD, model.unembed_VD, batch.targets, batch.weights, V, z_weight, smoothing)
    extra = auxiliary_losses(model, report, auxiliary_weights, out.weight)
    loss = sum(extra.values(), out.loss)
    totals = {"loss": loss, "loss/ce": out.ce, "loss/z": z_weight * out.z}
    if smoothing:
        totals["loss/smoothing"] = smoothing * (out.uniform - out.ce)
    totals |= extra | {"accuracy": out.correct}
    if execution.evaluates:
        totals["entropy"] = out.entropy
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_next_token(cfg: RunConfig, execution: Execution, smoothing: float = 0.0) -> Objective:
    auxiliary_weights = architecture_of(cfg.model).auxiliary_weights(cfg)
    return functools.partial(
        next_token, execution=execution, z_weight=cfg.optim.z_loss, smoothing=smoothing, auxiliary_weights=auxiliary_weights
    )


def make_smoothed(cfg: RunConfig, execution: Execution) -> Objective:
    return make_next_token(cfg, execution, cfg.objective.label_smoothing)
