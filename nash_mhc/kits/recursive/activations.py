"""Estimate of a recursive model's activation memory, compared with XLA in tests/estimate/test_plan_memory.py.

A layer is counted once per application with a gradient. The other applications save nothing.
"""

from __future__ import annotations

from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.protocol import Activations, Execution
from nash_mhc.model.remat import kept_names
from nash_mhc.ops.attend import PLAIN_KERNELS, held_scores

_FLOAT32 = 4  # bytes; the dtype of scores and head norms with any compute dtype
_FULL_SEQUENCES = 5  # arrays [B, T, D] that hold all of T where tp splits T between the layers
# Arrays [B, T, D] during a layer's backward pass. The MLP over cells needs fewer: its own arrays are reused.
_STATES, _STATES_OF_CELLS = 8, 2
_PASSES = 4  # over the values of a layer: forward, recomputed forward, and backward, which counts twice


def activations(cfg: RecursiveConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Estimate one device's bytes for `rows` sequences. tp splits heads, MLP width and, between layers, time."""
    item = 2 if execution.dtype == "bfloat16" else 4
    tokens, state = rows * seq_len, cfg.width / tp * item
    with_gradient = cfg.gradient_cycles * (cfg.inner_cycles + 1) * cfg.layers
    saved = _saved(cfg, execution.remat, item, tp)
    queries, across = (0 if _across(cfg) else cfg.heads * cfg.head_dim), _across(cfg)
    # Results of the mixer and the MLP, and their gradients.
    states = (_STATES_OF_CELLS if across else _STATES) * cfg.width
    forward = ((3 * cfg.ffn + 3 * queries + states / 2) / tp + 3 * across) * item
    backward = ((6 * cfg.ffn + 10 * queries + states) / tp + 6 * across) * item
    if execution.remat.startswith("full"):  # recomputes, for one layer, what `dots` would have saved
        backward += _saved(cfg, "dots", item, tp)
    if execution.remat == "none" and cfg.inner_cycles > 1:  # nested loops: copied from one stack to another
        backward += cfg.layers * (saved + state)
    scores = rows * _scores(cfg, execution, seq_len) / tp
    moved = ((12 * cfg.width + 3 * cfg.ffn + 4 * queries) / tp + 3 * across) * item
    only_forward = (cfg.applications * cfg.layers - with_gradient) / _PASSES
    return Activations(
        streams=with_gradient * tokens * state,
        saved=with_gradient * tokens * saved,
        forward=tokens * forward + scores,
        backward=tokens * backward + scores,
        gathered=tokens * _FULL_SEQUENCES * cfg.width * item if tp > 1 else 0.0,
        moved=(with_gradient + only_forward) * tokens * _PASSES * moved,
    )


def _across(cfg: RecursiveConfig) -> float:
    """Return the hidden numbers per token of the MLP over cells, which no axis splits; 0 for attention."""
    return cfg.cells_ffn * cfg.width / (cfg.cells or 1) if cfg.mixer == "cells" else 0.0


def _saved(cfg: RecursiveConfig, remat: str, item: int, tp: int) -> float:
    """Return bytes per device, token and application of a layer, without its input."""
    queries, across = (0 if _across(cfg) else cfg.heads * cfg.head_dim), _across(cfg)
    if remat != "none":
        ffn_up = 2 * cfg.ffn / tp * item if "ffn-up" in kept_names(remat) else 0.0
        if remat.startswith("full"):
            return ffn_up
        # Queries, keys, values, or gate and up over cells; the outputs of mixer and MLP.
        return ffn_up + ((3 * queries + 2 * cfg.width) / tp + 2 * across) * item
    gathered = 2 * cfg.width if tp > 1 else 0  # full sequences, for mixer and MLP
    saved = (3 * cfg.width + 7 * queries + 6 * cfg.ffn) / tp + 6 * across + gathered
    return saved * item + (3 * cfg.heads * _FLOAT32 / tp if queries else 0)


def _scores(cfg: RecursiveConfig, execution: Execution, seq_len: int) -> float:
    """Return bytes per sequence of attention weights, their gradients and the mask, if the kernel stores them."""
    if cfg.mixer == "cells" or (cfg.causal and execution.attention not in PLAIN_KERNELS):
        return 0.0
    scores = held_scores(seq_len, None) if cfg.causal else seq_len**2
    return float(cfg.heads * scores * (3 * _FLOAT32 + 1))
