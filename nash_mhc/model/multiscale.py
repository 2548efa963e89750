"""Causal multiscale attention: one projection, many resolutions, and a game that weighs what they found."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import PER_HEAD, PER_KV_HEAD, Attention, Layout
from nash_mhc.model.parts import init_matrix, init_small
from nash_mhc.ops.attend import Rows
from nash_mhc.ops.nash import Rules, aggregate
from nash_mhc.ops.pyramid import continues, pool
from nash_mhc.ops.spread import Spread, gather, spread
from nash_mhc.parallel.sharding import constrain, on_shards, param

MIXED = "mixed_scales"  # checkpoint name of what leaves the game: one [B, T, D] array instead of a pass over all scales
Projected = tuple[Array, Array, Array]  # q, k, v of one scale, before norm and rotation
_PER_SCALE = ("batch", "time", "scales", "heads")


class GameReport(NamedTuple):
    """What the game of one layer came to, summed over the real tokens of each row; heads apart, so nothing crosses devices."""

    weight_BCN: Float[Array, "*L B C N"]
    entropy_BN: Float[Array, "*L B N"]  # of the weights, as a share of ln C; this one carries a gradient
    residual_BN: Float[Array, "*L B N"]  # |BR(w) - w|_1
    tokens_B: Float[Array, "*L B"]


class Multiscale(eqx.Module):
    """Scale 0 is the attention it holds, over the last `window` tokens; each further scale is `ratio` times coarser."""

    base: Attention
    pool_q_CJNH: Float[Array, "coarse J N H"] = param("scales", "taps", "heads", "head_dim", decay=False, cast=False)
    pool_k_CJKH: Float[Array, "coarse J K H"] = param("scales", "taps", "kv_heads", "head_dim", decay=False, cast=False)
    pool_v_CJKH: Float[Array, "coarse J K H"] = param("scales", "taps", "kv_heads", "head_dim", decay=False, cast=False)
    prior_DCN: Float[Array, "D C N"] = param("embed", "scales", "heads")
    prior_bias_CN: Float[Array, "C N"] = param("scales", "heads", decay=False, cast=False)
    tau_N: Float[Array, "N"] = param("heads")  # before softplus
    strides: tuple[int, ...] = eqx.field(static=True)
    rules: Rules = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> Multiscale:
        base, prior, *pools = jax.random.split(key, 5)
        C, r, H = cfg.scales, cfg.ratio, cfg.head_dim
        # The mean of the row's own block, and nothing yet of the block before it.
        mean_J = jnp.concatenate([jnp.zeros(r), jnp.full(r, 1.0 / r)])

        def taps(key: PRNGKeyArray, heads: int) -> Array:
            return mean_J[None, :, None, None] + init_small(key, (C - 1, 2 * r, heads, H), 0.02)

        return Multiscale(
            base=Attention.init(cfg, key=base),
            pool_q_CJNH=taps(pools[0], cfg.heads),
            pool_k_CJKH=taps(pools[1], cfg.kv_heads), pool_v_CJKH=taps(pools[2], cfg.kv_heads),
            prior_DCN=init_matrix(prior, (cfg.width, C, cfg.heads), cfg.width, 0.1),
            prior_bias_CN=jnp.zeros((C, cfg.heads)), tau_N=jnp.full(cfg.heads, math.log(math.e - 1.0)),
            strides=cfg.strides, rules=Rules(cfg.aggregation, cfg.nash_iterations),
        )  # fmt: skip

    def prior(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T C N"]:
        """What each head expects of each scale, from the token itself."""
        from_token = jnp.einsum("btd,dcn->btcn", x_BTD, self.prior_DCN, preferred_element_type=jnp.float32)
        return from_token + self.prior_bias_CN[None, None]

    def coarser(
        self,
        c: int,
        q_BTNH: Float[Array, "B T N H"],
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        goes_on_BI: Bool[Array, "B I"],
    ) -> tuple[Projected, Projected]:
        """(those of the scale below, for further use; queries, keys and values of scale c, pooled from them)."""

        def pooled(z: Array, taps_CJNH: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
            run = on_shards(pool, [axes, ("taps", *axes[2:]), ("batch", "time")], (axes, axes))
            return run(z, taps_CJNH[c - 1], goes_on_BI)

        with jax.named_scope("pooling"):
            below, above = zip(
                pooled(q_BTNH, self.pool_q_CJNH, PER_HEAD),
                pooled(k_BTKH, self.pool_k_CJKH, PER_KV_HEAD),
                pooled(v_BTKH, self.pool_v_CJKH, PER_KV_HEAD),
                strict=True,
            )
        return below, above

    def settle(
        self, prior_BTCN: Float[Array, "B T C N"], outs: tuple[Array, ...], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T C N"], Float[Array, "B T N"]]:
        """The game: (what the scales found, weighed, the weights, the residual). A scale is there once a block has ended."""
        with jax.named_scope("nash"):
            present_BTC = jnp.stack([positions_BT + 1 >= stride for stride in self.strides], axis=-1)
            of_scales = _PER_SCALE
            run = on_shards(
                functools.partial(aggregate, rules=self.rules),
                [(PER_HEAD,) * len(outs), of_scales, ("heads",), of_scales[:3]],
                (PER_HEAD, of_scales, ("batch", "time", "heads")),
            )
            return run(outs, prior_BTCN, jax.nn.softplus(self.tau_N), present_BTC)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], layout: Layout, *, kernel: str
    ) -> tuple[Float[Array, "B T D"], GameReport]:
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        q, k, v = self.base.project(x_BTD)
        with jax.named_scope("nash"):
            prior = self.prior(x_BTD)
        if layout.spread is not None:
            kinds = zip((q, k, v, prior), (PER_HEAD, PER_KV_HEAD, PER_KV_HEAD, _PER_SCALE), strict=True)
            q, k, v, prior = (_on_rows(spread, z, layout.spread, axes) for z, axes in kinds)
        each: list[Rows] = []
        positions = []
        for c, stride in enumerate(self.strides):
            segments_BI, positions_BI, documents = layout.at(c, stride)
            if c:
                one_text_BI = jnp.ones_like(positions_BI) if segments_BI is None else segments_BI
                below, (q, k, v) = self.coarser(c, q, k, v, continues(one_text_BI))
                each[-1] = Rows(*below, *each[-1][3:])
            each.append(Rows(q, k, v, segments_BI, documents))
            positions.append(positions_BI)
        windows = [self.base.window, *[None] * (len(each) - 1)]
        outs = self.base.mix(each, positions, windows=windows, kernel=kernel)
        mixed_BTNH, w_BTCN, residual_BTN = self.settle(prior, outs, layout.positions_BT)
        with jax.named_scope("nash"):
            real_BT = jnp.ones_like(positions[0], bool) if layout.segments_BT is None else layout.segments_BT > 0
            if layout.spread is not None:
                mixed_BTNH = _on_rows(gather, mixed_BTNH, layout.spread, PER_HEAD)
                real_BT = real_BT & layout.spread.is_slot_BU
            game = report(w_BTCN, residual_BTN, real_BT)
        out_BTD = self.base.output(checkpoint_name(constrain(mixed_BTNH, *PER_HEAD), MIXED))
        return constrain(out_BTD, "batch", "time_split", "width"), game


def _on_rows(move: Callable[[Array, Spread], Array], x: Array, by: Spread, axes: tuple[str, ...]) -> Array:
    """Rows and heads are independent: each device moves what it has."""
    of_rows = Spread(*(("batch", "time"),) * 3)  # type: ignore[arg-type]
    return on_shards(move, [axes, of_rows], axes)(x, by)


def report(w_BTCN: Float[Array, "B T C N"], residual_BTN: Float[Array, "B T N"], real_BT: Bool[Array, "B T"]) -> GameReport:
    real_BT = real_BT.astype(w_BTCN.dtype)
    # w ln w goes to 0 with w; the inner max keeps the gradient there finite.
    entropy_BTN = -jnp.sum(w_BTCN * jnp.log(jnp.maximum(w_BTCN, 1e-30)), axis=2) / math.log(max(w_BTCN.shape[2], 2))
    # As products with a row of ones: a reduction over T with so short an axis behind it would be slow on a GPU.
    over_time = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return GameReport(
        weight_BCN=over_time("bt,btcn->bcn", real_BT, jax.lax.stop_gradient(w_BTCN)),
        entropy_BN=over_time("bt,btn->bn", real_BT, entropy_BTN),
        residual_BN=over_time("bt,btn->bn", real_BT, jax.lax.stop_gradient(residual_BTN)),
        tokens_B=jnp.sum(real_BT, axis=1),
    )
