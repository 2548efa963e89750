"""The interface between models and the rest of the package. `architectures.py` registers the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.config.schema import RunConfig


@dataclass(frozen=True)
class Execution:
    """How to run a forward pass; never what it computes."""

    dtype: str = "float32"
    remat: str = "none"  # a base policy, then `+` and further names to save: see `remat.py`
    attention: str = "auto"
    most_documents: int | None = None  # per sequence, if the data knows it
    padded_length: int | None = None  # sequence length after aligning documents; None: the data are aligned
    unroll: bool = False  # unroll the scan over layers, whose saved activations a GPU would copy in and out
    captures: tuple[str, ...] = ()  # further intermediates of each layer to return: see `captures.py`
    float8: bool = False  # multiply the projections in float8
    evaluates: bool = False  # no gradients follow, so an objective may compute slow metrics


@runtime_checkable
class LanguageModel(Protocol):
    """An Equinox module with arrays declared by `param`. The logits of a token are `hidden @ unembed_VD.T`."""

    cfg: Any  # an ArchitectureConfig

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        """The output projection, with `cfg.padded_vocab` rows."""

    def hidden(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None, execution: Execution = Execution()
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return (final hidden states, a report for `health` and `auxiliary_losses`)."""

    def health(self, report: Any) -> dict[str, Array]:
        """Return the health/ metrics of metrics.jsonl, scalars or short vectors, without gradients."""

    def auxiliary_losses(self, report: Any) -> dict[str, Float[Array, ""]]:
        """Return auxiliary losses per token, by name. `Architecture.auxiliary_weights` has their weights."""


def after_update(module: Any, step: Int[Array, ""], applied: Bool[Array, ""], health: Mapping[str, Array]) -> Any:
    """Call the `after_update` hook of every module that has one, inner modules first.

    A hook `after_update(self, step, applied, health) -> module` runs inside the compiled step, after the optimizer. It
    updates state without gradients (role STATE), such as the bias of a router. `step` counts updates. `applied` is
    false for a skipped step, which must not change the state. `health` is averaged over the microbatches.
    """
    is_hooked = lambda x: x is not module and hasattr(x, "after_update")
    inner = lambda x: after_update(x, step, applied, health) if is_hooked(x) else x
    module = jax.tree.map(inner, module, is_leaf=is_hooked)
    return module.after_update(step, applied, health) if hasattr(module, "after_update") else module


class AttentionShape(NamedTuple):
    """The sizes on which the choice of an attention kernel depends."""

    head_dim: int
    window: int | None


class Activations(NamedTuple):
    """Bytes per device for one microbatch."""

    streams: float  # the residual state that enters each layer, saved for the backward pass
    saved: float  # all other saved activations
    forward: float  # temporaries of one layer's forward pass
    backward: float  # temporaries of one layer's backward pass
    gathered: float  # activations gathered from other devices meanwhile
    moved: float  # memory traffic outside of matrix products, forward and backward


class RandomWeights(NamedTuple):
    """Frozen random weights: generated from a seed, never trained, in no checkpoint."""

    numbers: int  # how many
    seed: int
    digest: str  # of some of the values, to detect another random generator


class Architecture(NamedTuple):
    """A kind of model, as functions of its configuration."""

    init: Callable[..., Any]  # (cfg, *, key) -> a LanguageModel in float32
    flops_per_token: Callable[[Any, int], float]  # (cfg, seq_len) -> useful matmul FLOPs of one training token
    empty_cache: Callable[[Any, int, int, Any], Any]  # (cfg, batch, seq_len, dtype) -> an empty decoding cache, a pytree
    decode: Callable[[Any, Any, Array], tuple[Array, Any]]  # (model, cache, tokens_B) -> (next logits_BV, cache)
    attention: Callable[[Any], AttentionShape | None] = lambda cfg: None  # None: no attention
    # (cfg, execution, sequences, seq_len, tp) -> bytes per device. None: unknown, so no memory estimate.
    activations: Callable[[Any, Execution, int, int, int], Activations] | None = None
    gathers_once: bool = False  # gather the weights of all layers over fsdp up front, not layer by layer
    random_weights: Callable[[Any], RandomWeights | None] = lambda cfg: None  # None: no frozen random weights
    # (run, data source, mesh) -> a fresh model on the mesh, fitted to a few batches. None: random initial values.
    warm_start: Callable[[RunConfig, Any, Any], Any | None] = lambda run, source, mesh: None
    # Weights of the auxiliary losses, by name. The objective next_token adds them to its loss.
    auxiliary_weights: Callable[[RunConfig], Mapping[str, float]] = lambda run: {}
