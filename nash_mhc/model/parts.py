"""The small parts: norm, linear initialisation, embedding lookup, feed-forward."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.kv_cache import TokenAt, layer_of
from nash_mhc.model.weights import project
from nash_mhc.ops.conv import short_conv
from nash_mhc.ops.lookup import rows_of
from nash_mhc.ops.norm import rms_norm
from nash_mhc.ops.platform import is_gpu
from nash_mhc.parallel.params import VECTOR, param
from nash_mhc.parallel.sharding import constrain, mesh_axis, on_shards


def init_matrix(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int, scale: float = 1.0) -> Float[Array, "..."]:
    """Normal, cut at two deviations, variance scale^2 / fan_in."""
    # Drawn as a line where small, else as a matrix: of more axes, the same numbers take a CPU's compiler several times
    # as long. The rows of the matrix are what is summed over, so that whatever axes the mesh splits stay in front.
    size = math.prod(shape)
    drawn: tuple[int, ...] = (size,) if size < 1 << 20 else shape if len(shape) < 3 else (fan_in, size // fan_in)
    # Scaled before it is shaped: the same order of operations, and so the same bits, on every mesh.
    return (scale * fan_in**-0.5 * jax.random.truncated_normal(key, -2.0, 2.0, drawn, jnp.float32)).reshape(shape)


def init_small(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    """Normal, for parameters that are small enough to be drawn in one line, which compiles fastest."""
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
    """A causal convolution over a few tokens, each channel by itself.

    Without it, attention needs one layer to find the token before and another to use it.
    """

    taps_JD: Float[Array, "J D"] = param("taps", "vector", role=VECTOR, cast=False)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> ShortConv:
        alone_J = jnp.zeros(cfg.conv_taps).at[0].set(1.0)
        return ShortConv(alone_J[:, None] + init_small(key, (cfg.conv_taps, cfg.width), 0.02))

    def __call__(self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"] | None) -> Float[Array, "B T D"]:
        axes, of_tokens = ("batch", "time", "width"), None if segments_BT is None else ("batch", "time")
        # A GPU's kernel is nothing that a partitioner could split.
        run = on_shards(short_conv, [axes, ("taps", "width"), of_tokens], axes) if is_gpu() else short_conv
        with jax.named_scope("conv"):
            return run(constrain(x_BTD, *axes), self.taps_JD, segments_BT)

    @staticmethod
    def init_cache(cfg: ModelConfig, layers: int, batch: int, dtype: Any) -> Float[Array, "L B J D"]:
        """Return the last tokens of a stack of layers: zeros, as before a document."""
        return jnp.zeros((layers, batch, cfg.conv_taps - 1, cfg.width), dtype)

    def step(
        self, x_B1D: Float[Array, "B 1 D"], cache_LBJD: Float[Array, "L B J D"], at: TokenAt
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "L B J D"]]:
        """Return (the mixed token, the cache with this token as the latest)."""
        recent_BTD = jnp.concatenate([layer_of(cache_LBJD, at.layer), x_B1D], axis=1)
        cache_LBJD = lax.dynamic_update_index_in_dim(cache_LBJD, recent_BTD[:, 1:], at.layer, axis=0)
        return self(recent_BTD, None)[:, -1:], cache_LBJD


def embed(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Rows of the table, which is split over the vocabulary: each device looks up the tokens that it holds.

    The sum over tp both completes the rows and leaves each device with its share of T.
    """

    def lookup(table: Array, tokens: Array) -> Array:
        table = table.astype(dtype)
        for axis in mesh_axis("embed"):
            table = lax.all_gather(table, axis, axis=1, tiled=True)
        vocab_axes = mesh_axis("vocab")
        if not vocab_axes:
            return rows_of(table, tokens)
        index = tokens - lax.axis_index(vocab_axes) * table.shape[0]
        held = (index >= 0) & (index < table.shape[0])
        rows = jnp.where(held[..., None], rows_of(table, jnp.clip(index, 0, table.shape[0] - 1)), 0)
        return lax.psum_scatter(rows, vocab_axes, scatter_dimension=1, tiled=True)

    axes = [("vocab", "embed"), ("batch", "time")]
    with jax.named_scope("embedding"):
        return on_shards(lookup, axes, ("batch", "time_split", "width"))(table_VD, tokens_BT)


def logits_of(x: Float[Array, "... D"], unembed_VD: Float[Array, "_ D"], vocab_size: int) -> Float[Array, "... V"]:
    """In float32, of the tokens that there are: without the padding of the vocabulary."""
    return jnp.einsum("...d,vd->...v", x, unembed_VD[:vocab_size].astype(x.dtype), preferred_element_type=jnp.float32)


@runtime_checkable
class Sizes(Protocol):
    """What a feed-forward layer reads of a configuration."""

    @property
    def width(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def layers(self) -> int: ...


UP, DOWN = "ffn_up", "ffn_down"  # checkpoint names: gate and up, before they are multiplied; what comes out


class SwiGLU(eqx.Module):
    gate_DF: Float[Array, "D F"] = param("embed", "ffn")
    up_DF: Float[Array, "D F"] = param("embed", "ffn")
    down_FD: Float[Array, "F D"] = param("ffn", "embed")

    @staticmethod
    def init(cfg: Sizes, *, key: PRNGKeyArray) -> SwiGLU:
        gate, up, down = jax.random.split(key, 3)
        D, F = cfg.width, cfg.ffn
        # What a layer adds to the stream starts small enough that the sum over 2L additions keeps its scale.
        return SwiGLU(
            init_matrix(gate, (D, F), D), init_matrix(up, (D, F), D), init_matrix(down, (F, D), F, (2 * cfg.layers) ** -0.5)
        )

    def widened(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        gate_BTF, up_BTF = (
            checkpoint_name(constrain(project(x_BTD, w_DF), "batch", "time", "ffn"), UP) for w_DF in (self.gate_DF, self.up_DF)
        )
        return jax.nn.silu(gate_BTF) * up_BTF

    def narrowed(self, h_BTF: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        return checkpoint_name(constrain(project(h_BTF, self.down_FD, "btf,fd->btd"), "batch", "time_split", "width"), DOWN)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.narrowed(self.widened(x_BTD))

    @staticmethod
    def flops_per_token(cfg: Sizes) -> float:
        """Return matmul FLOPs of one training token in one layer."""
        return 6.0 * 3 * cfg.width * cfg.ffn
