"""Rotary frequencies that were changed so that a model reads further than it was first trained: `--model-rope-scaling`.

linear,factor=4                              every position counts a quarter
llama3,factor=8,low=1,high=4,original=8192   slow rotations do, fast ones stay, with a ramp between them
yarn,factor=4,original=32768                 the same by number of turns, and scores are sharpened a little
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError

# Of each kind: what it cannot do without, and what it may have beside it.
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low", "high", "original"), "yarn": ("factor", "original")}
_MAY = {"linear": (), "llama3": (), "yarn": ("fast", "slow", "amplitude", "whole")}


@dataclass(frozen=True)
class RopeScaling:
    kind: str
    factor: float  # how many times further positions go
    original: float = 0.0  # positions of the first training
    low: float = 1.0  # llama3: with fewer turns than this over them, a pair is slowed by the whole factor
    high: float = 4.0  # llama3: with more, not at all
    fast: float = 32.0  # yarn: the same two bounds
    slow: float = 1.0
    amplitude: float | None = None  # yarn: of cos and sin; None: 0.1 ln factor + 1
    whole: float = 1.0  # yarn: 1 rounds the two bounds outwards to whole pairs, 0 does not

    @staticmethod
    def parse(text: str) -> RopeScaling:
        """ConfigError where it says nothing that there is."""
        kind, *parts = (part.strip() for part in text.split(","))
        where = f"model.rope_scaling {text!r}"
        if kind not in _NEEDED:
            raise ConfigError(f"{where}: the first word must be one of {', '.join(_NEEDED)}, such as linear,factor=4")
        values: dict[str, float] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in (*_NEEDED[kind], *_MAY[kind]):
                known = ", ".join((*_NEEDED[kind], *_MAY[kind]))
                raise ConfigError(f"{where}: {kind} has no {name!r}; it has {known}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigError(f"{where}: {name} must be a number, not {value!r}") from None
        if missing := [name for name in _NEEDED[kind] if name not in values]:
            raise ConfigError(f"{where}: {kind} needs {missing[0]}=NUMBER as well")
        found = RopeScaling(kind, **values)
        if not (found.factor >= 1 and math.isfinite(found.factor)):
            raise ConfigError(f"{where}: factor must be at least 1")
        if "original" in _NEEDED[kind] and not found.original > 0:
            raise ConfigError(f"{where}: original must be above 0")
        if kind == "llama3" and not found.high > found.low > 0:
            raise ConfigError(f"{where}: high must be above low, and low above 0")
        if kind == "yarn" and not found.fast > found.slow > 0:
            raise ConfigError(f"{where}: fast must be above slow, and slow above 0")
        return found

    def __str__(self) -> str:
        """What `parse` reads: nothing that is the default anyway."""
        own = lambda name: getattr(self, name)
        said = [*_NEEDED[self.kind], *(name for name in _MAY[self.kind] if own(name) != getattr(RopeScaling, name))]
        return ",".join([self.kind, *(f"{name}={own(name):.17g}" for name in said)])

    @property
    def cos_and_sin(self) -> float:
        """What both are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.amplitude is None else self.amplitude

    def multipliers(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """Of the frequency of each pair, theta^(-2i/H): 1 leaves it, 1/factor slows it down."""
        half, slowed = head_dim // 2, 1 / self.factor
        turns = [self.original * theta ** (-i / half) / (2 * math.pi) for i in range(half)]
        if self.kind == "linear":
            return (slowed,) * half
        if self.kind == "llama3":
            ramp = [(t - self.low) / (self.high - self.low) for t in turns]
        else:
            # The pair, as a fraction, that turns so many times; the ramp is straight in the number of the pair.
            pair = lambda number: half * math.log(self.original / (number * 2 * math.pi)) / math.log(theta)
            first, last = pair(self.fast), pair(self.slow)
            if self.whole:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            last += 0.001 if first == last else 0
            ramp = [1 - (i - first) / (last - first) for i in range(half)]
        kept = [min(max(r, 0.0), 1.0) for r in ramp]
        return tuple(slowed * (1 - k) + k for k in kept)
