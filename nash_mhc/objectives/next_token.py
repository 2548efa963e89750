"""Prediction of the next token: `next_token`, and `smoothed`, which gives a part of the target to all other tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.config.schema import RunConfig
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Objective, Sum
from nash_mhc.objectives.vocabulary import sharded_xent


def next_token(
    model: LanguageModel,
    batch: Batch,
    *,
    execution: Execution,
    z_weight: float = 0.0,
    smoothing: float = 0.0,
    penalties: Mapping[str, float] = {},
) -> tuple[Float[Array, ""], Aux]:
    """Cross-entropy of the next token, z-loss, and what the model itself has to be kept from, weighted by `penalties`.

    `smoothing`: the share of each target that goes to the whole vocabulary, evenly.
    """
    x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
    V = model.cfg.vocab_size
    out = sharded_xent(x_BTD, model.unembed_VD, batch.targets, batch.weights, V, z_weight, smoothing)
    known = model.penalties(report) if any(penalties.values()) else {}
    extra = {name: weight * known.get(name, jnp.zeros(())) * out.weight for name, weight in penalties.items()}
    loss = sum(extra.values(), out.loss)
    totals = {"loss": loss, "loss/ce": out.ce, "loss/z": z_weight * out.z}
    if smoothing:
        totals["loss/smoothing"] = smoothing * (out.uniform - out.ce)
    totals |= {f"loss/{name}": term for name, term in extra.items()} | {"accuracy": out.correct}
    if execution.evaluates:
        totals["entropy"] = out.entropy
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_next_token(cfg: RunConfig, execution: Execution, smoothing: float = 0.0) -> Objective:
    penalties = {"sparsity": cfg.optim.sparsity}
    return functools.partial(
        next_token, execution=execution, z_weight=cfg.optim.z_loss, smoothing=smoothing, penalties=penalties
    )


def make_smoothed(cfg: RunConfig, execution: Execution) -> Objective:
    return make_next_token(cfg, execution, cfg.objective.label_smoothing)
