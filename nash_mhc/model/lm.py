"""The language model: embedding, a scan over stacked layers, final norm, output projection."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import Attention
from nash_mhc.model.parts import RMSNorm, SwiGLU, embed, init_matrix
from nash_mhc.ops.attend import best_kernel
from nash_mhc.ops.rope import positions_in_segments
from nash_mhc.parallel.sharding import for_compute, is_gathered_weight, param, stacked


@dataclass(frozen=True)
class Execution:
    """How a forward pass is carried out; never what it computes."""

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"

    def kernel(self, cfg: ModelConfig, seq_len: int) -> str:
        if self.attention != "auto":
            return self.attention
        return best_kernel(jax.default_backend(), self.dtype, seq_len, cfg.head_dim, cfg.window)


def remat_policy(name: str) -> Any:
    """What the backward pass finds saved. No policy keeps gathered weights: that would undo fsdp's saving."""
    policies = jax.checkpoint_policies
    return {
        "none": lambda primitive, *_, **params: not is_gathered_weight(primitive, params),
        "dots": policies.dots_with_no_batch_dims_saveable,
        "full": policies.nothing_saveable,
    }[name]


class Layer(eqx.Module):
    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    ffn: SwiGLU

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> Layer:
        attention, ffn = jax.random.split(key)
        norm = functools.partial(RMSNorm.init, cfg.width, cfg.norm_eps)
        return Layer(norm(), Attention.init(cfg, key=attention), norm(), SwiGLU.init(cfg, key=ffn))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments_BT: Int[Array, "B T"] | None,
        positions_BT: Int[Array, "B T"],
        *,
        kernel: str,
    ) -> Float[Array, "B T D"]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), segments_BT, positions_BT, kernel=kernel)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class LM(eqx.Module):
    """A decoder. `LM.init(cfg, key=key)` makes one; `model(tokens_BT)` gives logits for the next tokens."""

    embed_VD: Float[Array, "V D"] = param("vocab", "embed")
    layers: Layer = stacked()
    norm: RMSNorm
    output_VD: Float[Array, "V D"] | None = param("vocab", "embed")
    cfg: ModelConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> LM:
        embedding, layers, output = jax.random.split(key, 3)
        V, D = cfg.padded_vocab, cfg.width
        stack = jax.vmap(lambda k: Layer.init(cfg, key=k))(jax.random.split(layers, cfg.layers))
        return LM(
            embed_VD=init_matrix(embedding, (V, D), D),
            layers=stack,
            norm=RMSNorm.init(D, cfg.norm_eps),
            output_VD=None if cfg.tied_embeddings else init_matrix(output, (V, D), D),
            cfg=cfg,
        )

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        """The output projection; the embedding itself when tied (one leaf, not two)."""
        return self.embed_VD if self.output_VD is None else self.output_VD

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> Float[Array, "B T D"]:
        """The normalised stream after the last layer: what the loss and the logits are read from."""
        if segments_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
        else:
            positions_BT = positions_in_segments(segments_BT)
        # The table is scaled for the output, where it meets a stream of norm sqrt(D); as input that would drown in the layers'
        # own outputs, so it enters at unit scale.
        x_BTD = embed(self.embed_VD, tokens_BT, jnp.dtype(execution.dtype)) * self.cfg.width**0.5

        kernel = execution.kernel(self.cfg, tokens_BT.shape[1])

        @functools.partial(jax.checkpoint, policy=remat_policy(execution.remat))
        def body(x: Array, layer: Layer) -> Array:
            layer = for_compute(layer, x.dtype)
            return layer(x, segments_BT, positions_BT, kernel=kernel)

        x_BTD, _ = jax.lax.scan(lambda x, layer: (body(x, layer), None), x_BTD, self.layers)
        return self.norm(x_BTD)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, without the padding of the vocabulary. Segment ids keep packed documents apart."""
        x_BTD = self.hidden(tokens_BT, segments_BT, execution)
        w_VD = self.unembed_VD[: self.cfg.vocab_size].astype(x_BTD.dtype)
        return jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)


def count_parameters(cfg: ModelConfig) -> int:
    """Exact number of parameters, padding of the vocabulary included."""
    shapes = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of one training token: 6 a matmul weight, and causal attention counted once.

    Lookups, norms and softmaxes are left out, and so is whatever remat computes again: this is useful work.
    """
    attention = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    weights = cfg.layers * (attention + 3 * cfg.width * cfg.ffn) + cfg.vocab_size * cfg.width
    # Keys that a query sees, on average over the row: T/2, or less within a window.
    w = min(cfg.window or seq_len, seq_len)
    keys = w * (1 - w / (2 * seq_len))
    return 6.0 * weights + 12.0 * cfg.layers * cfg.heads * cfg.head_dim * keys
