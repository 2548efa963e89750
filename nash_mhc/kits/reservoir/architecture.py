"""The functions of a reservoir model for the core, and its activation memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from nash_mhc.kits.reservoir import model, ridge
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.protocol import Activations, Architecture, AttentionShape, Execution
from nash_mhc.model.traced_memory import LayerBytes, layer_bytes, trace_layer
from nash_mhc.ops.attend import PLAIN_KERNELS, SHAPES_ONLY
from nash_mhc.parallel.sharding import for_compute, one_device

_FLOAT32 = 4  # bytes; states and their inputs are float32 with any compute dtype
_PASSES = 4  # over the values of a layer: forward, recomputed forward, and backward, which counts twice
# Numbers per unit that a scan reads and writes: multipliers and states of every level, up and down.
_SCAN_TRAFFIC = {"linear": 24, "tanh": 8}


@functools.lru_cache(64)
def _group_bytes(cfg: ReservoirConfig, dtype: str, remat: str, kernel: str, seq_len: int, tp: int) -> LayerBytes:
    """Trace one sequence in a group of layers, which the compiler may interleave: reservoirs, and attention if any.

    tp splits units, heads, MLP width and, between layers, the time axis.
    """
    local = dataclasses.replace(cfg, units=cfg.units // tp, ffn=cfg.ffn // tp, heads=cfg.heads // tp)
    segments_BT, key = jnp.ones((1, seq_len), jnp.int32), jax.random.key(0)
    layout = attention_layout((1, seq_len), segments_BT, (1,), "xla")

    def mix(x_BTD: Array, layer: Any) -> tuple[Array, None]:
        return for_compute(layer, x_BTD.dtype)(x_BTD, segments_BT, local, 0), None

    def attend(x_BTD: Array, layer: Any) -> tuple[Array, None]:
        return for_compute(layer, x_BTD.dtype)(x_BTD, layout, local, kernel), None

    with one_device(seq_len, tp):
        state = jax.ShapeDtypeStruct((1, seq_len // tp, cfg.width), jnp.dtype(dtype))
        layer = jax.eval_shape(lambda: model.ReservoirLayer.init(local, key=key))
        group = [layer_bytes(trace_layer(mix, state, layer), remat)] * (cfg.attention_every or 1)
        if cfg.attention_every:
            layer = jax.eval_shape(lambda: model.AttentionLayer.init(local, key=key))
            group.append(layer_bytes(trace_layer(attend, state, layer), remat))
    return LayerBytes(*(sum(values) for values in zip(*group, strict=True)))


def activations(cfg: ReservoirConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Return one device's bytes for `rows` sequences."""
    kernel = execution.attention if execution.attention in PLAIN_KERNELS else SHAPES_ONLY
    group = _group_bytes(cfg, execution.dtype, execution.remat, kernel, seq_len, tp)
    every = cfg.attention_every or 1
    groups, item = cfg.layers // every, jnp.dtype(execution.dtype).itemsize
    # W_in does not depend on the state, so the trace does not count it. Without remat it is saved.
    input_matrices = every * 2 * cfg.width * cfg.units * _FLOAT32 / tp
    moved = (10.0 * cfg.width + 3 * cfg.ffn + 6 * cfg.units) * item + (4 + _SCAN_TRAFFIC[cfg.unit]) * cfg.units * _FLOAT32
    if cfg.attention_every:
        moved += (4 * cfg.width + 4 * cfg.heads * cfg.head_dim) * item / every
    return Activations(
        streams=groups * rows * group.streams,
        saved=groups * (rows * group.saved + (input_matrices if execution.remat == "none" else 0)),
        forward=rows * group.forward + input_matrices,
        backward=rows * group.backward + input_matrices,
        gathered=0.0,
        moved=cfg.layers * rows * seq_len * _PASSES * moved / tp,
    )


ARCHITECTURE = Architecture(
    init=model.Reservoir.init,
    flops_per_token=model.flops_per_token,
    empty_cache=model.empty_state,
    decode=model.decode,
    attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window) if cfg.attention_every else None,
    activations=activations,
    random_weights=model.random_weights,
    warm_start=ridge.warm_start,
)
