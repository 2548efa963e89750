"""What a recursive model holds of a batch, in bytes of one device.

A layer is there once for every application that the gradient goes through, and nothing is kept of the others. Held
against XLA's own figures in tests/estimate/test_plan_memory.py.
"""

from __future__ import annotations

from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.protocol import Activations, Execution
from nash_mhc.model.remat import kept_names
from nash_mhc.ops.attend import PLAIN_KERNELS, held_scores

_WIDE = 4  # bytes of float32, which scores and norms of heads have whatever the compute dtype is
_WHOLE_ROWS = 5  # arrays [B, T, D] with all of T on every device where tp splits it between the layers
# Arrays [B, T, D] while a layer runs backwards: states and gradients, as attention and the cycles take them. The layer
# across cells needs fewer, since what it works with itself is wide enough to lie where others lay.
_STATES, _STATES_OF_CELLS = 8, 2
_PASSES = 4  # over what a layer reads and writes: forwards, forwards again, and backwards, which is twice as much


def activations(cfg: RecursiveConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """For `rows` rows of a device, whose heads, ffn and time between layers are split over `tp`."""
    item = 2 if execution.dtype == "bfloat16" else 4
    tokens, entered = rows * seq_len, cfg.width / tp * item
    followed = cfg.gradient_cycles * (cfg.inner_cycles + 1) * cfg.layers
    kept = _kept(cfg, execution.remat, item, tp)
    queries, across = (0 if _across(cfg) else cfg.heads * cfg.head_dim), _across(cfg)
    # Of both feed-forward layers, or of one and attention: what they make, and the gradients of that.
    states = (_STATES_OF_CELLS if across else _STATES) * cfg.width
    forward = ((3 * cfg.ffn + 3 * queries + states / 2) / tp + 3 * across) * item
    backward = ((6 * cfg.ffn + 10 * queries + states) / tp + 6 * across) * item
    if execution.remat.startswith("full"):  # what dots would have kept is there for one layer
        backward += _kept(cfg, "dots", item, tp)
    if execution.remat == "none" and cfg.inner_cycles > 1:  # a loop in a loop: what it keeps is copied to the other's stack
        backward += cfg.layers * (kept + entered)
    scores = rows * _scores(cfg, execution, seq_len) / tp
    moved = ((12 * cfg.width + 3 * cfg.ffn + 4 * queries) / tp + 3 * across) * item
    only_forward = (cfg.applications * cfg.layers - followed) / _PASSES
    return Activations(
        streams=followed * tokens * entered,
        saved=followed * tokens * kept,
        forward=tokens * forward + scores,
        backward=tokens * backward + scores,
        gathered=tokens * _WHOLE_ROWS * cfg.width * item if tp > 1 else 0.0,
        moved=(followed + only_forward) * tokens * _PASSES * moved,
    )


def _across(cfg: RecursiveConfig) -> float:
    """Numbers a token of the layer across cells, between its two matrices, which nothing splits; 0: attention."""
    return cfg.cells_ffn * cfg.width / (cfg.cells or 1) if cfg.mixer == "cells" else 0.0


def _kept(cfg: RecursiveConfig, remat: str, item: int, tp: int) -> float:
    """Bytes of a device a token and application of a layer, beside what enters it."""
    queries, across = (0 if _across(cfg) else cfg.heads * cfg.head_dim), _across(cfg)
    if remat != "none":
        wide = 2 * cfg.ffn / tp * item if "ffn-up" in kept_names(remat) else 0.0
        if remat.startswith("full"):
            return wide
        # Queries, keys, values, or gate and up across cells; what was mixed and what feed-forward adds.
        return wide + ((3 * queries + 2 * cfg.width) / tp + 2 * across) * item
    read = 2 * cfg.width if tp > 1 else 0  # whole rows, for both parts of a layer
    kept = (3 * cfg.width + 7 * queries + 6 * cfg.ffn) / tp + 6 * across + read
    return kept * item + (3 * cfg.heads * _WIDE / tp if queries else 0)


def _scores(cfg: RecursiveConfig, execution: Execution, seq_len: int) -> float:
    """Bytes of a row: a weight, its gradient, and a mask that the cycles share, where a kernel holds them."""
    if cfg.mixer == "cells" or (cfg.causal and execution.attention not in PLAIN_KERNELS):
        return 0.0
    held = held_scores(seq_len, None) if cfg.causal else seq_len**2
    return float(cfg.heads * held * (3 * _WIDE + 1))
