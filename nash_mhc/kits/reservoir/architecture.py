"""The functions of a reservoir model for the core, and an estimate of its activation memory.

The memory is counted array by array and compared with XLA in tests/estimate/test_plan_memory.py. States and their
inputs are float32 with any compute dtype.
"""

from __future__ import annotations

from nash_mhc.kits.reservoir import memory, model, ridge
from nash_mhc.kits.reservoir.scans import CHUNK
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.protocol import Activations, Architecture, AttentionShape, Execution
from nash_mhc.model.remat import kept_names

_FLOAT32 = 4  # bytes
_FULL_SEQUENCES = 5  # arrays [B, T, D] that hold all of T where tp splits T between the layers
_PASSES = 4  # over the values of a layer: forward, recomputed forward, and backward, which counts twice
# Numbers per unit that a scan reads and writes: multipliers and states of every level, up and down.
_SCAN_TRAFFIC = {"linear": 24, "tanh": 8}


def activations(cfg: ReservoirConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Estimate one device's bytes for `rows` sequences. tp splits units, MLP width and, between layers, time."""
    item = 2 if execution.dtype == "bfloat16" else 4
    D, F, N = cfg.width, cfg.ffn, cfg.units
    tokens = rows * seq_len
    saved, input_matrix = _saved(cfg, execution.remat, item, seq_len, tp), 2 * D * N * _FLOAT32 / tp
    # Inputs, states and the gradients of both; gates, gated states and their gradients.
    backward = ((6 * F + 5 * D + 2 * N) * item + 6 * N * _FLOAT32) / tp
    if execution.remat.startswith("full"):  # recomputes, for one layer, what `dots` would have saved
        backward += _saved(cfg, "dots", item, seq_len, tp)
    moved = (10.0 * D + 3 * F + 6 * N) * item + (4 + _SCAN_TRAFFIC[cfg.unit]) * N * _FLOAT32
    attention_layers = cfg.layers // cfg.attention_every if cfg.attention_every else 0
    queries = cfg.heads * cfg.head_dim
    group = cfg.attention_every or 1  # layers that the compiler may interleave
    attention = {"n": 3 * D + 7 * queries, "d": 3 * queries + D, "f": 0}[execution.remat[0]] / tp * item
    moved += attention_layers / cfg.layers * (4 * D + 4 * queries) * item
    backward += (attention_layers > 0) * 10 * queries / tp * item
    return Activations(
        streams=(cfg.layers + attention_layers) * tokens * D / tp * item,
        # W_in is generated where it is used; without remat it is saved, too.
        saved=cfg.layers * (tokens * saved + (input_matrix if execution.remat == "none" else 0))
        + attention_layers * tokens * attention,
        forward=group * (tokens * (3 * F * item + 8 * N * _FLOAT32) / tp + input_matrix),
        backward=group * (tokens * backward + input_matrix),
        gathered=tokens * _FULL_SEQUENCES * D * item if tp > 1 else 0.0,
        moved=cfg.layers * tokens * _PASSES * moved / tp,
    )


def _saved(cfg: ReservoirConfig, remat: str, item: int, seq_len: int, tp: int) -> float:
    """Return bytes per device, token and layer, without the layer's input."""
    D, F, N = cfg.width, cfg.ffn, cfg.units
    if remat != "none":
        ffn_up = 2 * F / tp * item if "ffn-up" in kept_names(remat) else 0.0
        if remat.startswith("full"):
            return ffn_up
        return ffn_up + (2 * N * _FLOAT32 + 2 * D * item) / tp  # inputs of the units, and both readouts
    # Residual and readout, full sequences after both norms, gates before and after the sigmoid, states, gated states.
    saved = (D + 6 * N + 6 * F) / tp * item + 2 * D * item + 2 * _FLOAT32 / tp
    if cfg.unit == "tanh":  # inputs and states, in whole chunks
        saved += 4 * N / tp * _FLOAT32 * (-(-seq_len // CHUNK) * CHUNK / seq_len)
    return saved


ARCHITECTURE = Architecture(
    init=model.Reservoir.init,
    flops_per_token=model.flops_per_token,
    empty_cache=model.empty_state,
    decode=model.decode,
    attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window) if cfg.attention_every else None,
    activations=activations,
    random_weights=model.random_weights,
    remembers=memory.as_dict,
    warm_start=ridge.warm_start,
)
