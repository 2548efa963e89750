"""The language model: embedding, a scan over stacked layers, final norm, output projection.

Shape letters: docs/model.md. Axis names: parallel/sharding.py.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.model import LayerKind
from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.captures import capture, recording, summary
from nash_mhc.model.kv_cache import TokenAt
from nash_mhc.model.layer import Layer, LayerCache, residual_class
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.parts import RMSNorm, ValueEmbedding, embed, init_matrix, logits_of, of_group, of_tokens
from nash_mhc.model.protocol import Execution
from nash_mhc.model.remat import remat_policy
from nash_mhc.model.residual import State
from nash_mhc.model.weights import array_of, in_float8
from nash_mhc.ops.attend import best_kernel
from nash_mhc.parallel.params import HEAD, TABLE, param, stacked
from nash_mhc.parallel.sharding import for_compute

TABLE_SCALE = 0.5  # initial scale of embedding and output: small logits, so the first loss is near ln V
Captures = dict[str, Any]  # captures by name; leading axis: the layers that have it, in order
# Captured in every pass for `health`; XLA removes them if unused. game: how the multiscale mixer weighs its scales
# (ops/nash.py). streams: mixing matrices and sizes of the residual streams.
_HEALTH = ("game", "streams")


def kernel_for(execution: Execution, seq_len: int, head_dim: int, window: int | None = None) -> str:
    """Return the attention kernel that the execution names, or the best one on this platform.

    It is the preferred kernel of the whole model, because the layout depends on it. A layer that does not support it
    falls back to another (`supported_kernel`).
    """
    if execution.attention != "auto":
        return execution.attention
    return best_kernel(jax.default_backend(), execution.dtype, seq_len, head_dim, window)


def stacks_of_group(layers: Any, size: int) -> tuple[Any, ...]:
    """Split a stack of layers, in groups of `size`, into `size` stacks: one for each position in a group.

    The scan must slice each stack itself: a layer sliced out of its group inside the scan would be saved, with gathered
    weights, for the backward pass. Layers with different parameters are a tuple of stacks already.
    """
    if isinstance(layers, tuple):
        return layers
    return tuple(jax.tree.map(operator.itemgetter(slice(i, None, size)), layers) for i in range(size))


def _init_layers(cfg: ModelConfig, *, key: PRNGKeyArray) -> Layer | tuple[Layer, ...]:
    """Return all layers as one stack, or as one stack per layer of a group if their parameters differ."""
    keys, group = jax.random.split(key, cfg.layers), cfg.group
    stack = lambda kind, keys: jax.vmap(lambda key: Layer.init(cfg, kind, key=key))(keys)
    if len({(kind.mixer, kind.ffn) for kind in group}) == 1:
        return stack(group[0], keys)
    return tuple(stack(kind, keys[i :: len(group)]) for i, kind in enumerate(group))


def _init_values(cfg: ModelConfig, *, key: PRNGKeyArray) -> ValueEmbedding:
    """Return the value embeddings of all layers that have one, as one stack."""
    keys = jax.random.split(key, cfg.layers // cfg.value_embeddings)  # one for each of these layers
    return jax.vmap(lambda key: ValueEmbedding.init(cfg, key=key))(keys)


def _stack_captures(group: list[Captures]) -> Captures:
    """Stack the captures of a group's layers by name, in the order of the layers that have them."""
    names = sorted({name for captured in group for name in captured})
    values = lambda name: [captured[name] for captured in group if name in captured]
    return {name: jax.tree.map(lambda *layers: jnp.stack(layers), *values(name)) for name in names}


class Cache(eqx.Module):
    """The state of decoding."""

    position: Int[Array, ""]  # of the next token
    layers: tuple[LayerCache, ...]  # one stack per layer of a group
    seq_len: int = eqx.field(static=True)  # capacity in tokens
    dtype: Any = eqx.field(static=True)


