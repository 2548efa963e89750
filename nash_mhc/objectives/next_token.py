"""Next-token prediction, the objective `next_token`."""

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
    auxiliary_weights: Mapping[str, float] = {},
) -> tuple[Float[Array, ""], Aux]:
    """Sum the cross-entropy of the next token, the z-loss, and the weighted auxiliary losses of the model."""
    x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
    V = model.cfg.vocab_size
    out = sharded_xent(x_BTD, model.unembed_VD, batch.targets, batch.weights, V, z_weight)
    extra = auxiliary_losses(model, report, auxiliary_weights, out.weight)
    loss = sum(extra.values(), out.loss)
    totals = {"loss": loss, "loss/ce": out.ce, "loss/z": z_weight * out.z, **extra, "accuracy": out.correct}
    if execution.evaluates:
        totals["entropy"] = out.entropy
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_next_token(cfg: RunConfig, execution: Execution) -> Objective:
    auxiliary_weights = architecture_of(cfg.model).auxiliary_weights(cfg)
    return functools.partial(next_token, execution=execution, z_weight=cfg.optim.z_loss, auxiliary_weights=auxiliary_weights)
