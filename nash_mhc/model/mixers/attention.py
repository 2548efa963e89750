"""Causal attention with grouped queries, rotary positions and packed documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.model import RopeScaling
from nash_mhc.model.kv_cache import KeyValues, TokenAt
from nash_mhc.model.parts import RMSNorm, TokenValues, init_matrix
from nash_mhc.model.weights import project
from nash_mhc.ops.attend import PLAIN_KERNELS, attend, supported_kernel
from nash_mhc.ops.attention_io import AttentionInput, Documents
from nash_mhc.ops.kernels.attend_cudnn import documents_of
from nash_mhc.ops.norm import norm_and_rope_copies
from nash_mhc.ops.platform import is_gpu
from nash_mhc.ops.rope import Rotation, positions_in_segments, rope
from nash_mhc.ops.spread import Spread, plan_spread
from nash_mhc.parallel.params import VECTOR, param
from nash_mhc.parallel.sharding import constrain, on_shards

QKV, OUTPUT = "queries_keys_values", "attention_output"  # checkpoint names
PER_HEAD, PER_KV_HEAD = ("batch", "time", "heads", "head_dim"), ("batch", "time", "kv_heads", "head_dim")


class AttentionLayout(NamedTuple):
    """Documents and positions of the tokens of a batch, shared by all layers."""

    segments_BT: Int[Array, "B T"] | None  # document ids; None: every sequence is one document
    positions_BT: Int[Array, "B T"]  # within the document
    documents: tuple[Documents, ...] = ()  # per scale, for kernels that need them
    # If set, documents may begin anywhere; the fields above describe the padded sequence, aligned to the strides.
    spread: Spread | None = None
    original_segments_BT: Int[Array, "B T"] | None = None  # document ids of the original sequence

    def at(self, c: int, stride: int) -> tuple[Array | None, Array, Documents | None]:
        """Return (segments, positions, documents) of scale c.

        Scale c sees one row per `stride` tokens (multiscale.py); plain attention uses scale 0, stride 1.
        """
        segments_BI = None if self.segments_BT is None else self.segments_BT[:, ::stride]
        return segments_BI, self.positions_BT[:, ::stride], self.documents[c] if self.documents else None

    def original_layout(self) -> AttentionLayout:
        """Return the layout of the original sequences, for a mixer without coarse scales."""
        if self.spread is None:
            return self
        assert self.original_segments_BT is not None
        return AttentionLayout(
            self.original_segments_BT,
            positions_in_segments(self.original_segments_BT),
            original_segments_BT=self.original_segments_BT,
        )


def attention_layout(
    shape: tuple[int, ...],
    segments_BT: Int[Array, "B T"] | None,
    strides: Sequence[int] = (1,),
    kernel: str = "xla",
    most_documents: int | None = None,
    padded_length: int | None = None,
) -> AttentionLayout:
    """Return the layout of sequences of that shape with at most `most_documents` documents each.

    With `padded_length`, documents may begin anywhere: they are aligned to the coarsest stride, up to this length.
    """
    if segments_BT is None:
        return AttentionLayout(None, jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape))
    if padded_length is not None and strides[-1] > 1:
        spread, padded_BU = plan_spread(segments_BT, strides[-1], padded_length)
        layout = attention_layout((shape[0], padded_length), padded_BU, strides, kernel, most_documents)
        return layout._replace(spread=spread, original_segments_BT=segments_BT)
    documents = tuple(documents_of(segments_BT[:, ::stride], most_documents) for stride in strides) if kernel == "cudnn" else ()
    return AttentionLayout(segments_BT, positions_in_segments(segments_BT), documents, original_segments_BT=segments_BT)


def sharded_attention(
    run: Callable[..., Any], inputs: Sequence[AttentionInput], kernels: Sequence[str], out_axes: Any
) -> Callable[..., Any]:
    """Return `run(inputs)`, on each device's own sequences and heads if the partitioner cannot split a kernel."""
    if set(kernels) <= set(PLAIN_KERNELS):
        return run
    batch_axes = lambda tree, *axes: jax.tree.map(lambda a: ("batch", *axes[: a.ndim - 1]), tree)
    # Axes of each array of segments and documents: batch first; some have no second axis.
    packing_axes: Any = lambda x: (batch_axes(x.segments_BI, "time"), batch_axes(x.documents, "documents"))
    axes = tuple(AttentionInput._make((PER_HEAD, PER_KV_HEAD, PER_KV_HEAD, *packing_axes(x))) for x in inputs)
    return on_shards(run, [axes], (out_axes,) * len(inputs))


