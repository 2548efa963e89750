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
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import PER_HEAD, PER_KV_HEAD, Attention, AttentionLayout, on_rows, per_head
from nash_mhc.model.captures import capture
from nash_mhc.model.kv_cache import KeyValues, TokenAt, layer_of, write_row
from nash_mhc.model.parts import init_small
from nash_mhc.ops.attend import EVIDENT_KERNELS, SHAPES_ONLY, attend_with_evidence, fitting_kernel
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


class CoarseCache(eqx.Module):
    """The cache of a scale above the finest: its rows, and the last J = 2r rows of the scale below, as projected."""

    k_LBJKH: Float[Array, "L B J K H"]  # row j lies at index j % J
    v_LBJKH: Float[Array, "L B J K H"]
    rows: KeyValues

    @staticmethod
    def empty(cfg: ModelConfig, layers: int, batch: int, rows: int, dtype: Any) -> CoarseCache:
        k, v = (jnp.zeros((layers, batch, 2 * cfg.ratio, cfg.kv_heads, cfg.head_dim), dtype) for _ in "kv")
        return CoarseCache(k, v, KeyValues.empty(layers, batch, cfg.kv_heads, rows, cfg.head_dim, dtype))


class MultiscaleCache(eqx.Module):
    fine: KeyValues
    coarse: tuple[CoarseCache, ...]


