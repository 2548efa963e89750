"""The language model: embedding, a scan over stacked layers, final norm, output projection."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import Attention, Layout, lay_out
from nash_mhc.model.float8 import in_float8
from nash_mhc.model.health import LayerReport, summary, watch_streams
from nash_mhc.model.multiscale import Multiscale
from nash_mhc.model.parts import RMSNorm, ShortConv, SwiGLU, embed, init_matrix, logits_of
from nash_mhc.model.protocol import Execution
from nash_mhc.model.remat import remat_policy
from nash_mhc.model.residual import HyperConnection, PlainResidual, State, StreamState, residual_class
from nash_mhc.model.weights import array_of
from nash_mhc.ops.attend import best_kernel
from nash_mhc.parallel.params import TABLE, param, stacked
from nash_mhc.parallel.sharding import for_compute

TABLE_SCALE = 0.5  # of embedding and output at the start: logits that small are nearly even, and the first loss is near ln V


def kernel_for(execution: Execution, seq_len: int, head_dim: int, window: int | None = None) -> str:
    """The attention kernel that was asked for, or else the best one here."""
    if execution.attention != "auto":
        return execution.attention
    return best_kernel(jax.default_backend(), execution.dtype, seq_len, head_dim, window)


class Layer(eqx.Module):
    """Attention, then feed-forward; each reads the residual state and writes to it through a residual of its own, or
    both together through one, with plain addition between them."""

    attention_residual: PlainResidual | HyperConnection
    attention_norm: RMSNorm
    attention_conv: ShortConv | None
    attention: Attention | Multiscale
    ffn_residual: PlainResidual | HyperConnection
    ffn_norm: RMSNorm
    ffn: SwiGLU

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> Layer:
        attention, ffn, first, second = jax.random.split(key, 4)
        conv = ShortConv.init(cfg, key=jax.random.fold_in(attention, 1)) if cfg.conv_taps else None
        norm = functools.partial(RMSNorm.init, cfg.width, cfg.norm_eps)
        residual = residual_class(cfg)
        inner = PlainResidual if cfg.mixings == 1 else residual
        mixer = Attention if cfg.scales == 1 else Multiscale
        return Layer(
            residual.init(cfg, key=first), norm(), conv, mixer.init(cfg, key=attention),
            inner.init(cfg, key=second), norm(), SwiGLU.init(cfg, key=ffn),
        )  # fmt: skip

    def __call__(self, state: State, layout: Layout, *, window: int | None, kernel: str) -> tuple[State, LayerReport]:
        """(residual state, what happened)."""

        def mixed(x_BTD: Array) -> tuple[Array, Any]:
            if self.attention_conv is not None:
                x_BTD = self.attention_conv(x_BTD, layout.slots_BT)
            with jax.named_scope("mixer"):
                return self.attention(x_BTD, layout, window=window, kernel=kernel)

        entered = state
        state, game, maps = self.through(state, mixed)
        with jax.named_scope("health"):
            watched = watch_streams(entered, maps) if isinstance(entered, StreamState) else None
        return state, LayerReport(game, watched)

    def through(self, state: State, mixed: Callable[[Array], tuple[Array, Any]]) -> tuple[State, Any, list[Any]]:
        """(residual state, what else `mixed` has to say, the maps of the streams): both sub-layers, where `mixed` is
        attention."""
        x_BTD, maps = self.attention_residual.read(state, self.attention_norm)
        y_BTD, said = mixed(x_BTD)
        if isinstance(self.attention_residual, HyperConnection) and isinstance(self.ffn_residual, PlainResidual):
            x_BTD, _ = self.ffn_residual.read(self.ffn_residual.write(x_BTD, y_BTD, None), self.ffn_norm)
            return self.attention_residual.write(state, y_BTD + self._fed(x_BTD), maps), said, [maps]
        state = self.attention_residual.write(state, y_BTD, maps)
        x_BTD, ffn_maps = self.ffn_residual.read(state, self.ffn_norm)
        return self.ffn_residual.write(state, self._fed(x_BTD), ffn_maps), said, [maps, ffn_maps]

    def _fed(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        with jax.named_scope("ffn"):
            return self.ffn(x_BTD)


def by_place(stack: Any, size: int) -> tuple[Any, ...]:
    """A stack of layers, which are groups of `size` one after the other:
    the first ones of all groups, the second ones ...

    Each is a stack that a scan takes apart by itself. A layer cut out of its group inside the scan would be one more
    thing that is kept for the way back, and kept as it is used: gathered.
    """
    return tuple(jax.tree.map(operator.itemgetter(slice(i, None, size)), stack) for i in range(size))


class LM(eqx.Module):
    """A decoder. `LM.init(cfg, key=key)` makes one; `model(tokens_BT)` gives logits for the next tokens."""

    embed_VD: Float[Array, "V D"] = param("vocab", "embed", role=TABLE)
    layers: Layer = stacked()
    norm: RMSNorm
    output_VD: Float[Array, "V D"] | None = param("vocab", "embed", role=TABLE)
    cfg: ModelConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> LM:
        embedding, layers, output = jax.random.split(key, 3)
        V, D = cfg.padded_vocab, cfg.width
        stack = jax.vmap(lambda k: Layer.init(cfg, key=k))(jax.random.split(layers, cfg.layers))
        # A table that is both would have every token predict itself: the stream is still much of what entered it. With
        # half of the channels turned round, what enters says nothing about what leaves,
        # and the first loss is that of guessing.
        signs_D = jnp.where(jnp.arange(D) % 2 == 0, 1.0, -1.0) if cfg.tied_embeddings else jnp.ones(D)
        return LM(
            embed_VD=init_matrix(embedding, (V, D), D, TABLE_SCALE),
            layers=stack,
            norm=RMSNorm(signs_D, cfg.norm_eps),
            output_VD=None if cfg.tied_embeddings else init_matrix(output, (V, D), D, TABLE_SCALE),
            cfg=cfg,
        )

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        """The output projection; the embedding itself when tied (one leaf, not two)."""
        return array_of(self.embed_VD if self.output_VD is None else self.output_VD)

    def embedded(self, tokens_BT: Int[Array, "B T"], dtype: str) -> Float[Array, "B T D"]:
        return embed(array_of(self.embed_VD), tokens_BT, jnp.dtype(dtype)) * self.cfg.embed_multiplier

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "B T D"], LayerReport]:
        """(the normalised stream after the last layer, reports of all layers):
        the loss and the logits are read from the first.

        Documents start at multiples of the coarsest stride, as `data/pack.py` lays them, unless `execution` has room
        for them to start anywhere; T may be any number.
        """
        T = tokens_BT.shape[1]
        missing = -T % self.cfg.coarsest_stride
        if missing:  # whole blocks only; attention is causal, so what is added has no say
            last = ((0, 0), (0, missing))
            tokens_BT = jnp.pad(tokens_BT, last)
            segments_BT = None if segments_BT is None else jnp.pad(segments_BT, last, mode="edge")
        x_BTD = self.embedded(tokens_BT, execution.dtype)

        kernel = kernel_for(execution, tokens_BT.shape[1], self.cfg.head_dim, self.cfg.window)
        layout = lay_out(tokens_BT.shape, segments_BT, self.cfg.strides, kernel, execution.most_documents, execution.room)
        residual = residual_class(self.cfg)

        @functools.partial(jax.checkpoint, policy=remat_policy(execution.remat, float8=execution.float8), static_argnums=0)
        def one(window: int | None, state: State, layer: Layer) -> tuple[State, LayerReport]:
            layer = for_compute(layer, x_BTD.dtype)
            layer = in_float8(layer) if execution.float8 else layer
            state, report = layer(state, layout, window=window, kernel=kernel)
            if execution.shows_layers:
                report = report._replace(left_BTD=residual.leave(state)[:, :T])
            return state, report

        def body(state: State, group: tuple[Layer, ...]) -> tuple[State, LayerReport]:
            reports = []
            for window, layer in zip(self.cfg.windows, group, strict=True):
                state, report = one(window, state, layer)
                reports.append(report)
            return state, jax.tree.map(lambda *each: jnp.stack(each), *reports)

        start, groups = residual.enter(self.cfg, x_BTD), by_place(self.layers, len(self.cfg.windows))
        state, reports = jax.lax.scan(body, start, groups, unroll=execution.unroll)
        in_a_row = lambda x_GL: x_GL.reshape(self.cfg.layers, *x_GL.shape[2:])
        return self.norm(residual.leave(state))[:, :T], jax.tree.map(in_a_row, reports)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, without the padding of the vocabulary. Segment ids keep packed documents apart."""
        x_BTD, _ = self.hidden(tokens_BT, segments_BT, execution)
        return logits_of(x_BTD, self.unembed_VD, self.cfg.vocab_size)

    def health(self, report: LayerReport) -> dict[str, Array]:
        """One value or one short vector a layer, by name."""
        return jax.lax.stop_gradient(summary(report))

    def after_layers(self, report: LayerReport) -> Float[Array, "L B T D"] | None:
        """The stream after each layer, where the execution asked for it."""
        return report.left_BTD

    def penalties(self, report: LayerReport) -> dict[str, Float[Array, ""]]:
        """`sparsity`: the entropy of the scales' weights, as a share of its largest value."""
        return {} if report.game is None else {"sparsity": jnp.mean(summary(report)["scale_entropy"])}


def flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of one training token: 6 a matmul weight, and causal attention counted once.

    Lookups, norms, softmaxes, convolutions, pooling, the game and the mixing of streams are left out, and so is
    whatever remat computes again: this is useful matrix work.
    """
    attention = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    maps = cfg.mixings * cfg.streams * cfg.width * (cfg.streams**2 + 2 * cfg.streams)
    weights = cfg.layers * (attention + maps + 3 * cfg.width * cfg.ffn) + cfg.vocab_size * cfg.width
    # Keys that a query sees, on average over the row:
    # T/2, or less within a window, and so many times fewer of a coarse scale.
    each = [min(window or seq_len, seq_len) for window in cfg.windows]
    keys = sum(w * (1 - w / (2 * seq_len)) for w in each) / len(each)
    keys += sum(seq_len / 2 / stride for stride in cfg.strides[1:])
    return 6.0 * weights + 12.0 * cfg.layers * cfg.heads * cfg.head_dim * keys
