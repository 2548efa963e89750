"""What a model's configuration says to everything outside of the model, and that of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nash_mhc.config.fields import ConfigError, Section, key, nearest_multiple
from nash_mhc.config.rope_scaling import RopeScaling


class Length(NamedTuple):
    """A size that a mesh may have to divide."""

    axis: str  # logical
    size: int
    flag: str  # that sets it


class ArchitectureConfig(Section):
    """The configuration of a kind of model: a frozen dataclass with at least `vocab_size` among its keys.

    `register` in `model/architectures.py` makes a kind known: `--model-kind` takes its name, and run.json has it.
    """

    section = "model"
    architecture: ClassVar[str]
    vocab_size: int

    @property
    def alignment(self) -> int:
        """Documents begin at multiples of this in their rows, unless rows are spread out."""
        return 1

    @property
    def depth(self) -> int:
        """Layers that a program may hold one after the other instead of in a loop."""
        return 1

    @property
    def padded_vocab(self) -> int:
        """Vocabulary rounded up to a multiple of 128:
        full matmul tiles, and any power-of-two tp up to 128 divides it."""
        return -(-self.vocab_size // 128) * 128

    def lengths(self) -> list[Length]:
        """What a mesh must divide."""
        return [Length("vocab", self.padded_vocab, "--model-vocab-size")]

    def check_rows(self, seq_len: int) -> None:
        """ConfigError for rows that the model cannot take."""


class AttendingConfig(ArchitectureConfig):
    """Of a kind that has plain attention among its parts, and keys for its heads; the rest is what attention asks of a
    configuration."""

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


@dataclass(frozen=True)
class ModelConfig(ArchitectureConfig):
    """The decoder. Letters in shapes are those of docs:
    D width, N heads, K kv heads, H head dim, F ffn, V vocabulary."""

    architecture = "nash-mhc"

    vocab_size: int = key(256 + 1, "tokens in the vocabulary (V); padded up to a multiple of 128 inside", low=2)
    width: int = key(128, "width of the residual stream (D)", low=1)
    layers: int = key(2, "number of layers (L)", low=1)
    heads: int = key(8, "query heads (N)", low=1)
    kv_heads: int = key(8, "key and value heads (K); fewer than heads is grouped-query attention", low=1)
    head_dim: int = key(16, "width of one head (H), an even number", low=2)
    ffn: int = key(384, "width of the feed-forward layer (F)", low=1)
    # Streams mixed once a layer and two scales cost half of what `mhc` and three scales do beside dense. With the
    # latter, `small` learned less than dense in the same seconds; now it does not (docs/log.md).
    scales: int = key(2, "resolutions that attention looks at (C); 1 is plain attention", low=1, high=8)
    ratio: int = key(16, "how much coarser each scale is than the one before (r)", low=2, high=64)
    window: int | None = key(None, "tokens that the finest scale looks back, itself included (none: all)", low=1)
    full_every: int = key(0, "one layer in so many has no window (0: none of them)", low=0)
    conv_taps: int = key(4, "tokens that a convolution in front of attention mixes, itself included (0: none)", low=0, high=16)
    aggregation: str = key("nash", "how the scales find their weights", choices=("nash", "convex", "mean"))
    nash_iterations: int = key(3, "best responses that the scales play", low=1, high=64)
    residual: str = key(
        "mhc-layer",
        "residual: streams that attention and feed-forward each read and mix (mhc), or both together (mhc-layer), or one that "
        "is added to",
        choices=("mhc", "mhc-layer", "plain"),
    )
    streams: int = key(4, "residual streams (R) of mhc", low=2, high=8)
    rope_theta: float = key(10_000.0, "base of the rotary position frequencies", above=0)
    rope_scaling: str | None = key(
        None, "stretched frequencies: linear, llama3 or yarn, such as yarn,factor=4,original=32768", further="hub"
    )
    norm_eps: float = key(1e-6, "epsilon inside RMSNorm", above=0)
    qk_norm: bool = key(True, "normalise queries and keys per head before the rotation")
    qkv_bias: bool = key(False, "add a bias to the query, key and value projections", further="hub")
    tied_embeddings: bool = key(True, "use the embedding table as the output projection too")
    embed_scale: str = key(
        "unit", "embeddings enter times sqrt(width), or as the table has them", choices=("unit", "table"), further="hub"
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
        if self.full_every and self.window is None:
            raise ConfigError("model.full_every leaves a window out, and there is none; set model.window, or leave it at 0")
        if self.full_every and self.layers % self.full_every:
            divisors = [g for g in range(1, self.layers + 1) if self.layers % g == 0]
            best = min(divisors, key=lambda g: abs(g - self.full_every))
            raise ConfigError(
                f"model.full_every {self.full_every} does not divide model.layers {self.layers}; "
                f"the nearest that does is {best}"
            )

    @property
    def mixings(self) -> int:
        """How often a layer mixes streams."""
        return {"mhc": 2, "mhc-layer": 1, "plain": 0}[self.residual]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers of one group, of which the model is a stack; in each, the last one may see everything."""
        return (*(self.window,) * (self.full_every - 1), None) if self.full_every else (self.window,)

    @property
    def embed_multiplier(self) -> float:
        """Our tables are scaled for the output, where they meet a stream of norm sqrt(D); as input that would drown in
        the layers' own outputs, so they enter at the scale of those. Tables of other origin enter as they are."""
        return self.width**0.5 if self.embed_scale == "unit" else 1.0

    @property
    def strides(self) -> tuple[int, ...]:
        """Tokens from one row of a scale to its next: 1, r, r^2, ..."""
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

    def lengths(self) -> list[Length]:
        return [
            Length("embed", self.width, "--model-width"),
            Length("heads", self.heads, "--model-heads"),
            Length("kv_heads", self.kv_heads, "--model-kv-heads"),
            Length("ffn", self.ffn, "--model-ffn"),
            Length("vocab", self.padded_vocab, "--model-vocab-size"),
        ]

    def check_rows(self, seq_len: int) -> None:
        if seq_len % self.coarsest_stride:
            raise ConfigError(
                f"data.seq_len {seq_len} must be a multiple of the coarsest stride {self.coarsest_stride} (model.ratio "
                f"{self.ratio}, model.scales {self.scales}); the nearest is {nearest_multiple(seq_len, self.coarsest_stride)}"
            )
