"""Small building blocks: initializers, norm, short convolution, embeddings, logits, MLPs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.kv_cache import TokenAt, layer_of
from nash_mhc.model.weights import project
from nash_mhc.ops.activations import silu_product, squared_relu
from nash_mhc.ops.conv import short_conv
from nash_mhc.ops.lookup import rows_of
from nash_mhc.ops.norm import rms_norm
from nash_mhc.ops.platform import is_gpu
from nash_mhc.parallel.params import GATE, VALUE, VECTOR, param
from nash_mhc.parallel.sharding import constrain, mesh_axis, on_shards


def init_matrix(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int, scale: float = 1.0) -> Float[Array, "..."]:
    """Sample a normal, truncated at two standard deviations, with variance scale^2 / fan_in."""
    # Sampled flat, or as a matrix if large: with more axes, XLA on a CPU takes several times as long to compile.
    # The matrix is (fan-in, rest). In both groups of merged axes, the axis that the mesh splits is the first.
    size = math.prod(shape)
    flat: tuple[int, ...] = (size,) if size < 1 << 20 else shape if len(shape) < 3 else (fan_in, size // fan_in)
    # Scale before the reshape: the same order of operations, hence the same bits, on every mesh.
    return (scale * fan_in**-0.5 * jax.random.truncated_normal(key, -2.0, 2.0, flat, jnp.float32)).reshape(shape)


def init_small(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Sample a normal for a small parameter, flat, which compiles fastest."""
    return (deviation * jax.random.normal(key, (math.prod(shape),))).reshape(shape)


class RMSNorm(eqx.Module):
    scale_D: Float[Array, "D"] = param("vector")
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(width: int, eps: float) -> RMSNorm:
        return RMSNorm(jnp.ones(width, jnp.float32), eps)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.scale_D, self.eps)


class ShortConv(eqx.Module):
    """A causal depthwise convolution over a few tokens.

    Without it, attention needs one layer to find the previous token and another to use it.
    """

    taps_JD: Float[Array, "J D"] = param("taps", "vector", role=VECTOR, cast=False)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> ShortConv:
        identity_J = jnp.zeros(cfg.conv_taps).at[0].set(1.0)
        return ShortConv(identity_J[:, None] + init_small(key, (cfg.conv_taps, cfg.width), 0.02))

    def __call__(self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"] | None) -> Float[Array, "B T D"]:
        axes, segment_axes = ("batch", "time", "width"), None if segments_BT is None else ("batch", "time")
        # The partitioner cannot split the GPU kernel.
        run = on_shards(short_conv, [axes, ("taps", "width"), segment_axes], axes) if is_gpu() else short_conv
        with jax.named_scope("conv"):
            return run(constrain(x_BTD, *axes), self.taps_JD, segments_BT)

    @staticmethod
    def init_cache(cfg: ModelConfig, layers: int, batch: int, dtype: Any) -> Float[Array, "L B J D"]:
        """Return an empty cache for a stack of layers: zeros, as at the start of a document."""
        return jnp.zeros((layers, batch, cfg.conv_taps - 1, cfg.width), dtype)

    def step(
        self, x_B1D: Float[Array, "B 1 D"], cache_LBJD: Float[Array, "L B J D"], at: TokenAt
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "L B J D"]]:
        """Return (output for one token, updated cache)."""
        recent_BTD = jnp.concatenate([layer_of(cache_LBJD, at.layer), x_B1D], axis=1)
        cache_LBJD = lax.dynamic_update_index_in_dim(cache_LBJD, recent_BTD[:, 1:], at.layer, axis=0)
        return self(recent_BTD, None)[:, -1:], cache_LBJD


