"""What an objective is: from a model and a batch to the sum that is minimized, and to named sums with their weights.

Sums, not means, so that the parts of an accumulated batch add up exactly: every token weighs the same. Whatever names
an objective gives its sums, metrics.jsonl has their means, and evaluations theirs.
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
    extras: dict[str, Any] = {}  # fields of the examples after the first four, and what a feed adds to them
    carry: Any = None  # what the objective left of the step before, where it carries something (see `registry.py`)


class Sum(NamedTuple):
    """Divided by its weight it is the mean that is reported."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


Sums = dict[str, Sum]


class Aux(NamedTuple):
    """What an objective reports beside the sum that is minimized, which is among the sums as `loss`; all of it adds up.

    A sum named `loss/ce` is the cross-entropy of the targets, in nats. Where there is one, it is what metrics.jsonl and
    evaluations call `loss`, and the sum that is minimized is `objective` there (see `means`).
    """

    sums: Sums
    health: dict[str, Array]  # of the model; see `LanguageModel.health`
    carry: Any = None  # for the next step, like `Batch.carry`; this alone does not add up


Objective = Callable[[Any, Batch], tuple[Float[Array, ""], Aux]]  # of a LanguageModel


def auxiliary_losses(
    model: Any, report: Any, weights: Mapping[str, float], tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
    """Return the model's auxiliary losses (`LanguageModel.penalties`), weighted and times the number of tokens."""
    found = model.penalties(report) if any(weights.values()) else {}
    return {f"loss/{name}": weight * found.get(name, jnp.zeros(())) * tokens for name, weight in weights.items()}


def means(sums: Sums) -> dict[str, Array]:
    """Return the means under the names that metrics.jsonl has.

    `objective` is what is minimized, `loss` the cross-entropy, where the objective has one. `tokens` is what they were
    taken over, `weight/NAME` what each mean was.
    """
    terms = {name: part for name, part in sums.items() if name not in ("loss", "loss/ce")}
    named = {"loss": sums.get("loss/ce", sums["loss"]), "objective": sums["loss"]} | terms
    found = {name: part.total / jnp.maximum(part.weight, 1.0) for name, part in named.items()}
    return found | {"tokens": sums["loss"].weight} | {f"weight/{name}": part.weight for name, part in named.items()}
