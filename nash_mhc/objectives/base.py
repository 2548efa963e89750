"""The interface of objectives: (model, batch) -> the loss, summed over tokens, and named sums with their weights.

Sums of microbatches add up exactly, so every token has the same weight. metrics.jsonl and eval.jsonl hold the means
under the names of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nash_mhc.config.schema import ArchitectureConfig, RunConfig


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
    """Return the model's auxiliary losses times their weights and the number of tokens."""
    found = model.auxiliary_losses(report) if any(weights.values()) else {}
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


# --- feeds: for objectives whose batches need more than the dataset's tokens, such as a teacher's logits --------------


class FeedMemory(NamedTuple):
    """Bytes per device."""

    weights: float = 0.0  # frozen models that read every batch
    fields: float = 0.0  # fields that the feed adds to a batch
    activations: float = 0.0  # of the step, in addition to those of its layers
    reading: float = 0.0  # activations while a frozen model reads a batch


class OpenFeed:
    """The feed of one run. This one leaves batches as they are."""

    described = ""  # its inputs, as flag and value, for error messages

    def identity(self, source: Any) -> str:
        """Return a digest of everything that the run reads: it changes when the batches do."""
        return str(source.identity)

    def abstract(self, source: Any, batch: Batch) -> Batch:
        """Return shapes and shardings of the batches that `reader` returns, for a batch of that source."""
        return batch

    def reader(self, source: Any) -> Callable[[Any, Batch], Batch]:
        """Return (current model, batch of that source) -> the batch with the fields that the objective needs."""
        return lambda model, batch: batch


class Feed:
    """How an objective's batches are made (`ObjectiveKind.feed`). This one leaves them as they are."""

    def opener(self, cfg: RunConfig) -> Callable[[Any], Any] | None:
        """Return what opens --dataset (data/sources.py: OpenRequest -> RowSource); None: the registered sources."""
        return None

    def open(self, cfg: RunConfig, source: Any, tokenizer: Any, mesh: Mesh) -> tuple[RunConfig, OpenFeed]:
        """Return the configuration, completed by settings of the source, and the feed; may raise ConfigError."""
        return cfg, OpenFeed()

    def models(self, cfg: RunConfig) -> list[ArchitectureConfig]:
        """Return the frozen models that read every batch; raise ConfigError for a folder that holds none."""
        return []

    def memory(self, cfg: RunConfig, mesh: Mapping[str, int]) -> FeedMemory:
        """Estimate the memory of the feed, for a mesh that divides its models."""
        return FeedMemory()
