"""Dense causal attention: grouped queries, rotary positions, packed documents."""

from __future__ import annotations

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.parts import RMSNorm, init_matrix
from nash_mhc.ops.attend import PLAIN_KERNELS, attend
from nash_mhc.ops.rope import rope
from nash_mhc.parallel.sharding import constrain, on_shards, param


class Attention(eqx.Module):
    q_DNH: Float[Array, "D N H"] = param("embed", "heads", "head_dim")
    k_DKH: Float[Array, "D K H"] = param("embed", "kv_heads", "head_dim")
    v_DKH: Float[Array, "D K H"] = param("embed", "kv_heads", "head_dim")
    out_NHD: Float[Array, "N H D"] = param("heads", "head_dim", "embed")
    q_bias_NH: Float[Array, "N H"] | None = param("heads", "head_dim", decay=False)
    k_bias_KH: Float[Array, "K H"] | None = param("kv_heads", "head_dim", decay=False)
    v_bias_KH: Float[Array, "K H"] | None = param("kv_heads", "head_dim", decay=False)
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rope_theta: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> Attention:
        q, k, v, out = jax.random.split(key, 4)
        D, N, K, H = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
        bias = (lambda heads: jnp.zeros((heads, H), jnp.float32)) if cfg.qkv_bias else (lambda heads: None)
        norm = (lambda: RMSNorm.init(H, cfg.norm_eps)) if cfg.qk_norm else (lambda: None)
        return Attention(
            q_DNH=init_matrix(q, (D, N, H), D), k_DKH=init_matrix(k, (D, K, H), D), v_DKH=init_matrix(v, (D, K, H), D),
            out_NHD=init_matrix(out, (N, H, D), N * H, (2 * cfg.layers) ** -0.5),
            q_bias_NH=bias(N), k_bias_KH=bias(K), v_bias_KH=bias(K), q_norm=norm(), k_norm=norm(),
            rope_theta=cfg.rope_theta, window=cfg.window,
        )  # fmt: skip

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments_BT: Int[Array, "B T"] | None,
        positions_BT: Int[Array, "B T"],
        *,
        kernel: str,
    ) -> Float[Array, "B T D"]:
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        q_BTNH = jnp.einsum("btd,dnh->btnh", x_BTD, self.q_DNH)
        k_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, self.k_DKH)
        v_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, self.v_DKH)
        if self.q_bias_NH is not None and self.k_bias_KH is not None and self.v_bias_KH is not None:
            # [None, None] spells the broadcast out: the tests run with implicit rank promotion forbidden.
            q_BTNH = q_BTNH + self.q_bias_NH[None, None]
            k_BTKH, v_BTKH = k_BTKH + self.k_bias_KH[None, None], v_BTKH + self.v_bias_KH[None, None]
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rope(q_BTNH, positions_BT, self.rope_theta), rope(k_BTKH, positions_BT, self.rope_theta)
        # Rows and heads are independent, so every kernel works on its device's own part and nothing crosses.
        per_head, per_kv_head = ("batch", "time", "heads", "head_dim"), ("batch", "time", "kv_heads", "head_dim")
        run: Callable[..., Array] = functools.partial(attend, window=self.window, kernel=kernel)
        if kernel in PLAIN_KERNELS:
            # Ordinary array code: the partitioner splits it by these constraints. (Differentiated inside shard_map, it crashes
            # the CPU compiler of jax 0.11.2.)
            q_BTNH, k_BTKH, v_BTKH = (
                constrain(q_BTNH, *per_head),
                constrain(k_BTKH, *per_kv_head),
                constrain(v_BTKH, *per_kv_head),
            )
        else:
            in_axes = [per_head, per_kv_head, per_kv_head, None if segments_BT is None else ("batch", "time")]
            run = on_shards(run, in_axes, per_head)
        mixed_BTNH = constrain(run(q_BTNH, k_BTKH, v_BTKH, segments_BT), *per_head)
        return constrain(jnp.einsum("btnh,nhd->btd", mixed_BTNH, self.out_NHD), "batch", "time_split", "width")