class LM(eqx.Module):
    """A decoder. `LM.init(cfg, key=key)` creates one; `model(tokens_BT)` returns next-token logits."""

    embed_VD: Float[Array, "V D"] = param("vocab", "embed", role=TABLE)
    layers: Layer | tuple[Layer, ...] = stacked("layers")
    norm: RMSNorm
    output_VD: Float[Array, "V D"] | None = param("vocab", "embed", role=HEAD)
    values: ValueEmbedding | None = stacked("layers")
    cfg: ModelConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> LM:
        embedding, layers, output = jax.random.split(key, 3)
        V, D = cfg.padded_vocab, cfg.width
        # With a tied table, every token would predict itself at first, as the stream still resembles the embedding.
        # Flipping the sign of half of the channels brings the first loss to that of a uniform guess.
        signs_D = jnp.where(jnp.arange(D) % 2 == 0, 1.0, -1.0) if cfg.tied_embeddings else jnp.ones(D)
        return LM(
            embed_VD=init_matrix(embedding, (V, D), D, TABLE_SCALE),
            layers=_init_layers(cfg, key=layers),
            norm=RMSNorm(signs_D, cfg.norm_eps),
            output_VD=None if cfg.tied_embeddings else init_matrix(output, (V, D), D, TABLE_SCALE),
            values=_init_values(cfg, key=jax.random.fold_in(key, 1)) if cfg.value_embeddings else None,
            cfg=cfg,
        )

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        """The output projection; with tied embeddings, the embedding."""
        return array_of(self.embed_VD if self.output_VD is None else self.output_VD)

    def embed_tokens(self, tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        return embed(array_of(self.embed_VD), tokens_BT, jnp.dtype(dtype)) * self.cfg.embed_multiplier

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "B T D"], Captures]:
        """Return (normalized hidden states after the last layer, captures of all layers).

        Documents begin at multiples of the coarsest stride, as `data/pack.py` packs them, or anywhere if
        `execution.padded_length` is set. T may be any number.
        """
        T = tokens_BT.shape[1]
        missing = -T % self.cfg.coarsest_stride
        if missing:  # whole blocks only; attention is causal, so padding at the end changes nothing before it
            last = ((0, 0), (0, missing))
            tokens_BT = jnp.pad(tokens_BT, last)
            segments_BT = None if segments_BT is None else jnp.pad(segments_BT, last, mode="edge")
        x_BTD = self.embed_tokens(tokens_BT, execution.dtype)

        kernel = kernel_for(execution, tokens_BT.shape[1], self.cfg.head_dim, self.cfg.window)
        layout = attention_layout(
            tokens_BT.shape, segments_BT, self.cfg.strides, kernel, execution.most_documents, execution.padded_length
        )  # fmt: skip
        residual = residual_class(self.cfg)
        wanted = {*_HEALTH, *execution.captures}

        @functools.partial(jax.checkpoint, policy=remat_policy(execution.remat, float8=execution.float8), static_argnums=0)
        def run_layer(kind: LayerKind, state: State, layer: Layer, values: ValueEmbedding | None) -> tuple[State, Captures]:
            # Not `values`: they are sharded over the vocabulary, and `embed` gathers and casts only what it looks up.
            layer = for_compute(layer, x_BTD.dtype)
            layer = in_float8(layer) if execution.float8 else layer
            with recording(wanted) as captured:
                state = layer(state, layout, window=kind.window, kernel=kernel, values=of_tokens(values, tokens_BT))
                capture("layer_output", lambda: residual.leave(state)[:, :T])
            return state, captured

        # A group is one period of the layer pattern, such as three layers with a window and one without.
        def run_group(state: State, group: tuple[tuple[Layer, ...], Any]) -> tuple[State, Captures]:
            captures = []
            for kind, layer, values in zip(self.cfg.group, *group, strict=True):
                state, captured = run_layer(kind, state, layer, values)
                captures.append(captured)
            return state, _stack_captures(captures)

        start, groups = residual.enter(self.cfg, x_BTD), stacks_of_group(self.layers, len(self.cfg.group))
        values = of_group(self.values, self.cfg.group)
        state, captured = jax.lax.scan(run_group, start, (groups, values), unroll=execution.unroll)
        all_layers = lambda x_GL: x_GL.reshape(x_GL.shape[0] * x_GL.shape[1], *x_GL.shape[2:])
        return self.norm(residual.leave(state))[:, :T], jax.tree.map(all_layers, captured)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> Float[Array, "B T V"]:
        """Return next-token logits without vocabulary padding. Segment ids separate packed documents."""
        x_BTD, _ = self.hidden(tokens_BT, segments_BT, execution)
        return logits_of(x_BTD, self.unembed_VD, self.cfg.vocab_size)

    @staticmethod
    def empty_cache(cfg: ModelConfig, batch: int, seq_len: int, dtype: Any = "float32") -> Cache:
        """Return an empty cache for `seq_len` tokens; `decode` computes in its `dtype`."""
        groups = cfg.layers // len(cfg.group)
        layers = [Layer.init_cache(cfg, kind, groups, batch, seq_len, dtype) for kind in cfg.group]
        return Cache(jnp.zeros((), jnp.int32), tuple(layers), seq_len, jnp.dtype(dtype))

    def decode(self, cache: Cache, tokens_B: Int[Array, "B"]) -> tuple[Float[Array, "B V"], Cache]:
        """Return (next-token logits, updated cache). Runs on one device. A full cache gives NaN.

        The logits equal those of a forward pass over all tokens so far.
        """
        state = residual_class(self.cfg).enter(self.cfg, self.embed_tokens(tokens_B[:, None], cache.dtype))

        def run_group(
            carry: tuple[State, tuple[LayerCache, ...]], xs: tuple[tuple[Layer, ...], Any, Array]
        ) -> tuple[tuple[State, tuple[LayerCache, ...]], None]:
            (state, caches), (group, values, number) = carry, xs
            updated = []
            for layer, layer_cache, embedding in zip(group, caches, values, strict=True):
                at, token_values = TokenAt(number, cache.position), of_tokens(embedding, tokens_B[:, None])
                state, new_cache = for_compute(layer, cache.dtype).step(state, layer_cache, at, token_values)
                updated.append(new_cache)
            return (state, tuple(updated)), None

        size = len(self.cfg.group)
        values = of_group(self.values, self.cfg.group)
        groups = stacks_of_group(self.layers, size), values, jnp.arange(self.cfg.layers // size)
        (state, layers), _ = jax.lax.scan(run_group, (state, cache.layers), groups)
        x_BD = self.norm(residual_class(self.cfg).leave(state))[:, 0]
        logits_BV = logits_of(x_BD, self.unembed_VD, self.cfg.vocab_size)
        logits_BV = jnp.where(cache.position < cache.seq_len, logits_BV, jnp.nan)
        return logits_BV, Cache(cache.position + 1, layers, cache.seq_len, cache.dtype)

    def health(self, captured: Captures) -> dict[str, Array]:
        """Return one value or one short vector per layer, by name."""
        return jax.lax.stop_gradient(summary(captured))

    def after_layers(self, captured: Captures) -> Float[Array, "L B T D"] | None:
        """Return the stream after each layer, if the execution captures `layer_output`."""
        return captured.get("layer_output")

    def auxiliary_losses(self, captured: Captures) -> dict[str, Float[Array, ""]]:
        """Return `sparsity`: the mean entropy of the scales' weights over its maximum."""
        return {"sparsity": jnp.mean(summary(captured)["scale_entropy"])} if "game" in captured else {}


def flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Return the useful matmul FLOPs of one training token: 6 per weight, plus attention.

    Attention counts only visible query-key pairs. Lookups, norms, softmaxes, convolutions, pooling, the game, the
    mixing of streams and recomputation are not counted.
    """
    layers = sum(Layer.flops_per_token(cfg, kind, seq_len) for kind in cfg.group) * (cfg.layers // len(cfg.group))
    return layers + 6.0 * cfg.vocab_size * cfg.width
