"""RoPE scaling for longer contexts than the model was first trained on: `--model-rope-scaling`.

linear,factor=4                              divide all frequencies by 4
llama3,factor=8,low=1,high=4,original=8192   divide low frequencies, keep high ones, interpolate between
yarn,factor=4,original=32768                 the same with YaRN's bounds, and scale attention scores
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError

_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low", "high", "original"), "yarn": ("factor", "original")}
_OPTIONAL = {"linear": (), "llama3": (), "yarn": ("fast", "slow", "amplitude", "whole")}


@dataclass(frozen=True)
class RopeScaling:
    kind: str
    factor: float  # extension of the context
    original: float = 0.0  # context length before the extension
    low: float = 1.0  # llama3: pairs with fewer turns over `original` are divided by the whole factor
    high: float = 4.0  # llama3: pairs with more turns are unchanged
    fast: float = 32.0  # yarn: upper bound in turns
    slow: float = 1.0  # yarn: lower bound in turns
    amplitude: float | None = None  # yarn: factor on cos and sin; None: 0.1 ln factor + 1
    whole: float = 1.0  # yarn: 1 rounds the bounds outwards to whole pairs, 0 does not

    @staticmethod
    def parse(text: str) -> RopeScaling:
        """Parse the text of the key; ConfigError if it is invalid."""
        kind, *parts = (part.strip() for part in text.split(","))
        where = f"model.rope_scaling {text!r}"
        if kind not in _REQUIRED:
            raise ConfigError(f"{where}: the first word must be one of {', '.join(_REQUIRED)}, such as linear,factor=4")
        values: dict[str, float] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in (*_REQUIRED[kind], *_OPTIONAL[kind]):
                known = ", ".join((*_REQUIRED[kind], *_OPTIONAL[kind]))
                raise ConfigError(f"{where}: {kind} has no {name!r}; it has {known}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigError(f"{where}: {name} must be a number, not {value!r}") from None
        if missing := [name for name in _REQUIRED[kind] if name not in values]:
            raise ConfigError(f"{where}: {kind} needs {missing[0]}=NUMBER as well")
        scaling = RopeScaling(kind, **values)
        if not (scaling.factor >= 1 and math.isfinite(scaling.factor)):
            raise ConfigError(f"{where}: factor must be at least 1")
        if "original" in _REQUIRED[kind] and not scaling.original > 0:
            raise ConfigError(f"{where}: original must be above 0")
        if kind == "llama3" and not scaling.high > scaling.low > 0:
            raise ConfigError(f"{where}: high must be above low, and low above 0")
        if kind == "yarn" and not scaling.fast > scaling.slow > 0:
            raise ConfigError(f"{where}: fast must be above slow, and slow above 0")
        return scaling

    def __str__(self) -> str:
        """Return text that `parse` reads back, without defaults."""
        changed = [name for name in _OPTIONAL[self.kind] if getattr(self, name) != getattr(RopeScaling, name)]
        return ",".join([self.kind, *(f"{name}={getattr(self, name):.17g}" for name in (*_REQUIRED[self.kind], *changed))])

    @property
    def cos_and_sin(self) -> float:
        """Return the factor on cos and sin."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.amplitude is None else self.amplitude

    def multipliers(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """Return a factor for each pair's frequency theta^(-2i/H), from 1 (unchanged) to 1/factor."""
        half, slowed = head_dim // 2, 1 / self.factor
        turns = [self.original * theta ** (-i / half) / (2 * math.pi) for i in range(half)]
        if self.kind == "linear":
            return (slowed,) * half
        if self.kind == "llama3":
            ramp = [(t - self.low) / (self.high - self.low) for t in turns]
        else:
            # The (fractional) pair that turns `number` times; the ramp is linear in the index of the pair.
            pair = lambda number: half * math.log(self.original / (number * 2 * math.pi)) / math.log(theta)
            first, last = pair(self.fast), pair(self.slow)
            if self.whole:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            last += 0.001 if first == last else 0
            ramp = [1 - (i - first) / (last - first) for i in range(half)]
        clipped = [min(max(r, 0.0), 1.0) for r in ramp]
        return tuple(slowed * (1 - r) + r for r in clipped)
