"""Causal multiscale attention in which every token asks every scale:
the tokens near by, and summaries of what lies before.

Keys and values are pooled, queries are not. A token of some block sees the last `window` tokens as they are, and of
each coarser scale the blocks that ended before its own one began. How much a scale has found, the log of the sum that
its softmax divides by, is its bid; the weights that follow from the bids alone are exactly those of one softmax over
all keys of all scales. So plain attention over the window is the special case in which the summaries score low, nothing
competes for a share that it would not have had, and nothing can collapse.
The game, where it is played, starts from these weights.

For stride s, the s queries of a block all see the same keys: to a kernel they are heads of one row, and the coarse
scale is ordinary causal attention over rows of blocks. Its keys are one row late, and where a document begins there is
none: a key of zeros, whose score is 0 and whose value is nothing, stands there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import PER_HEAD, PER_KV_HEAD, Attention, Layout, on_rows, per_head
from nash_mhc.model.parts import init_small
from nash_mhc.ops.attend import EVIDENT_KERNELS, attend_with_evidence, fitting_kernel
from nash_mhc.ops.attend_rows import Found, Rows
from nash_mhc.ops.nash import Rules, aggregate
from nash_mhc.ops.pyramid import continues, pool
from nash_mhc.ops.spread import Spread, gather, spread
from nash_mhc.parallel.params import VECTOR, param
from nash_mhc.parallel.sharding import constrain, on_shards

MIXED = "mixed_scales"  # checkpoint name of what leaves the game: one [B, T, D] array instead of a pass over all scales

_COARSE_OFFSET = -1.0  # of a summary's score at the start: it stands for many tokens, and for none of them exactly
_CALM = math.log(math.expm1(0.05))  # before softplus: the game has hardly begun


class GameReport(NamedTuple):
    """What the game of one layer came to, summed over the real tokens of each row;
    heads apart, so nothing crosses devices."""

    weight_BCN: Float[Array, "*L B C N"]
    entropy_BN: Float[Array, "*L B N"]  # of the weights, as a share of ln C; this one carries a gradient
    residual_BN: Float[Array, "*L B N"]  # |BR(w) - w|_1
    tokens_B: Float[Array, "*L B"]


class Multiscale(eqx.Module):
    base: Attention
    pool_k_CJKH: Float[Array, "coarse J K H"] = param("scales", "taps", "kv_heads", "head_dim", role=VECTOR, cast=False)
    pool_v_CJKH: Float[Array, "coarse J K H"] = param("scales", "taps", "kv_heads", "head_dim", role=VECTOR, cast=False)
    offset_CN: Float[Array, "coarse N"] = param("scales", "heads", role=VECTOR, cast=False)
    tau_N: Float[Array, "N"] = param("heads")  # before softplus
    strides: tuple[int, ...] = eqx.field(static=True)
    rules: Rules = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> Multiscale:
        base, keys, values = jax.random.split(key, 3)
        return Multiscale(
            base=Attention.init(cfg, key=base),
            pool_k_CJKH=pooling_taps(cfg, cfg.kv_heads, key=keys), pool_v_CJKH=pooling_taps(cfg, cfg.kv_heads, key=values),
            offset_CN=jnp.full((cfg.scales - 1, cfg.heads), _COARSE_OFFSET), tau_N=jnp.full(cfg.heads, _CALM),
            strides=cfg.strides, rules=Rules(cfg.aggregation, cfg.nash_iterations),
        )  # fmt: skip

    def coarser(
        self, c: int, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"], goes_on_BI: Bool[Array, "B I"]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """((keys, values) of the scale below, for further use; those of scale c, pooled from them)."""
        with jax.named_scope("pooling"):
            below_k, k = pooled(k_BTKH, self.pool_k_CJKH[c - 1], goes_on_BI, PER_KV_HEAD)
            below_v, v = pooled(v_BTKH, self.pool_v_CJKH[c - 1], goes_on_BI, PER_KV_HEAD)
        return (below_k, below_v), (k, v)

    def at_each_scale(self, q: Array, k: Array, v: Array, layout: Layout) -> list[Rows]:
        """What attention works on, of queries, keys and values as they come out of the matrices:
        turned to their positions, and what is pooled of them."""
        segments_BT, positions_BT, documents = layout.at(0, 1)
        turned = self.base.placed_queries(q, positions_BT, copies=len(self.strides))
        each: list[Rows] = []
        for c, stride in enumerate(self.strides):
            segments_BI, positions_BI, coarse_documents = layout.at(c, stride)
            if c:
                goes_on_BI = continues(jnp.ones_like(positions_BI) if segments_BI is None else segments_BI)
                below, (k, v) = self.coarser(c, k, v, goes_on_BI)
                if c == 1:
                    each = [Rows(turned[0], self.base.placed_keys(below[0], positions_BT), below[1], segments_BT, documents)]
                # A summary lies where its last token does.
                keys = self.base.placed_keys(k, positions_BI + stride - 1)
                late = lambda z, goes_on_BI=goes_on_BI: jnp.where(goes_on_BI[..., None, None], _one_row_late(z), 0)
                each.append(Rows(turned[c], late(keys), late(v), segments_BI, coarse_documents))
        return each

    def find(self, each: Sequence[Rows], *, window: int | None, kernel: str) -> tuple[Found, ...]:
        """What every token finds at each scale, or at those of `each` alone, and how much of it."""
        each = [per_head(rows) for rows in each]
        windows = tuple(window if rows.stride == 1 else None for rows in each)
        H, dtype = each[0].v_BIKH.shape[-1], str(each[0].v_BIKH.dtype)
        wanted = kernel if kernel in EVIDENT_KERNELS else "xla"
        kernels = tuple(
            fitting_kernel(wanted, dtype, rows.k_BIKH.shape[1], H, window) for rows, window in zip(each, windows, strict=True)
        )
        run = functools.partial(attend_with_evidence, windows=windows, kernels=kernels)
        with jax.named_scope("attention"):
            found = on_rows(run, each, kernels, Found._make((PER_HEAD, PER_HEAD[:3])))(tuple(each))
        return tuple(f._replace(out_BTNH=constrain(f.out_BTNH, *PER_HEAD)) for f in found)

    def settle(
        self, found: tuple[Found, ...], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], tuple[Float[Array, "B T N"], ...], Float[Array, "B T N"]]:
        """(what the scales found, weighed by how much it is, the weights, the residual of the game)."""
        with jax.named_scope("nash"):
            bids = [found[0].evidence_BTN]
            for offset_N, stride, f in zip(self.offset_CN, self.strides[1:], found[1:], strict=True):
                # A scale is there once a block before the token's own one has ended; the tokens near by always are.
                there_BT1 = positions_BT[..., None] >= stride
                bids.append(jnp.where(there_BT1, f.evidence_BTN + offset_N[None, None], -jnp.inf))
            C, numbers = len(found), PER_HEAD[:3]
            run = on_shards(
                functools.partial(aggregate, rules=self.rules),
                [(PER_HEAD,) * C, (numbers,) * C, ("heads",)],
                (PER_HEAD, (numbers,) * C, numbers),
            )
            return run(tuple(f.out_BTNH for f in found), tuple(bids), jax.nn.softplus(self.tau_N))

    def __call__(
        self, x_BTD: Float[Array, "B T D"], layout: Layout, *, window: int | None, kernel: str
    ) -> tuple[Float[Array, "B T D"], GameReport]:
        q, k, v = self.base.project(constrain(x_BTD, "batch", "time", "width"))
        if layout.spread is not None:
            kinds = zip((q, k, v), (PER_HEAD, PER_KV_HEAD, PER_KV_HEAD), strict=True)
            q, k, v = (moved(spread, z, layout.spread, axes) for z, axes in kinds)
        segments_BT, positions_BT, _ = layout.at(0, 1)
        found = self.find(self.at_each_scale(q, k, v, layout), window=window, kernel=kernel)
        mixed_BTNH, weights, residual_BTN = self.settle(found, positions_BT)
        with jax.named_scope("nash"):
            real_BT = jnp.ones_like(positions_BT, bool) if segments_BT is None else segments_BT > 0
            if layout.spread is not None:
                mixed_BTNH = moved(gather, mixed_BTNH, layout.spread, PER_HEAD)
                real_BT = real_BT & layout.spread.is_slot_BU
            game = report(weights, residual_BTN, real_BT)
        out_BTD = self.base.output(checkpoint_name(constrain(mixed_BTNH, *PER_HEAD), MIXED))
        return constrain(out_BTD, "batch", "time_split", "width"), game


def _one_row_late(x_BIKH: Array) -> Array:
    return jnp.pad(x_BIKH, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


def pooling_taps(cfg: ModelConfig, heads: int, *, key: PRNGKeyArray) -> Float[Array, "coarse J heads H"]:
    """The mean of the row's own block, and nothing yet of the block before it."""
    r = cfg.ratio
    mean_J = jnp.concatenate([jnp.zeros(r), jnp.full(r, 1.0 / r)])
    return mean_J[None, :, None, None] + init_small(key, (cfg.scales - 1, 2 * r, heads, cfg.head_dim), 0.02)


