"""The interface of objectives: (model, batch) -> the loss, summed over tokens, and named sums with their weights.

Sums of microbatches add up exactly, so every token has the same weight. metrics.jsonl and eval.jsonl hold the means
under the names of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Batch(NamedTuple):
    """Packed sequences. Segment 0 is padding; targets are the inputs shifted by one within a document."""

    inputs: Int[Array, "*A B T"]
    targets: Int[Array, "*A B T"]
    segments: Int[Array, "*A B T"]
    weights: Float[Array, "*A B T"]  # of each target in the loss
    extras: dict[str, Any] = {}  # further fields of the examples, and outputs of teachers
    carry: Any = None  # values from the previous step, for objectives that pass some on (see `registry.py`)


class Sum(NamedTuple):
    """A sum over tokens; divided by its weight, it is the reported mean."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


Sums = dict[str, Sum]


class Aux(NamedTuple):
    """The reports of an objective, which add up over microbatches. The sum that is minimized is among them as `loss`.

    A sum named `loss/ce` is the cross-entropy of the targets, in nats. If there is one, metrics.jsonl and eval.jsonl
    call it `loss`, and call the sum that is minimized `objective` (see `means`).
    """

    sums: Sums
    health: dict[str, Array]  # of the model; see `LanguageModel.health`
    carry: Any = None  # for the next step, like `Batch.carry`; stacked, not added up


Objective = Callable[[Any, Batch], tuple[Float[Array, ""], Aux]]  # of a LanguageModel


def auxiliary_losses(
    model: Any, report: Any, weights: Mapping[str, float], tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
    """Return the model's auxiliary losses (`LanguageModel.penalties`), times their weights and the number of tokens."""
    found = model.penalties(report) if any(weights.values()) else {}
    return {f"loss/{name}": weight * found.get(name, jnp.zeros(())) * tokens for name, weight in weights.items()}


def means(sums: Sums) -> dict[str, Array]:
    """Return the means under their names in metrics.jsonl.

    `objective` is the loss that is minimized, and `loss` the cross-entropy if the objective has one. `tokens` is the
    weight of the loss, `weight/NAME` that of each mean.
    """
    terms = {name: part for name, part in sums.items() if name not in ("loss", "loss/ce")}
    named = {"loss": sums.get("loss/ce", sums["loss"]), "objective": sums["loss"]} | terms
    values = {name: part.total / jnp.maximum(part.weight, 1.0) for name, part in named.items()}
    return values | {"tokens": sums["loss"].weight} | {f"weight/{name}": part.weight for name, part in named.items()}
