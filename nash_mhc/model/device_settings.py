"""Resolve the settings that depend on the kind of device: dtype, attention kernel, unrolling."""

from __future__ import annotations

import dataclasses

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.architectures import architecture_of
from nash_mhc.ops.attend import best_kernel, why_not

_MOST_UNROLLED = 16  # layers that `--unroll auto` unrolls


def for_platform(cfg: RunConfig, platform: str) -> RunConfig:
    """Fill in the settings that are auto; ConfigError for a kernel that cannot run there."""
    dtype = cfg.train.dtype if cfg.train.dtype != "auto" else ("float32" if platform == "cpu" else "bfloat16")
    attention = _attention_kernel(cfg, platform, dtype)
    unroll = cfg.train.unroll
    if unroll == "auto":  # gathered weights of several devices: not measured; many layers: a compiler that takes minutes
        one_gpu = platform == "gpu" and set(cfg.mesh.axes.values()) == {1}
        unroll = "yes" if one_gpu and cfg.model.depth <= _MOST_UNROLLED else "no"
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype, attention=attention, unroll=unroll))


def _attention_kernel(cfg: RunConfig, platform: str, dtype: str) -> str:
    attention = architecture_of(cfg.model).attention(cfg.model)
    if attention is None:
        return "xla"
    shape = (platform, dtype, cfg.data.seq_len, *attention)
    if cfg.train.attention == "auto":
        return best_kernel(*shape)
    if reason := why_not(cfg.train.attention, *shape):
        raise ConfigError(f"--attention {cfg.train.attention} {reason}; leave it at auto ({best_kernel(*shape)} here)")
    return cfg.train.attention
