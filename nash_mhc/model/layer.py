"""One layer: a sequence mixer and a feed-forward network, each with a norm and a residual connection.

The classes of these blocks are registered by name. Each defines its parameters, training call, decoding step and FLOPs,
so a new block is one class in one file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from nash_mhc.config import model as names
from nash_mhc.config.model import LayerKind
from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.captures import capture, watch_streams
from nash_mhc.model.kv_cache import TokenAt
from nash_mhc.model.mixers.attention import Attention, AttentionLayout
from nash_mhc.model.mixers.multiscale import Multiscale
from nash_mhc.model.parts import ReLU2, RMSNorm, ShortConv, SwiGLU, TokenValues
from nash_mhc.model.residual import HyperConnection, PlainResidual, State, StreamState

# A built-in block also needs its name in config/model.py.
_MIXERS: dict[str, Any] = {"attention": Attention, "multiscale": Multiscale}
_FFNS: dict[str, Any] = {"relu2": ReLU2, "swiglu": SwiGLU}
_RESIDUALS: dict[str, Any] = {"mhc": HyperConnection, "mhc-layer": HyperConnection, "plain": PlainResidual}


def register_mixer(name: str, mixer: Any) -> None:
    """Register a sequence mixer, a module class, for `--model-mixer` and `--model-pattern`.

    `Attention` is the example. A mixer has these methods; the first, the third and the last are static:

        init(cfg, key=) -> mixer
        __call__(x_BTD, layout, window=, kernel=) -> y_BTD; it may ignore `kernel`
        init_cache(cfg, window, layers, batch, seq_len, dtype) -> cache of a stack of layers, for decoding
        step(x_B1D, cache, at) -> (y_B1D, cache)
        flops_per_token(cfg, window, seq_len) -> float

    With --model-value-embeddings, `__call__` and `step` also get `values=`. A token's output depends on no later token
    and on no other document (`layout`); if the mixer has no coarse scales, it begins with `layout.original_layout()`.
    The mixer itself constrains its input and output to the axes ("batch", "time", "width") and ("batch", "time_split",
    "width").
    """
    _MIXERS[name] = mixer
    names.MIXERS.append(name)


def register_ffn(name: str, ffn: Any) -> None:
    """Register a feed-forward network for `--model-ffn-kind`. See `SwiGLU` for its methods."""
    _FFNS[name] = ffn
    names.FFNS.append(name)


def register_residual(name: str, residual: Any) -> None:
    """Register a residual connection for `--model-residual`. See `PlainResidual` for its methods.

    If its state is a `StreamState`, the layer captures its maps and streams.
    """
    _RESIDUALS[name] = residual
    names.RESIDUALS.append(name)


def mixer_class(kind: LayerKind) -> Any:
    return _MIXERS[kind.mixer]


def ffn_class(kind: LayerKind) -> Any:
    return _FFNS[kind.ffn]


def residual_class(cfg: ModelConfig) -> Any:
    return _RESIDUALS[cfg.residual]


class LayerCache(NamedTuple):
    """The decoding caches of a stack of layers."""

    conv: Float[Array, "L B J D"] | None
    mixer: Any


class Layer(eqx.Module):
    """A mixer, then a feed-forward network.

    Each reads and writes the residual state through its own residual connection. With `mhc-layer`, both share one, with
    plain addition in between.
    """

    attention_residual: Any
    attention_norm: RMSNorm
    attention_conv: ShortConv | None
    attention: Any  # the mixer of any class; the name is fixed by existing checkpoints
    ffn_residual: Any
    ffn_norm: RMSNorm
    ffn: Any

    @staticmethod
    def init(cfg: ModelConfig, kind: LayerKind, *, key: PRNGKeyArray) -> Layer:
        attention, ffn, first, second = jax.random.split(key, 4)
        conv = ShortConv.init(cfg, key=jax.random.fold_in(attention, 1)) if cfg.conv_taps else None
        norm = functools.partial(RMSNorm.init, cfg.width, cfg.norm_eps)
        residual = residual_class(cfg)
        inner = PlainResidual if cfg.mixings == 1 else residual  # mhc-layer mixes streams once per layer
        return Layer(
            residual.init(cfg, key=first), norm(), conv, mixer_class(kind).init(cfg, key=attention),
            inner.init(cfg, key=second), norm(), ffn_class(kind).init(cfg, key=ffn),
        )  # fmt: skip

    def __call__(
        self, state: State, layout: AttentionLayout, *, window: int | None, kernel: str, values: TokenValues | None = None
    ) -> State:
        """Return the residual state after this layer."""
        extra = {} if values is None else {"values": values}  # a registered mixer need not know of them

        def run_mixer(x_BTD: Array) -> tuple[Array, None]:
            if self.attention_conv is not None:
                x_BTD = self.attention_conv(x_BTD, layout.original_segments_BT)
            with jax.named_scope("mixer"):
                y_BTD = self.attention(x_BTD, layout, window=window, kernel=kernel, **extra)
            capture("mixer_output", lambda: y_BTD)  # for model/inside.py
            return y_BTD, None

        entered = state
        state, _, maps = self._apply(state, run_mixer)
        with jax.named_scope("health"):
            if isinstance(entered, StreamState):
                capture("streams", lambda: watch_streams(entered, maps))  # for the health metrics
                capture("stream_maps", lambda: tuple(m.res for m in maps))  # for model/inside.py
        return state

    def step(self, state: State, cache: LayerCache, at: TokenAt, values: TokenValues | None = None) -> tuple[State, LayerCache]:
        """Return (residual state of one token after this layer, updated cache)."""
        extra = {} if values is None else {"values": values}

        def run_mixer(x_B1D: Array) -> tuple[Array, LayerCache]:
            conv = cache.conv
            if self.attention_conv is not None and conv is not None:
                x_B1D, conv = self.attention_conv.step(x_B1D, conv, at)
            y_B1D, mixer = self.attention.step(x_B1D, cache.mixer, at, **extra)
            return y_B1D, LayerCache(conv, mixer)

        state, cache, _ = self._apply(state, run_mixer)
        return state, cache

    @staticmethod
    def init_cache(cfg: ModelConfig, kind: LayerKind, layers: int, batch: int, seq_len: int, dtype: Any) -> LayerCache:
        """Return the empty cache of a stack of layers, for `seq_len` tokens."""
        conv = ShortConv.init_cache(cfg, layers, batch, dtype) if cfg.conv_taps else None
        return LayerCache(conv, mixer_class(kind).init_cache(cfg, kind.window, layers, batch, seq_len, dtype))

    @staticmethod
    def flops_per_token(cfg: ModelConfig, kind: LayerKind, seq_len: int) -> float:
        """Return matmul FLOPs of one training token."""
        residuals = (1 if cfg.mixings == 1 else 2) * residual_class(cfg).flops_per_token(cfg)
        mixer = mixer_class(kind).flops_per_token(cfg, kind.window, seq_len)
        return float(mixer + ffn_class(kind).flops_per_token(cfg) + residuals)

    def _apply(self, state: State, run_mixer: Callable[[Array], tuple[Array, Any]]) -> tuple[State, Any, list[Any]]:
        """Run the mixer and the feed-forward network.

        Return (residual state, second result of `run_mixer`, maps of each residual).
        """
        x_BTD, maps = self.attention_residual.read(state, self.attention_norm)
        y_BTD, cache = run_mixer(x_BTD)
        if type(self.attention_residual) is not type(self.ffn_residual):  # only `init` with mhc-layer makes them differ
            # x = norm(H_pre X), y = mixer(x), X' = H_res X + H_post (y + ffn(norm(x + y)))
            # `ffn_residual` is plain and has no maps: its `write` adds.
            x_BTD, _ = self.ffn_residual.read(self.ffn_residual.write(x_BTD, y_BTD, None), self.ffn_norm)
            return self.attention_residual.write(state, y_BTD + self._feed_forward(x_BTD), maps), cache, [maps]
        state = self.attention_residual.write(state, y_BTD, maps)
        x_BTD, ffn_maps = self.ffn_residual.read(state, self.ffn_norm)
        return self.ffn_residual.write(state, self._feed_forward(x_BTD), ffn_maps), cache, [maps, ffn_maps]

    def _feed_forward(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        with jax.named_scope("ffn"):
            return self.ffn(x_BTD)