def constrain_per_head(inputs: AttentionInput) -> AttentionInput:
    """Shard queries, keys and values by head, with the whole sequence on each device."""
    return inputs._replace(
        q_BTNH=constrain(inputs.q_BTNH, *PER_HEAD), k_BIKH=constrain(inputs.k_BIKH, *PER_KV_HEAD),
        v_BIKH=constrain(inputs.v_BIKH, *PER_KV_HEAD),
    )  # fmt: skip


def rotation_of(cfg: Any) -> Rotation:
    if cfg.rope_scaling is None:
        return Rotation(cfg.rope_theta)
    scaling = RopeScaling.parse(cfg.rope_scaling)
    return Rotation(cfg.rope_theta, scaling.multipliers(cfg.rope_theta, cfg.head_dim), scaling.cos_sin_amplitude)


class Attention(eqx.Module):
    """Causal grouped-query attention: project, norm and rotate, attend, project back.

    `cfg` is a ModelConfig, or the configuration of a kit's model with the same fields.
    """

    q_DNH: Float[Array, "D N H"] = param("embed", "heads", "head_dim")
    k_DKH: Float[Array, "D K H"] = param("embed", "kv_heads", "head_dim")
    v_DKH: Float[Array, "D K H"] = param("embed", "kv_heads", "head_dim")
    out_NHD: Float[Array, "N H D"] = param("heads", "head_dim", "embed", inputs=2)  # N and H are summed over
    q_bias_NH: Float[Array, "N H"] | None = param("heads", "head_dim", role=VECTOR)
    k_bias_KH: Float[Array, "K H"] | None = param("kv_heads", "head_dim", role=VECTOR)
    v_bias_KH: Float[Array, "K H"] | None = param("kv_heads", "head_dim", role=VECTOR)
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rotation: Rotation = eqx.field(static=True)

    @staticmethod
    def init(cfg: Any, *, key: PRNGKeyArray) -> Attention:
        q, k, v, out = jax.random.split(key, 4)
        D, N, K, H = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
        bias = (lambda heads: jnp.zeros((heads, H), jnp.float32)) if cfg.qkv_bias else (lambda heads: None)
        norm = (lambda: RMSNorm.init(H, cfg.norm_eps)) if cfg.qk_norm else (lambda: None)
        return Attention(
            q_DNH=init_matrix(q, (D, N, H), D), k_DKH=init_matrix(k, (D, K, H), D), v_DKH=init_matrix(v, (D, K, H), D),
            out_NHD=init_matrix(out, (N, H, D), N * H, (2 * cfg.layers) ** -0.5),
            q_bias_NH=bias(N), k_bias_KH=bias(K), v_bias_KH=bias(K), q_norm=norm(), k_norm=norm(),
            rotation=rotation_of(cfg),
        )  # fmt: skip

    def project(self, x_BTD: Float[Array, "B T D"], values: TokenValues | None = None) -> tuple[Array, Array, Array]:
        """Return projected queries, keys and values [B, T, heads, H], before norms and rotation."""
        q_BTNH = project(x_BTD, self.q_DNH, "btd,dnh->btnh")
        k_BTKH = project(x_BTD, self.k_DKH, "btd,dkh->btkh")
        v_BTKH = project(x_BTD, self.v_DKH, "btd,dkh->btkh")
        if self.q_bias_NH is not None and self.k_bias_KH is not None and self.v_bias_KH is not None:
            # [None, None], as the tests forbid implicit rank promotion.
            q_BTNH = q_BTNH + self.q_bias_NH[None, None]
            k_BTKH, v_BTKH = k_BTKH + self.k_bias_KH[None, None], v_BTKH + self.v_bias_KH[None, None]
        if values is not None:
            v_BTKH = v_BTKH + values.of(x_BTD)
        return checkpoint_name(q_BTNH, QKV), checkpoint_name(k_BTKH, QKV), checkpoint_name(v_BTKH, QKV)

    def rotate(
        self, q_BTNH: Float[Array, "B T N H"], k_BTKH: Float[Array, "B T K H"], positions_BT: Int[Array, "B T"]
    ) -> tuple[Array, Array]:
        """Return queries and keys, normalized per head and rotated to their positions."""
        (q_BTNH,) = self.rotate_queries(q_BTNH, positions_BT, copies=1)
        return q_BTNH, self.rotate_keys(k_BTKH, positions_BT)

    def rotate_queries(
        self, q_BTNH: Float[Array, "B T N H"], positions_BT: Int[Array, "B T"], *, copies: int
    ) -> tuple[Array, ...]:
        """Return one copy per scale that attends with them: one backward pass then sums their gradients."""
        return self._norm_and_rotate(q_BTNH, self.q_norm, positions_BT, PER_HEAD, copies)

    def rotate_keys(self, k_BTKH: Float[Array, "B T K H"], positions_BT: Int[Array, "B T"]) -> Array:
        return self._norm_and_rotate(k_BTKH, self.k_norm, positions_BT, PER_KV_HEAD, 1)[0]

    def _norm_and_rotate(
        self, x_BTNH: Array, norm: RMSNorm | None, positions_BT: Array, axes: tuple[str, ...], copies: int
    ) -> tuple[Array, ...]:
        if norm is None:
            return (rope(x_BTNH, positions_BT, self.rotation),) * copies
        run = lambda x, scale, positions: norm_and_rope_copies(x, scale, positions, norm.eps, self.rotation, copies)
        if is_gpu():  # the partitioner cannot split the kernel: each device rotates its own heads
            run = on_shards(run, [axes, ("head_dim",), ("batch", "time")], (axes,) * copies)
        return run(x_BTNH, norm.scale_D, positions_BT)

    def output(self, mixed_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return checkpoint_name(project(mixed_BTNH, self.out_NHD, "btnh,nhd->btd"), OUTPUT)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        layout: AttentionLayout,
        *,
        window: int | None,
        kernel: str,
        values: TokenValues | None = None,
    ) -> Float[Array, "B T D"]:
        layout = layout.original_layout()
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        segments_BT, positions_BT, documents = layout.at(0, 1)
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, values)
        inputs = AttentionInput(*self.rotate(q_BTNH, k_BTKH, positions_BT), v_BTKH, segments_BT, documents)
        mixed_BTNH = self.attend(inputs, window=window, kernel=kernel)
        return constrain(self.output(constrain(mixed_BTNH, *PER_HEAD)), "batch", "time_split", "width")

    def attend(self, inputs: AttentionInput, *, window: int | None, kernel: str) -> Float[Array, "B T N H"]:
        T, H, dtype = inputs.q_BTNH.shape[1], inputs.q_BTNH.shape[-1], str(inputs.v_BIKH.dtype)
        kernel = supported_kernel(kernel, dtype, T, H, window)
        if kernel in PLAIN_KERNELS:
            # The partitioner splits array code by these constraints. (Differentiating it inside shard_map crashes the
            # CPU compiler of jax 0.11.2.)
            inputs = constrain_per_head(inputs)
        run_one = lambda inputs: (attend(*inputs[0], window=window, kernel=kernel),)
        run = sharded_attention(run_one, [inputs], [kernel], PER_HEAD)
        with jax.named_scope("attention"):
            (mixed_BTNH,) = run((inputs,))
        return mixed_BTNH

    @staticmethod
    def init_cache(cfg: Any, window: int | None, layers: int, batch: int, seq_len: int, dtype: Any) -> KeyValues:
        """Return an empty cache for a stack of layers, with one row per token of the window."""
        return KeyValues.empty(layers, batch, cfg.kv_heads, min(window or seq_len, seq_len), cfg.head_dim, dtype)

    def step(
        self, x_B1D: Float[Array, "B 1 D"], cache: KeyValues, at: TokenAt, values: TokenValues | None = None
    ) -> tuple[Float[Array, "B 1 D"], KeyValues]:
        """Return (output for one token, updated cache)."""
        q_B1NH, k_B1KH, v_B1KH = self.project(x_B1D, values)
        q_B1NH, k_B1KH = self.rotate(q_B1NH, k_B1KH, jnp.broadcast_to(at.position, x_B1D.shape[:2]))
        cache = cache.write(at.layer, at.position, k_B1KH, v_B1KH)
        return self.output(cache.attend(q_B1NH, at.layer, at.position).out_BTNH), cache

    @staticmethod
    def flops_per_token(cfg: Any, window: int | None, seq_len: int) -> float:
        """Return matmul FLOPs of one training token in one layer, counting only visible query-key pairs."""
        weights = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
        seen = min(window or seq_len, seq_len)
        keys = seen * (1 - seen / (2 * seq_len))  # visible keys per query, on average: T/2, or fewer with a window
        return 6.0 * weights + 12.0 * cfg.heads * cfg.head_dim * keys
