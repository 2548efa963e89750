"""What a layer of a reservoir model holds of a batch, in bytes of one device.

Counted from what the code keeps, array by array, and compared with XLA's figures in tests/estimate/test_plan_memory.py.
States and what drives them are float32 whatever the compute dtype is: they add up over many tokens.
"""

from __future__ import annotations

from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.kits.reservoir.tanh_scan import CHUNK
from nash_mhc.model.protocol import Activations, Execution
from nash_mhc.model.remat import kept_names

_WIDE = 4  # bytes of float32
_WHOLE_ROWS = 5  # arrays [B, T, D] with all of T on every device where tp splits it between the layers
_PASSES = 4  # over what a layer reads and writes: forwards, forwards again, and backwards, which is twice as much
# Numbers a unit that a scan over all tokens reads and writes: multipliers and states of every level, up and down.
_OF_SCAN = {"linear": 24, "tanh": 8}


def activations(cfg: ReservoirConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """For `rows` rows of a device, whose units, ffn and time between layers are split over `tp`."""
    item = 2 if execution.dtype == "bfloat16" else 4
    D, F, N = cfg.width, cfg.ffn, cfg.units
    tokens = rows * seq_len
    kept, input_matrix = _kept(cfg, execution.remat, item, seq_len, tp), 2 * D * N * _WIDE / tp
    # Driven, states, and both of their gradients; gates, what they leave, and gradients.
    backward = ((6 * F + 5 * D + 2 * N) * item + 6 * N * _WIDE) / tp
    if execution.remat.startswith("full"):  # what dots would have kept is there for one layer
        backward += _kept(cfg, "dots", item, seq_len, tp)
    moved = (10.0 * D + 3 * F + 6 * N) * item + (4 + _OF_SCAN[cfg.unit]) * N * _WIDE
    # Attention in between: as in a recursive model, whose layers have no more than that and a feed-forward layer.
    between = cfg.layers // cfg.attention_every if cfg.attention_every else 0
    queries = cfg.heads * cfg.head_dim
    at_once = cfg.attention_every or 1  # layers of a group, which the compiler does not run strictly one after the other
    of_attention = {"n": 3 * D + 7 * queries, "d": 3 * queries + D, "f": 0}[execution.remat[0]] / tp * item
    moved += between / cfg.layers * (4 * D + 4 * queries) * item
    backward += (between > 0) * 10 * queries / tp * item
    return Activations(
        streams=(cfg.layers + between) * tokens * D / tp * item,
        # W_in is drawn where it is used; where everything is kept, so is it.
        saved=cfg.layers * (tokens * kept + (input_matrix if execution.remat == "none" else 0))
        + between * tokens * of_attention,
        forward=at_once * (tokens * (3 * F * item + 8 * N * _WIDE) / tp + input_matrix),
        backward=at_once * (tokens * backward + input_matrix),
        gathered=tokens * _WHOLE_ROWS * D * item if tp > 1 else 0.0,
        moved=cfg.layers * tokens * _PASSES * moved / tp,
    )


def _kept(cfg: ReservoirConfig, remat: str, item: int, seq_len: int, tp: int) -> float:
    """Bytes of a device a token and layer, beside what enters it."""
    D, F, N = cfg.width, cfg.ffn, cfg.units
    if remat != "none":
        wide = 2 * F / tp * item if "ffn-up" in kept_names(remat) else 0.0
        if remat.startswith("full"):
            return wide
        return wide + (2 * N * _WIDE + 2 * D * item) / tp  # what drives the units, and what is read of both parts of them
    # x + read, and whole rows, normed twice; gates before and after their sigmoid, both parts, what is left of them.
    kept = (D + 6 * N + 6 * F) / tp * item + 2 * D * item + 2 * _WIDE / tp
    if cfg.unit == "tanh":  # what drives them and what they were, in whole chunks
        kept += 4 * N / tp * _WIDE * (-(-seq_len // CHUNK) * CHUNK / seq_len)
    return kept