def pooled(z: Array, taps_JNH: Array, goes_on_BI: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """(z, for further use; the next coarser scale of it), on the devices that have its rows and heads."""
    run = on_shards(pool, [axes, ("taps", *axes[2:]), ("batch", "time")], (axes, axes))
    return run(z, taps_JNH, goes_on_BI)


def moved(move: Callable[[Array, Spread], Array], x: Array, by: Spread, axes: tuple[str, ...]) -> Array:
    """Rows and heads are independent: each device moves what it has."""
    of_rows = Spread(*(("batch", "time"),) * 3)  # type: ignore[arg-type]
    return on_shards(move, [axes, of_rows], axes)(x, by)


def report(
    weights: Sequence[Float[Array, "B T N"]], residual_BTN: Float[Array, "B T N"], real_BT: Bool[Array, "B T"]
) -> GameReport:
    real_BT = real_BT.astype(residual_BTN.dtype)
    # w ln w goes to 0 with w; the inner max keeps the gradient there finite.
    entropy_BTN = -sum(w * jnp.log(jnp.maximum(w, 1e-30)) for w in weights) / math.log(max(len(weights), 2))
    # As products with a row of ones: a reduction over T with so short an axis after it would be slow on a GPU.
    each_BTXN = jnp.stack([*map(jax.lax.stop_gradient, (*weights, residual_BTN)), entropy_BTN], axis=2)
    sums_BXN = jnp.einsum("bt,btxn->bxn", real_BT, each_BTXN, precision=jax.lax.Precision.HIGHEST)
    return GameReport(
        weight_BCN=sums_BXN[:, :-2], entropy_BN=sums_BXN[:, -1], residual_BN=sums_BXN[:, -2],
        tokens_B=jnp.sum(real_BT, axis=1),
    )  # fmt: skip