def embed(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Look up tokens in a table split over the vocabulary: each device looks up the ids that it holds.

    The reduce-scatter over tp sums the rows and leaves each device with its share of T.
    """

    def lookup(table: Array, tokens: Array) -> Array:
        table = table.astype(dtype)
        for axis in mesh_axis("embed"):
            table = lax.all_gather(table, axis, axis=1, tiled=True)
        vocab_axes = mesh_axis("vocab")
        if not vocab_axes:
            return rows_of(table, tokens)
        index = tokens - lax.axis_index(vocab_axes) * table.shape[0]
        is_local = (index >= 0) & (index < table.shape[0])
        rows = jnp.where(is_local[..., None], rows_of(table, jnp.clip(index, 0, table.shape[0] - 1)), 0)
        return lax.psum_scatter(rows, vocab_axes, scatter_dimension=1, tiled=True)

    axes = [("vocab", "embed"), ("batch", "time")]
    with jax.named_scope("embedding"):
        return on_shards(lookup, axes, ("batch", "time_split", "width"))(table_VD, tokens_BT)


def logits_of(x: Float[Array, "... D"], unembed_VD: Float[Array, "_ D"], vocab_size: int) -> Float[Array, "... V"]:
    """Return float32 logits without the padding of the vocabulary."""
    return jnp.einsum("...d,vd->...v", x, unembed_VD[:vocab_size].astype(x.dtype), preferred_element_type=jnp.float32)


UP, DOWN = "ffn_up", "ffn_down"  # checkpoint names: gate and up before their product; the output


class SwiGLU(eqx.Module):
    """`cfg` is any configuration with width, ffn and layers."""

    gate_DF: Float[Array, "D F"] = param("embed", "ffn")
    up_DF: Float[Array, "D F"] = param("embed", "ffn")
    down_FD: Float[Array, "F D"] = param("ffn", "embed")

    @staticmethod
    def init(cfg: Any, *, key: PRNGKeyArray) -> SwiGLU:
        gate, up, down = jax.random.split(key, 3)
        D, F = cfg.width, cfg.ffn
        # Small initial outputs, so that the sum of 2L of them keeps the scale of the stream.
        return SwiGLU(
            init_matrix(gate, (D, F), D), init_matrix(up, (D, F), D), init_matrix(down, (F, D), F, (2 * cfg.layers) ** -0.5)
        )

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        gate_BTF, up_BTF = (
            checkpoint_name(constrain(project(x_BTD, w_DF), "batch", "time", "ffn"), UP) for w_DF in (self.gate_DF, self.up_DF)
        )
        out_BTD = project(silu_product(gate_BTF, up_BTF), self.down_FD, "btf,fd->btd")
        return checkpoint_name(constrain(out_BTD, "batch", "time_split", "width"), DOWN)

    @staticmethod
    def flops_per_token(cfg: Any) -> float:
        """Return matmul FLOPs of one training token in one layer."""
        return 6.0 * 3 * cfg.width * cfg.ffn


class ReLU2(eqx.Module):
    """Two matrices with a squared ReLU between them."""

    up_DF: Float[Array, "D F"] = param("embed", "ffn")
    down_FD: Float[Array, "F D"] = param("ffn", "embed")

    @staticmethod
    def init(cfg: Any, *, key: PRNGKeyArray) -> ReLU2:
        up, down = jax.random.split(key)
        D, F = cfg.width, cfg.ffn
        return ReLU2(init_matrix(up, (D, F), D), init_matrix(down, (F, D), F, (2 * cfg.layers) ** -0.5))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        up_BTF = checkpoint_name(constrain(project(x_BTD, self.up_DF), "batch", "time", "ffn"), UP)
        out_BTD = project(squared_relu(up_BTF), self.down_FD, "btf,fd->btd")
        return checkpoint_name(constrain(out_BTD, "batch", "time_split", "width"), DOWN)

    @staticmethod
    def flops_per_token(cfg: Any) -> float:
        """Return matmul FLOPs of one training token in one layer."""
        return 6.0 * 2 * cfg.width * cfg.ffn


_GATE_CHANNELS = 12  # the first channels of a token, which determine the gates of its value embedding


class ValueEmbedding(eqx.Module):
    """A second embedding of each token, added to the values of attention (arXiv 2410.17897).

    One layer has a table, which is looked up and costs no FLOPs, and a gate for each key and value head.
    """

    table_VE: Float[Array, "V E"] = param("vocab", "value_embed", role=VALUE)
    gate_JK: Float[Array, "J K"] = param("vector", "kv_heads", role=GATE)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> ValueEmbedding:
        table, gate = jax.random.split(key)
        return ValueEmbedding(
            init_matrix(table, (cfg.padded_vocab, cfg.kv_heads * cfg.head_dim), cfg.width),
            jnp.abs(init_small(gate, (min(_GATE_CHANNELS, cfg.width), cfg.kv_heads), 0.02)),
        )


class TokenValues(NamedTuple):
    """A layer's value embedding and the tokens to look up."""

    embedding: ValueEmbedding
    tokens_BT: Int[Array, "B T"]

    def of(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T K H"]:
        """Return the gated embeddings to add to the values of these tokens; x is the input of attention."""
        gate_JK = self.embedding.gate_JK.astype(x_BTD.dtype)
        J, K = gate_JK.shape
        rows_BTE = embed(self.embedding.table_VE, self.tokens_BT, x_BTD.dtype)
        rows_BTKH = rows_BTE.reshape(*rows_BTE.shape[:2], K, -1)
        gates_BTK = 3 * jax.nn.sigmoid(jnp.einsum("btj,jk->btk", x_BTD[..., :J], gate_JK))
        return constrain(gates_BTK[..., None] * rows_BTKH, "batch", "time", "kv_heads", "head_dim")


def of_tokens(embedding: ValueEmbedding | None, tokens_BT: Int[Array, "B T"]) -> TokenValues | None:
    return None if embedding is None else TokenValues(embedding, tokens_BT)


def of_group(embeddings: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Split the stack of all layers' value embeddings into one stack per layer of a group; None without them."""
    size, index, each = sum(kind.values for kind in kinds), 0, []
    for kind in kinds:
        each.append(jax.tree.map(lambda a, index=index: a[index::size], embeddings) if kind.values else None)
        index += kind.values
    return tuple(each)
