"""The seam for objectives whose batches need more than the dataset's tokens, such as a teacher's logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from nash_mhc.config.schema import ArchitectureConfig, RunConfig
from nash_mhc.objectives.base import Batch


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
        """Return what opens --dataset (data/sources.py: Opening -> RowSource); None: the registered sources."""
        return None

    def open(
        self, cfg: RunConfig, source: Any, tokenizer: Any, mesh: Mesh, say: Callable[[str], None]
    ) -> tuple[RunConfig, OpenFeed]:
        """Return the configuration, completed by what the source records, and the feed; ConfigError."""
        return cfg, OpenFeed()

    def models(self, cfg: RunConfig) -> list[ArchitectureConfig]:
        """Return the frozen models that read every batch; ConfigError for a folder that holds none."""
        return []

    def memory(self, cfg: RunConfig, mesh: Mapping[str, int]) -> FeedMemory:
        """Estimate the memory of the feed, for a mesh that divides its models."""
        return FeedMemory()
