"""What depends on the devices of a run: its mesh, its dtype, its kernels.
Filled in once, before anything else is done."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.architectures import architecture_of
from nash_mhc.ops.attend import best_kernel, why_not
from nash_mhc.parallel.divisibility import check_fit, misfits
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.programs import make_objective
from nash_mhc.train.state import abstract_state

_MOST_UNROLLED = 16  # layers that are unrolled without being asked to


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Starts the devices and fills in what depends on them; ConfigError for what does not fit them."""
    mesh = make_mesh(cfg.mesh, lambda shape: not misfits(cfg, shape))
    check_fit(cfg, mesh.shape)
    platform = mesh.devices.flat[0].platform
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **mesh.shape))
    cfg = for_platform(cfg, platform)
    make_objective(cfg)  # whether there is such an objective
    abstract_state(cfg)  # ... such an optimizer, and the parameters that are named
    return cfg, mesh


def for_platform(cfg: RunConfig, platform: str) -> RunConfig:
    """Fills in what depends on the kind of device (dtype, kernel, unrolling);
    refuses a kernel that cannot run there."""
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
