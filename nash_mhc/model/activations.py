"""What a layer of ours holds of a batch, in bytes of one device: kept for the backward pass, and while it works.

Counted from what the code keeps, array by array: `remat_policy` in `remat.py` says which. Held against XLA's own
figures in tests/estimate/test_plan_memory.py, and read from its buffers: docs/planning.md tells what was found in them.
"""

from __future__ import annotations

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.protocol import Activations, Execution
from nash_mhc.model.remat import DOTS, kept_names
from nash_mhc.ops.attend import PLAIN_KERNELS, held_scores

_WIDE = 4  # bytes of float32, which coefficients, bids and scores have whatever the compute dtype is
# Arrays [B, T, D] with all of T on every device while a layer runs backwards, where T is split between the layers: what
# attention and the feed-forward layer read, and the gradients that come back from queries, keys and values; a
# convolution reads and writes two more.
_WHOLE_ROWS, _WHOLE_ROWS_OF_CONV = 5, 2
# Sets of streams beside the kept ones: gradients before and after, and those between attention and feed-forward.
_STREAM_SETS = 2
_PASSES = 4  # over what a layer reads and writes: forwards, forwards again, and backwards, which is twice as much


def activations(cfg: ModelConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """For `rows` rows of a device, whose heads, ffn and time between layers are split over `tp`."""
    item = 2 if execution.dtype == "bfloat16" else 4
    tokens = rows * seq_len
    streams = cfg.streams if cfg.mixings else 1
    names = None if execution.remat == "none" else kept_names(execution.remat)
    if names is not None and execution.attention in PLAIN_KERNELS:
        names -= {"attention"}  # these mark nothing
    split, whole = _kept(cfg, names, tp)
    entered = streams * cfg.width / tp * item
    kept = (split / tp + whole) * item + _small(cfg, names) / tp * _WIDE
    mixing = (_STREAM_SETS + cfg.mixings - 1) * streams * cfg.width if cfg.mixings else 0
    forward = (3 * cfg.ffn + mixing) / tp * item
    backward = (_of_backward(cfg) + mixing) / tp * item
    if names is not None:  # what is not kept is there for one layer; of what is kept, nothing is made again
        again = sum(size for name, size in _named(cfg).items() if name in (DOTS | {"mixed"}) - names)
        backward += (again - (2 * cfg.ffn if "ffn-up" in names else 0)) / tp * item
        backward += (_small(cfg, names | DOTS) - _small(cfg, names)) / tp * _WIDE
    whole_rows = _WHOLE_ROWS + (_WHOLE_ROWS_OF_CONV if cfg.conv_taps else 0)
    gathered = whole_rows * cfg.width * item if tp > 1 else 0
    scores = _scores(cfg, seq_len) / tp if execution.attention in PLAIN_KERNELS else 0
    return Activations(
        streams=cfg.layers * tokens * entered,
        saved=cfg.layers * tokens * kept,
        forward=tokens * forward + rows * scores * (_WIDE + 1),  # a score and a byte of mask
        backward=tokens * backward + rows * scores * 2 * _WIDE,  # a weight and its gradient
        gathered=tokens * gathered,
        moved=cfg.layers * tokens * _PASSES * _moved(cfg) / tp * item,
    )


def _kept(cfg: ModelConfig, names: frozenset[str] | None, tp: int) -> tuple[float, float]:
    """(numbers a token and layer that are split over tp, those that are not), beside the streams that enter a layer: of
    what is kept by name, or of everything."""
    if names is not None:
        return float(sum(size for name, size in _named(cfg).items() if name in names)), 0.0
    D, F, R = cfg.width, cfg.ffn, cfg.streams
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    mhc, coarse = cfg.mixings > 0, cfg.strides[1:]
    read = (2.0 + bool(cfg.conv_taps)) * D  # what the convolution, attention and the feed-forward layer read
    attention = queries + 2.0 * keys + 2 * queries + keys + queries  # projected; turned; found
    if coarse:  # pooled keys; queries by block, late keys and values, what was found, by token; what is mixed of it
        attention += keys + queries + sum(2 * queries + queries + 3 * keys / stride for stride in coarse) + queries
    else:
        attention -= keys  # values are kept once
    # Streams in the middle, read twice, written twice; read and added to, written once; or x, and x + y.
    residual = (R * D + 4 * D) if cfg.mixings == 2 else 4 * D if mhc else 2 * D
    kept = attention + residual + 6 * F
    kept -= 0 if mhc else D  # x itself is what enters
    return (kept, read) if tp > 1 else (kept + read, 0.0)


def _named(cfg: ModelConfig) -> dict[str, float]:
    """Numbers a token and layer of what `--remat-keep` has a name for, without those that `_small` counts."""
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    mhc, coarse = cfg.mixings > 0, cfg.strides[1:]
    return {
        "qkv": queries + 2.0 * keys,
        "attention": float(cfg.scales * queries),
        "mixed": float(queries if coarse else 0),
        "output": float(cfg.width),
        "ffn-up": 2.0 * cfg.ffn,
        "ffn-down": float(cfg.width if mhc else 0),  # a plain sum does not need it again
        "read": float(cfg.mixings * cfg.width),
    }


def _of_backward(cfg: ModelConfig) -> float:
    """Numbers a token while a layer runs backwards, split over tp.

    Of the feed-forward layer gate, up, their product and the gradients of all three; queries, keys and values as they
    are projected, turned and transposed, with their gradients.
    """
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    return 6.0 * cfg.ffn + 4 * cfg.width + 5 * queries + 5 * keys + 4 * queries * (cfg.scales - 1)


def _moved(cfg: ModelConfig) -> float:
    """Numbers a token and layer that go through memory forwards outside of matrix products, read or written."""
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    passed = 10.0 * cfg.width + 2 * (queries + keys) + 3 * cfg.ffn  # norms and sums; turned; gate and product
    if cfg.mixings:
        passed += cfg.mixings * 4 * cfg.streams * cfg.width  # for the maps, to be read, to be mixed, and written
    if cfg.scales > 1:
        passed += 6 * cfg.scales * queries  # by block and back, pooled, mixed
    return passed


def _small(cfg: ModelConfig, names: frozenset[str] | None) -> float:
    """Numbers a token and layer in float32: coefficients of the streams' maps, bids of the scales, what is reported."""
    if not cfg.mixings:
        return 0.0 if names is not None else 3.0 * cfg.heads + 2
    R, M = cfg.streams, cfg.streams**2 + 2 * cfg.streams
    reported = R + 12.0
    if names is not None:
        return reported + ("coefficients" in names) * cfg.mixings * ((R + 1.0) * M + 1)
    return reported + cfg.mixings * (4 * M + 1) + 5 * cfg.scales * cfg.heads


def _scores(cfg: ModelConfig, seq_len: int) -> float:
    """Scores of a row that the plain kernel holds."""
    finest = max(held_scores(seq_len, window) for window in cfg.windows)
    coarse = sum(stride * held_scores(seq_len // stride, None) for stride in cfg.strides[1:])
    return float(cfg.heads * (finest + coarse))
