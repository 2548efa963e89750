"""Causal multiscale attention: every token attends to nearby tokens and to summaries of the blocks before.

Keys and values are pooled, queries are not. A token sees the last `window` tokens and, at each coarser scale, blocks
that ended before its own began. The bid of a scale is its log-sum-exp, so the softmax of the bids gives exactly the
weights of one softmax over all keys of all scales. Plain attention over the window is the special case in which the
summaries score low. The game, if any, starts from these weights.

For stride s, the s queries of a block see the same keys: to a kernel they are heads of one row, and a coarse scale is
ordinary causal attention over rows of blocks. Its keys are shifted by one row. The first row of a document is a null
key: zeros, with score 0 and value 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.captures import capture, game_report
from nash_mhc.model.kv_cache import KeyValues, TokenAt, layer_of, write_row
from nash_mhc.model.mixers.attention import (
    PER_HEAD,
    PER_KV_HEAD,
    Attention,
    AttentionLayout,
    constrain_per_head,
    sharded_attention,
)
from nash_mhc.model.parts import TokenValues, init_small
from nash_mhc.ops.attend import KERNELS, SHAPES_ONLY, attend_with_lse, supported_kernel
from nash_mhc.ops.attention_io import AttentionInput, AttentionOutput
from nash_mhc.ops.nash import Rules, aggregate
from nash_mhc.ops.pyramid import continues, pool
from nash_mhc.ops.spread import Spread, gather, spread
from nash_mhc.parallel.params import VECTOR, param
from nash_mhc.parallel.sharding import constrain, on_shards

MIXED = "mixed_scales"  # checkpoint name of the game's output: one [B, T, D] array instead of a pass over all scales

_COARSE_OFFSET = -1.0  # initial offset of a coarse scale's bid, as a summary matches no token exactly
_INITIAL_TAU = math.log(math.expm1(0.05))  # before softplus: nearly no game


class CoarseCache(eqx.Module):
    """The cache of a coarse scale: its rows, and the last J = 2r projected rows of the scale below."""

    k_LBJKH: Float[Array, "L B J K H"]  # row j has index j % J
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
    """Return the previous block and row i's own, in this order; for even rows the ring holds them swapped."""
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
            offset_CN=jnp.full((cfg.scales - 1, cfg.heads), _COARSE_OFFSET), tau_N=jnp.full(cfg.heads, _INITIAL_TAU),
            strides=cfg.strides, rules=Rules(cfg.aggregation, cfg.nash_iterations),
        )  # fmt: skip

    def coarser(
        self, c: int, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"], continues_BI: Bool[Array, "B I"]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return (keys and values of the scale below, for later use; those of scale c, which are pooled from them)."""
        with jax.named_scope("pooling"):
            below_k, k = pooled(k_BTKH, self.pool_k_CJKH[c - 1], continues_BI, PER_KV_HEAD)
            below_v, v = pooled(v_BTKH, self.pool_v_CJKH[c - 1], continues_BI, PER_KV_HEAD)
        return (below_k, below_v), (k, v)

    def inputs_of_scales(self, q: Array, k: Array, v: Array, layout: AttentionLayout) -> list[AttentionInput]:
        """Return the rotated and pooled attention inputs of each scale, from projected queries, keys and values."""
        segments_BT, positions_BT, documents = layout.at(0, 1)
        rotated = self.base.rotate_queries(q, positions_BT, copies=len(self.strides))
        inputs: list[AttentionInput] = []
        for c, stride in enumerate(self.strides):
            segments_BI, positions_BI, coarse_documents = layout.at(c, stride)
            if c:
                continues_BI = continues(jnp.ones_like(positions_BI) if segments_BI is None else segments_BI)
                below, (k, v) = self.coarser(c, k, v, continues_BI)
                if c == 1:
                    inputs = [
                        AttentionInput(
                            rotated[0], self.base.rotate_keys(below[0], positions_BT), below[1], segments_BT, documents
                        )
                    ]
                # A summary has the position of its last token.
                keys = self.base.rotate_keys(k, positions_BI + stride - 1)
                late = lambda z, continues_BI=continues_BI: jnp.where(continues_BI[..., None, None], _one_row_late(z), 0)
                inputs.append(AttentionInput(rotated[c], late(keys), late(v), segments_BI, coarse_documents))
        return inputs

    def attend(self, inputs: Sequence[AttentionInput], *, window: int | None, kernel: str) -> tuple[AttentionOutput, ...]:
        """Return the output and log-sum-exp of every token at each of these scales."""
        inputs = [constrain_per_head(x) for x in inputs]
        windows = tuple(window if x.stride == 1 else None for x in inputs)
        H, dtype = inputs[0].v_BIKH.shape[-1], str(inputs[0].v_BIKH.dtype)
        wanted = kernel if kernel in (*KERNELS, SHAPES_ONLY) else "xla"
        kernels = tuple(
            supported_kernel(wanted, dtype, x.k_BIKH.shape[1], H, window) for x, window in zip(inputs, windows, strict=True)
        )
        run = functools.partial(attend_with_lse, windows=windows, kernels=kernels)
        out_axes = AttentionOutput._make((PER_HEAD, PER_HEAD[:3]))
        with jax.named_scope("attention"):
            outputs = sharded_attention(run, inputs, kernels, out_axes)(tuple(inputs))
        return tuple(out._replace(out_BTNH=constrain(out.out_BTNH, *PER_HEAD)) for out in outputs)

    def solve_game(
        self, outputs: tuple[AttentionOutput, ...], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], tuple[Float[Array, "B T N"], ...], Float[Array, "B T N"]]:
        """Return (weighted sum of the scales' outputs, weights, residual of the game)."""
        with jax.named_scope("nash"):
            bids = [outputs[0].lse_BTN]
            for offset_N, stride, out in zip(self.offset_CN, self.strides[1:], outputs[1:], strict=True):
                # A coarse scale is present once a block before the token's own has ended.
                present_BT1 = positions_BT[..., None] >= stride
                bids.append(jnp.where(present_BT1, out.lse_BTN + offset_N[None, None], -jnp.inf))
            C, scalars = len(outputs), PER_HEAD[:3]
            run = on_shards(
                functools.partial(aggregate, rules=self.rules),
                [(PER_HEAD,) * C, (scalars,) * C, ("heads",)],
                (PER_HEAD, (scalars,) * C, scalars),
            )
            return run(tuple(out.out_BTNH for out in outputs), tuple(bids), jax.nn.softplus(self.tau_N))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        layout: AttentionLayout,
        *,
        window: int | None,
        kernel: str,
        values: TokenValues | None = None,
    ) -> Float[Array, "B T D"]:
        q, k, v = self.base.project(constrain(x_BTD, "batch", "time", "width"), values)
        if layout.spread is not None:
            kinds = zip((q, k, v), (PER_HEAD, PER_KV_HEAD, PER_KV_HEAD), strict=True)
            q, k, v = (_on_shards(spread, z, layout.spread, axes) for z, axes in kinds)
        segments_BT, positions_BT, _ = layout.at(0, 1)
        inputs = self.inputs_of_scales(q, k, v, layout)
        outputs = self.attend(inputs, window=window, kernel=kernel)
        mixed_BTNH, weights, residual_BTN = self.solve_game(outputs, positions_BT)
        capture("scale_inputs", lambda: tuple(inputs))
        capture("scale_outputs", lambda: tuple(out.out_BTNH for out in outputs))
        capture("scale_weights", lambda: weights)
        with jax.named_scope("nash"):
            real_BT = jnp.ones_like(positions_BT, bool) if segments_BT is None else segments_BT > 0
            if layout.spread is not None:
                mixed_BTNH = _on_shards(gather, mixed_BTNH, layout.spread, PER_HEAD)
                real_BT = real_BT & layout.spread.is_slot_BU
            capture("game", lambda: game_report(weights, residual_BTN, real_BT))
        out_BTD = self.base.output(checkpoint_name(constrain(mixed_BTNH, *PER_HEAD), MIXED))
        return constrain(out_BTD, "batch", "time_split", "width")

    @staticmethod
    def init_cache(cfg: ModelConfig, window: int | None, layers: int, batch: int, seq_len: int, dtype: Any) -> MultiscaleCache:
        """Return an empty cache for a stack of layers."""
        # Rounded up: an incomplete last block has a row, too.
        coarse = [CoarseCache.empty(cfg, layers, batch, -(-seq_len // stride), dtype) for stride in cfg.strides[1:]]
        return MultiscaleCache(Attention.init_cache(cfg, window, layers, batch, seq_len, dtype), tuple(coarse))

    def step(
        self, x_B1D: Float[Array, "B 1 D"], cache: MultiscaleCache, at: TokenAt, values: TokenValues | None = None
    ) -> tuple[Float[Array, "B 1 D"], MultiscaleCache]:
        """Return (output for one token, updated cache)."""
        layer, t = at
        positions_B1 = jnp.broadcast_to(t, x_B1D.shape[:2])
        q_B1NH, k_B1KH, v_B1KH = self.base.project(x_B1D, values)
        rotated_B1NH, key_B1KH = self.base.rotate(q_B1NH, k_B1KH, positions_B1)
        fine = cache.fine.write(layer, t, key_B1KH, v_B1KH)
        outputs, coarse = [fine.attend(rotated_B1NH, layer, t)], []
        row = k_B1KH, v_B1KH
        for c, old_scale in enumerate(cache.coarse, 1):
            scale, row = self._pool_step(c, old_scale, row, at)
            coarse.append(scale)
            # Attend to the blocks before the token's own. In the first block only the null key is visible, and the game
            # ignores the scale.
            outputs.append(scale.rows.attend(rotated_B1NH, layer, t // self.strides[c] - 1, null=True))
        mixed_B1NH, _, _ = self.solve_game(tuple(outputs), positions_B1)
        return self.base.output(mixed_B1NH), MultiscaleCache(fine, tuple(coarse))

    def _pool_step(
        self, c: int, cache: CoarseCache, finer: tuple[Array, Array], at: TokenAt
    ) -> tuple[CoarseCache, tuple[Array, Array]]:
        """Return (updated cache of scale c, its row for the scale above). `finer` is the row of the scale below.

        The token that ends a block computes its row. Until then the row is zero and no query sees it. The `cond`
        returns one row, not the cache, because it copies what it returns.
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
            # The first of the two blocks continues nothing; the second continues the first, if that exists.
            continues_BI = jnp.broadcast_to(jnp.stack([jnp.zeros_like(i, bool), i > 0]), (k.shape[0], 2))
            _, (k_rows, v_rows) = self.coarser(c, k, v, continues_BI)
            k, v = k_rows[:, 1:], v_rows[:, 1:]
            return (k, v), self.base.rotate_keys(k, jnp.broadcast_to(i * stride + stride - 1, k.shape[:2]))

        zeros = jax.tree.map(jnp.zeros_like, finer)
        row, key_B1KH = jax.lax.cond(ended, pool_block, lambda: (zeros, zeros[0]))
        return CoarseCache(k_LBJKH, v_LBJKH, cache.rows.write(layer, i, key_B1KH, row[1])), row

    @staticmethod
    def flops_per_token(cfg: ModelConfig, window: int | None, seq_len: int) -> float:
        """Return matmul FLOPs of one training token in one layer, without pooling and the game."""
        keys = sum(seq_len / 2 / stride for stride in cfg.strides[1:])
        return Attention.flops_per_token(cfg, window, seq_len) + 12.0 * cfg.heads * cfg.head_dim * keys


def _one_row_late(x_BIKH: Array) -> Array:
    return jnp.pad(x_BIKH, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


def pooling_taps(cfg: ModelConfig, heads: int, *, key: PRNGKeyArray) -> Float[Array, "coarse J heads H"]:
    """Return initial taps: the mean of the row's own block, and noise."""
    r = cfg.ratio
    mean_J = jnp.concatenate([jnp.zeros(r), jnp.full(r, 1.0 / r)])
    return mean_J[None, :, None, None] + init_small(key, (cfg.scales - 1, 2 * r, heads, cfg.head_dim), 0.02)


def pooled(z: Array, taps_JNH: Array, continues_BI: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Return (z, for further use; its next coarser scale). Each device pools its own sequences and heads."""
    run = on_shards(pool, [axes, ("taps", *axes[2:]), ("batch", "time")], (axes, axes))
    return run(z, taps_JNH, continues_BI)


def _on_shards(move: Callable[[Array, Spread], Array], x: Array, by: Spread, axes: tuple[str, ...]) -> Array:
    """Apply `spread` or `gather` on each device's own sequences and heads."""
    spread_axes = Spread(*(("batch", "time"),) * 3)  # type: ignore[arg-type]
    return on_shards(move, [axes, spread_axes], axes)(x, by)
