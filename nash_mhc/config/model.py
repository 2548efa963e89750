"""The interface of a model's configuration, and the configuration of Nash-MHC."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from nash_mhc.config.fields import ConfigError, Section, Settings, key, nearest_multiple

# Names of registered blocks; `register_mixer`, `register_ffn` and `register_residual` in model/layer.py add to them.
MIXERS = ["attention", "multiscale"]
FFNS = ["swiglu", "relu2"]
RESIDUALS = ["mhc", "mhc-layer", "plain"]


class LayerKind(NamedTuple):
    """The settings that may differ between layers."""

    mixer: str
    window: int | None
    ffn: str
    values: bool = False  # whether an embedding of the token is added to its values


@functools.lru_cache(64)
def _layer_kinds(pattern: str, default: str, window: int | None, ffn_kind: str) -> tuple[LayerKind, ...]:
    """Return the layers of `local*3,full`; raise ConfigError for a block that is not registered."""
    kinds: list[LayerKind] = []
    for entry in pattern.split(","):
        block, _, count = entry.strip().partition("*")
        mixer, _, ffn = block.partition("/")
        kind = LayerKind(
            mixer=default if mixer in ("local", "full") else mixer,
            window=None if mixer == "full" else window,
            ffn=ffn or ffn_kind,
        )
        if kind.mixer not in MIXERS or kind.ffn not in FFNS or not (count or "1").isdigit() or count == "0":
            raise ConfigError(
                f"model.pattern {pattern!r}: {entry!r} is not a layer; write MIXER or MIXER/FFN, optionally with *COUNT. "
                f"MIXER is one of local, full, {', '.join(MIXERS)}; FFN is one of {', '.join(FFNS)}"
            )
        kinds += [kind] * int(count or 1)
    return tuple(kinds)


class DivisibleSize(NamedTuple):
    """A size that a mesh axis must divide if it splits this logical axis."""

    axis: str
    size: int
    flag: str  # the flag that sets the size


class ArchitectureConfig(Section):
    """The configuration of a kind of model: a frozen dataclass that has at least the key `vocab_size`.

    `register` in `model/architectures.py` adds a kind: `--model-kind` accepts its name, and run.json records it.
    """

    section, prefixed = "model", True
    architecture: ClassVar[str]
    vocab_size: int

    @property
    def alignment(self) -> int:
        """Return the multiple at which documents begin in a packed sequence."""
        return 1

    @property
    def depth(self) -> int:
        """Return the number of layers that may be unrolled."""
        return 1

    @property
    def some_length(self) -> int:
        """Return a sequence length that the model accepts, for programs that need any one."""
        return 64 * self.alignment

    @property
    def padded_vocab(self) -> int:
        """Return the vocabulary rounded up to a multiple of 128, for full matmul tiles and any power-of-two tp."""
        return -(-self.vocab_size // 128) * 128

    @classmethod
    def infers(cls, values: Mapping[str, Any], found: Settings) -> Settings:
        """Return keys that follow from other settings: from all `values`, and from those `found` in named folders."""
        return {}

    def divisible_sizes(self) -> list[DivisibleSize]:
        """Return the sizes that a mesh must divide."""
        return [DivisibleSize("vocab", self.padded_vocab, "--model-vocab-size")]

    def check_rows(self, seq_len: int) -> None:
        """Raise ConfigError for a sequence length that the model cannot process."""


class AttendingConfig(ArchitectureConfig):
    """A kind of model that contains plain attention, with keys for heads and fixed values for the rest."""

    heads: int
    head_dim: int
    qk_norm = True
    qkv_bias = False
    rope_scaling: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim {self.head_dim} must be even for the rotary embedding; try {self.head_dim + 1}")

    @property
    def kv_heads(self) -> int:
        return self.heads


_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low", "high", "original"), "yarn": ("factor", "original")}
_OPTIONAL = {"linear": (), "llama3": (), "yarn": ("fast", "slow", "amplitude", "whole")}


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling for longer contexts than the model was first trained on: `--model-rope-scaling`.

    linear,factor=4                              divide all frequencies by 4
    llama3,factor=8,low=1,high=4,original=8192   divide low frequencies, keep high ones, interpolate between
    yarn,factor=4,original=32768                 the same with YaRN's bounds, and scale attention scores
    """

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
        """Parse the text of the key; raise ConfigError if it is invalid."""
        kind, *parts = (part.strip() for part in text.split(","))
        where = f"model.rope_scaling {text!r}"
        if kind not in _REQUIRED:
            raise ConfigError(f"{where}: the first word must be one of {', '.join(_REQUIRED)}, such as linear,factor=4")
        values: dict[str, float] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in (*_REQUIRED[kind], *_OPTIONAL[kind]):
                known = ", ".join((*_REQUIRED[kind], *_OPTIONAL[kind]))
                raise ConfigError(f"{where}: {kind} has no parameter {name!r}; choose from {known}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigError(f"{where}: {name} must be a number, not {value!r}") from None
        if missing := [name for name in _REQUIRED[kind] if name not in values]:
            raise ConfigError(f"{where}: {kind} also needs {missing[0]}=NUMBER")
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
    def cos_sin_amplitude(self) -> float:
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


@dataclass(frozen=True)
class ModelConfig(ArchitectureConfig):
    """The Nash-MHC decoder. Letters: D width, N heads, K kv heads, H head dim, F ffn, V vocabulary, L layers."""

    architecture = "nash-mhc"

    vocab_size: int = key(256 + 1, "vocabulary size (V); padded to a multiple of 128", low=2)
    width: int = key(128, "width of the residual stream (D)", low=1)
    layers: int = key(2, "number of layers (L)", low=1)
    heads: int = key(8, "query heads (N)", low=1)
    kv_heads: int = key(8, "key and value heads (K); fewer than heads is grouped-query attention", low=1)
    head_dim: int = key(16, "width of a head (H); even", low=2)
    ffn: int = key(384, "width of the MLP (F)", low=1)
    # Mixing once per layer and two scales halve the overhead over dense, at equal quality (docs/experiments.md).
    scales: int = key(2, "number of scales (resolutions) of attention (C); 1 is standard attention", low=1, high=8)
    ratio: int = key(16, "stride of each scale relative to the next finer one (r)", low=2, high=64)
    window: int | None = key(None, "tokens that the finest scale attends to, including the current one (none: all)", low=1)
    full_every: int = key(
        0, "every N-th layer attends to all tokens, without a window (0: no such layer)", low=0, further="layers"
    )
    conv_taps: int = key(4, "taps of the convolution before attention (0: no convolution)", low=0, high=16)
    aggregation: str = key(
        "nash",
        "how to weight the scales: nash (a small game between them), convex (softmax over the keys of all scales), or mean",
        choices=("nash", "convex", "mean"),
    )
    nash_iterations: int = key(3, "iterations of the game of --model-aggregation nash", low=1, high=64)
    residual: str = key(
        "mhc-layer",
        "residual connection: mhc (streams mixed in every sub-layer), mhc-layer (once per layer), or plain",
        choices=RESIDUALS,
    )
    streams: int = key(4, "residual streams (R) of mhc", low=2, high=8)
    rope_theta: float = key(10_000.0, "base of the RoPE frequencies", above=0)
    rope_scaling: str | None = key(
        None, "RoPE scaling: linear, llama3 or yarn, such as yarn,factor=4,original=32768", further="hub"
    )
    norm_eps: float = key(1e-6, "epsilon of RMSNorm", above=0)
    qk_norm: bool = key(True, "normalize queries and keys per head before RoPE")
    qkv_bias: bool = key(False, "biases in the query, key and value projections", further="hub")
    tied_embeddings: bool = key(True, "use the embedding as the output projection")
    embed_scale: str = key(
        "unit",
        "unit: multiply input embeddings by sqrt(width), to unit variance; table: use them as stored",
        choices=("unit", "table"),
        further="hub",
    )
    ffn_kind: str = key("swiglu", "type of the feed-forward layers", choices=FFNS, further="layers")
    value_embeddings: int = key(
        0, "every N-th layer adds a learned embedding of each token to its attention values (0: none)", low=0, further="layers"
    )
    mixer: str | None = key(
        None,
        "sequence mixer of the layers (none: attention if --model-scales is 1, else multiscale)",
        choices=MIXERS,
        further="layers",
    )
    pattern: str | None = key(
        None,
        "repeated pattern of layers, such as local*3,full: local (windowed), full (no window), or names of mixers",
        further="layers",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            best = min(divisors, key=lambda k: abs(k - self.kv_heads))
            raise ConfigError(
                f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}; the nearest that does is {best}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim {self.head_dim} must be even for the rotary embedding; try {self.head_dim + 1}")
        if self.window is not None and self.window % self.coarsest_stride:
            raise ConfigError(
                f"model.window {self.window} must be a multiple of the coarsest stride {self.coarsest_stride} "
                f"(model.ratio {self.ratio}, model.scales {self.scales}); "
                f"the nearest is {nearest_multiple(self.window, self.coarsest_stride)}"
            )
        if self.rope_scaling is not None:
            RopeScaling.parse(self.rope_scaling)
        if self.pattern is not None and self.full_every:
            raise ConfigError("model.pattern and model.full_every cannot be combined; set model.full_every 0")
        mixers = {kind.mixer for kind in self.group}
        if mixers == {"attention"} and self.scales > 1:
            raise ConfigError(f"model.scales {self.scales} needs a multiscale layer; add one, or set model.scales 1")
        if "multiscale" in mixers and self.scales == 1:
            raise ConfigError("model.mixer multiscale needs at least 2 scales; set model.scales 2")
        if self.layers % len(self.group) and self.pattern is not None:
            raise ConfigError(
                f"model.layers {self.layers} is not a multiple of the {len(self.group)} layers in model.pattern "
                f"{self.pattern!r}; the nearest multiple is {nearest_multiple(self.layers, len(self.group))}"
            )
        if self.layers % len(self.group) and self.value_embeddings:
            raise ConfigError(
                f"model.layers {self.layers} is not a multiple of {len(self.group)}, the group size with "
                f"model.value_embeddings {self.value_embeddings}; "
                f"the nearest multiple is {nearest_multiple(self.layers, len(self.group))}"
            )
        if self.full_every and self.window is None:
            raise ConfigError("model.full_every removes windows, but model.window is none; set model.window, or full_every 0")
        if self.full_every and self.layers % self.full_every:
            divisors = [g for g in range(1, self.layers + 1) if self.layers % g == 0]
            best = min(divisors, key=lambda g: abs(g - self.full_every))
            raise ConfigError(
                f"model.full_every {self.full_every} does not divide model.layers {self.layers}; "
                f"the nearest that does is {best}"
            )

    @property
    def mixings(self) -> int:
        """Return how often a layer mixes streams."""
        return {"mhc": 2, "mhc-layer": 1}.get(self.residual, 0)

    @property
    def group(self) -> tuple[LayerKind, ...]:
        """Return the layers of one group; the model is a stack of such groups."""
        default = self.mixer or ("attention" if self.scales == 1 else "multiscale")
        pattern = self.pattern or (f"local*{self.full_every - 1},full" if self.full_every > 1 else "")
        pattern = pattern or ("full" if self.full_every else "local")
        kinds, every = _layer_kinds(pattern, default, self.window, self.ffn_kind), self.value_embeddings
        if not every:
            return kinds
        size = math.lcm(len(kinds), every)
        return tuple(kinds[i % len(kinds)]._replace(values=(size - 1 - i) % every == 0) for i in range(size))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of one group's layers."""
        return tuple(kind.window for kind in self.group)

    @property
    def embed_multiplier(self) -> float:
        """Return the factor on input embeddings. Our tables have the scale of an output projection, which as an input
        would be small against the layers' outputs. Imported tables are used as they are."""
        return self.width**0.5 if self.embed_scale == "unit" else 1.0

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride of each scale in tokens: 1, r, r^2, ..."""
        return tuple(self.ratio**c for c in range(self.scales))

    @property
    def coarsest_stride(self) -> int:
        return self.strides[-1]

    @property
    def alignment(self) -> int:
        return self.coarsest_stride

    @property
    def depth(self) -> int:
        return self.layers

    def divisible_sizes(self) -> list[DivisibleSize]:
        values = DivisibleSize("value_embed", self.kv_heads * self.head_dim, "--model-kv-heads")
        return [
            DivisibleSize("embed", self.width, "--model-width"),
            DivisibleSize("heads", self.heads, "--model-heads"),
            DivisibleSize("kv_heads", self.kv_heads, "--model-kv-heads"),
            DivisibleSize("ffn", self.ffn, "--model-ffn"),
            DivisibleSize("vocab", self.padded_vocab, "--model-vocab-size"),
            *([values] if self.value_embeddings else []),
        ]

    def check_rows(self, seq_len: int) -> None:
        if seq_len % self.coarsest_stride:
            raise ConfigError(
                f"data.seq_len {seq_len} must be a multiple of the coarsest stride {self.coarsest_stride} (model.ratio "
                f"{self.ratio}, model.scales {self.scales}); the nearest is {nearest_multiple(seq_len, self.coarsest_stride)}"
            )
