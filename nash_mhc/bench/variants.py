"""The relatives that `bench quality` compares: the run's model with parts of it replaced, and as many parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import Mesh

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, ModelConfig, RunConfig
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.device_settings import for_platform

# What each variant changes in the run's model. Plain attention gets no window: it sees the whole row, its best form.
_DENSE: dict[str, Any] = {"scales": 1, "window": None, "full_every": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "nash-mhc": {},
    "dense": {**_DENSE, "conv_taps": 0, "residual": "plain"},
    "dense-mhc": {**_DENSE, "conv_taps": 0},
    "dense-conv-mhc": _DENSE,
    "dense-conv": {**_DENSE, "residual": "plain"},
    "multiscale-plain": {"residual": "plain"},
}
_TOLERANCE = 0.03  # of the parameters


def chosen(names: str) -> list[str]:
    """`dense,nash-mhc` -> the variants of that name, each once; ConfigError for a name that is none."""
    found = list(dict.fromkeys(name.strip().lower() for name in names.split(",")))
    for name in found:
        if name not in VARIANTS:
            hint = did_you_mean(name, VARIANTS) or f"; there are {', '.join(VARIANTS)}"
            raise ConfigError(f"--variants: unknown variant {name!r}{hint}")
    return found


def of_our_own(cfg: RunConfig) -> ModelConfig:
    """The model of the run, which the variants change; ConfigError."""
    if not isinstance(cfg.model, ModelConfig):
        raise ConfigError(f"bench quality compares variants of {ModelConfig.architecture}, not of {cfg.model.architecture}")
    return cfg.model


def matched(model: ModelConfig, parameters: int, unit: int) -> ModelConfig:
    """`model` with the FFN width, a multiple of `unit`, that brings it closest to so many parameters."""
    at = lambda ffn: count_parameters(dataclasses.replace(model, ffn=ffn))
    slope = at(2 * unit) - at(unit)  # every unit of width adds the same
    return dataclasses.replace(model, ffn=unit * max(1, 1 + round((parameters - at(unit)) / slope)))


def relative(name: str, cfg: RunConfig, base: RunConfig, mesh: Mesh) -> RunConfig:
    """The run of one variant. `cfg` is the run as asked for,
    `base` the same with the devices' own choices filled in."""
    if not VARIANTS[name]:
        return base
    target = count_parameters(cfg.model)
    model = matched(dataclasses.replace(of_our_own(cfg), **VARIANTS[name]), target, math.lcm(8, mesh.shape["tp"]))
    if abs((count := count_parameters(model)) / target - 1) > _TOLERANCE:
        raise ConfigError(
            f"variant {name}: no FFN width brings it within {_TOLERANCE:.0%} of {target:,} parameters (the nearest, "
            f"{model.ffn}, has {count:,}); take a larger model or a smaller --mesh-tp"
        )
    # The kernel is chosen anew: one that suits a window need not be the best without.
    run = dataclasses.replace(base, model=model, train=dataclasses.replace(base.train, attention=cfg.train.attention))
    return for_platform(run, base.mesh.platform)
