"""What training, evaluation, generation and benchmarks know of a model. `architectures.py` has those that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.config.schema import RunConfig


@dataclass(frozen=True)
class Execution:
    """How a forward pass is carried out; never what it computes."""

    dtype: str = "float32"
    remat: str = "none"  # with `+` and names, what else is kept: see `remat.py`
    attention: str = "auto"
    most_documents: int | None = None  # that a row holds, where the data knows it
    room: int | None = None  # places for rows whose documents begin anywhere; None: at multiples of the model's alignment
    unroll: bool = False  # the layers: a loop stacks whatever it keeps for the way back, which a GPU copies in and out
    captures: tuple[str, ...] = ()  # further intermediates of each layer to return: see `captures.py`
    float8: bool = False  # products with the projections' weights
    evaluates: bool = False  # no gradient is asked for: an objective may measure what would slow a step down


@runtime_checkable
class LanguageModel(Protocol):
    """An Equinox module whose arrays are declared with `param`. The logits of a token are `hidden @ unembed_VD.T`."""

    cfg: Any  # an ArchitectureConfig

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        """The output projection, with `cfg.padded_vocab` rows."""

    def hidden(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None, execution: Execution = Execution()
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return (what the next tokens are predicted from, a report that `health` and `penalties` read)."""

    def health(self, report: Any) -> dict[str, Array]:
        """What metrics.jsonl shows under health/: a number or a short list each. Without a gradient."""

    def penalties(self, report: Any) -> dict[str, Float[Array, ""]]:
        """Return auxiliary losses per token, under any names. `Architecture.penalties` has their weights."""


def after_update(module: Any, step: Int[Array, ""], changed: Bool[Array, ""], health: Mapping[str, Array]) -> Any:
    """Call the `after_update` hook of every module that has one, inner modules first.

    A hook `after_update(self, step, changed, health) -> module` runs inside the compiled step, after the optimizer. It
    updates state that no gradient trains (role STATE), such as the bias of a router. `step` counts updates. `changed`
    is false for a skipped step, which must change no state. `health` is the model's, averaged over the microbatches.
    """
    is_hooked = lambda x: x is not module and hasattr(x, "after_update")
    inner = lambda x: after_update(x, step, changed, health) if is_hooked(x) else x
    module = jax.tree.map(inner, module, is_leaf=is_hooked)
    return module.after_update(step, changed, health) if hasattr(module, "after_update") else module


class AttentionShape(NamedTuple):
    """What the choice of an attention kernel depends on."""

    head_dim: int
    window: int | None


class Activations(NamedTuple):
    """Bytes that one device holds of one part of a batch."""

    streams: float  # the residual state that enters each layer, kept for the backward pass
    saved: float  # all else that is kept
    forward: float  # while one layer runs, ...
    backward: float  # ... and while it runs backwards
    gathered: float  # rows put together from several devices meanwhile
    moved: float  # through its memory, outside of matrix products, forwards and backwards


class Drawn(NamedTuple):
    """Numbers of a model that follow from a seed: never trained, and in no checkpoint."""

    numbers: int
    seed: int
    digest: str  # of some of them: another generator would give others


class WarmStart(NamedTuple):
    """How weights are solved for, instead of learned, before the first step: from sums over a few batches."""

    batches: int
    # (model, tokens_BT, targets_BT, segments_BT, weights_BT, execution) -> a tree of sums, which add up
    sums: Callable[[Any, Array, Array, Array, Array, Execution], Any]
    solutions: Callable[[Any], list[Any]]  # the sums, as numpy arrays -> weights to choose among, by their loss ...
    put: Callable[[Any, Any], Any]  # ... and (model, weights) -> the model with them


class Architecture(NamedTuple):
    """A kind of model, in functions of its configuration."""

    init: Callable[..., Any]  # (cfg, *, key) -> a LanguageModel, float32
    flops_per_token: Callable[[Any, int], float]  # (cfg, seq_len): useful matrix work of one training token
    empty_cache: Callable[[Any, int, int, Any], Any]  # (cfg, batch, seq_len, dtype): what decoding begins with, a pytree
    decode: Callable[[Any, Any, Array], tuple[Array, Any]]  # (model, cache, tokens_B) -> (logits_BV of the next ones, cache)
    attention: Callable[[Any], AttentionShape | None] = lambda cfg: None  # None: there is no attention
    # (cfg, execution, rows, seq_len, tp): what a device holds of so many rows. None: nobody has counted.
    activations: Callable[[Any, Execution, int, int, int], Activations] | None = None
    gathers_once: bool = False  # weights over fsdp: all layers' before the first of them, not each layer's in its turn
    drawn: Callable[[Any], Drawn | None] = lambda cfg: None  # None: every number of it is a parameter
    warm_start: Callable[[Any], WarmStart | None] = lambda cfg: None  # None: all weights begin as they are drawn
    # Weights of the model's auxiliary losses in a run, by name; next_token and smoothed add them to their loss.
    penalties: Callable[[RunConfig], Mapping[str, float]] = lambda run: {}
    # What is known of its memory before training, for run.json and the report (see `kits/reservoir/memory.py`).
    remembers: Callable[[Any], dict[str, Any] | None] = lambda cfg: None