def _last_two_blocks(ring: Array, layer: Array, i: Array) -> Array:
    """Return the block before row i's own and that block: of an even row they lie the other way round in the ring."""
    J = ring.shape[2]
    return jnp.roll(layer_of(ring, layer), jnp.where(i % 2 == 0, J // 2, 0), axis=1)


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

    def rows_of_scales(self, q: Array, k: Array, v: Array, layout: AttentionLayout) -> list[Rows]:
        """Return queries, keys and values of each scale, rotated and pooled, from the projected ones."""
        segments_BT, positions_BT, documents = layout.at(0, 1)
        rotated = self.base.rotate_queries(q, positions_BT, copies=len(self.strides))
        each: list[Rows] = []
        for c, stride in enumerate(self.strides):
            segments_BI, positions_BI, coarse_documents = layout.at(c, stride)
            if c:
                goes_on_BI = continues(jnp.ones_like(positions_BI) if segments_BI is None else segments_BI)
                below, (k, v) = self.coarser(c, k, v, goes_on_BI)
                if c == 1:
                    each = [Rows(rotated[0], self.base.rotate_keys(below[0], positions_BT), below[1], segments_BT, documents)]
                # A summary lies where its last token does.
                keys = self.base.rotate_keys(k, positions_BI + stride - 1)
                late = lambda z, goes_on_BI=goes_on_BI: jnp.where(goes_on_BI[..., None, None], _one_row_late(z), 0)
                each.append(Rows(rotated[c], late(keys), late(v), segments_BI, coarse_documents))
        return each

    def attend(self, each: Sequence[Rows], *, window: int | None, kernel: str) -> tuple[Found, ...]:
        """Return the attention output and log-sum-exp of every token at each of these scales."""
        each = [per_head(rows) for rows in each]
        windows = tuple(window if rows.stride == 1 else None for rows in each)
        H, dtype = each[0].v_BIKH.shape[-1], str(each[0].v_BIKH.dtype)
        wanted = kernel if kernel in (*EVIDENT_KERNELS, SHAPES_ONLY) else "xla"
        kernels = tuple(
            fitting_kernel(wanted, dtype, rows.k_BIKH.shape[1], H, window) for rows, window in zip(each, windows, strict=True)
        )
        run = functools.partial(attend_with_evidence, windows=windows, kernels=kernels)
        with jax.named_scope("attention"):
            found = on_rows(run, each, kernels, Found._make((PER_HEAD, PER_HEAD[:3])))(tuple(each))
        return tuple(f._replace(out_BTNH=constrain(f.out_BTNH, *PER_HEAD)) for f in found)

    def solve_game(
        self, found: tuple[Found, ...], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], tuple[Float[Array, "B T N"], ...], Float[Array, "B T N"]]:
        """Return (the weighted sum of the scales' outputs, the weights, the residual of the game)."""
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
        self, x_BTD: Float[Array, "B T D"], layout: AttentionLayout, *, window: int | None, kernel: str
    ) -> Float[Array, "B T D"]:
        q, k, v = self.base.project(constrain(x_BTD, "batch", "time", "width"))
        if layout.spread is not None:
            kinds = zip((q, k, v), (PER_HEAD, PER_KV_HEAD, PER_KV_HEAD), strict=True)
            q, k, v = (moved(spread, z, layout.spread, axes) for z, axes in kinds)
        segments_BT, positions_BT, _ = layout.at(0, 1)
        rows = self.rows_of_scales(q, k, v, layout)
        found = self.attend(rows, window=window, kernel=kernel)
        mixed_BTNH, weights, residual_BTN = self.solve_game(found, positions_BT)
        capture("scale_rows", lambda: tuple(rows))
        capture("scale_outputs", lambda: tuple(f.out_BTNH for f in found))
        capture("scale_weights", lambda: weights)
        with jax.named_scope("nash"):
            real_BT = jnp.ones_like(positions_BT, bool) if segments_BT is None else segments_BT > 0
            if layout.spread is not None:
                mixed_BTNH = moved(gather, mixed_BTNH, layout.spread, PER_HEAD)
                real_BT = real_BT & layout.spread.is_slot_BU
            capture("game", lambda: report(weights, residual_BTN, real_BT))
        out_BTD = self.base.output(checkpoint_name(constrain(mixed_BTNH, *PER_HEAD), MIXED))
        return constrain(out_BTD, "batch", "time_split", "width")

    @staticmethod
    def init_cache(cfg: ModelConfig, window: int | None, layers: int, batch: int, seq_len: int, dtype: Any) -> MultiscaleCache:
        """Return the empty cache of a stack of layers."""
        # Rounded up: also the row that cannot end any more has a place.
        coarse = [CoarseCache.empty(cfg, layers, batch, -(-seq_len // stride), dtype) for stride in cfg.strides[1:]]
        return MultiscaleCache(Attention.init_cache(cfg, window, layers, batch, seq_len, dtype), tuple(coarse))

    def step(
        self, x_B1D: Float[Array, "B 1 D"], cache: MultiscaleCache, at: TokenAt
    ) -> tuple[Float[Array, "B 1 D"], MultiscaleCache]:
        """Return (the mixed token, the cache with this token in it)."""
        layer, t = at
        positions_B1 = jnp.broadcast_to(t, x_B1D.shape[:2])
        q_B1NH, k_B1KH, v_B1KH = self.base.project(x_B1D)
        rotated_B1NH, key_B1KH = self.base.rotate(q_B1NH, k_B1KH, positions_B1)
        fine = cache.fine.write(layer, t, key_B1KH, v_B1KH)
        found, coarse = [fine.attend(rotated_B1NH, layer, t)], []
        row = k_B1KH, v_B1KH
        for c, before in enumerate(cache.coarse, 1):
            scale, row = self._pool_step(c, before, row, at)
            coarse.append(scale)
            # The blocks before the token's own; before the first of them the null key alone, which the game ignores.
            found.append(scale.rows.attend(rotated_B1NH, layer, t // self.strides[c] - 1, null=True))
        mixed_B1NH, _, _ = self.solve_game(tuple(found), positions_B1)
        return self.base.output(mixed_B1NH), MultiscaleCache(fine, tuple(coarse))

    def _pool_step(
        self, c: int, cache: CoarseCache, finer: tuple[Array, Array], at: TokenAt
    ) -> tuple[CoarseCache, tuple[Array, Array]]:
        """Return scale c after this token, whose row of the scale below is `finer`, and its row for the scale above.

        Row t // stride is computed by the token that ends its block. Until then zeros stand in its place, where no
        query looks: writing them costs one row, and a `cond` copies what it returns, so it must not return all rows.
        """
        layer, t = at
        stride, below = self.strides[c], self.strides[c - 1]
        i, ended = t // stride, (t + 1) % stride == 0
        index = (t // below) % cache.k_LBJKH.shape[2]
        k_LBJKH, v_LBJKH = (
            write_row(ring, layer, row, 2, index) for ring, row in zip((cache.k_LBJKH, cache.v_LBJKH), finer, strict=True)
        )

        def pool_block() -> tuple[tuple[Array, Array], Array]:
            k, v = (_last_two_blocks(ring, layer, i) for ring in (k_LBJKH, v_LBJKH))
            # Nothing comes before the first of the two blocks; before the second whatever is there.
            goes_on_BI = jnp.broadcast_to(jnp.stack([jnp.zeros_like(i, bool), i > 0]), (k.shape[0], 2))
            k, v = (pair[:, 1:] for pair in self.coarser(c, k, v, goes_on_BI)[1])
            return (k, v), self.base.rotate_keys(k, jnp.broadcast_to(i * stride + stride - 1, k.shape[:2]))

        nothing = jax.tree.map(jnp.zeros_like, finer)
        row, key_B1KH = jax.lax.cond(ended, pool_block, lambda: (nothing, nothing[0]))
        return CoarseCache(k_LBJKH, v_LBJKH, cache.rows.write(layer, i, key_B1KH, row[1])), row

    @staticmethod
    def flops_per_token(cfg: ModelConfig, window: int | None, seq_len: int) -> float:
        """Return matmul FLOPs of one training token in one layer. Pooling and the game are left out."""
        keys = sum(seq_len / 2 / stride for stride in cfg.strides[1:])
        return Attention.flops_per_token(cfg, window, seq_len) + 12.0 * cfg.heads * cfg.head_dim * keys


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
