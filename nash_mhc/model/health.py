"""How the architecture is doing, measured inside the step:
mixing of the streams, and the game of the scales, layer by layer.

Inside the scan over layers everything stays where it is on the mesh (tokens, heads); `summary` brings it together once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.multiscale import GameReport
from nash_mhc.model.residual import Maps, State
from nash_mhc.ops.sinkhorn import Matrix

_STRETCHES = 16  # of a row, at most: sums over them stay on the device that holds the tokens
UNUSED = 1e-3  # mean weight of a scale in a head, below which the head does without it


class StreamReport(NamedTuple):
    """The residual streams of one layer, for each token."""

    deviation_BT: Float[Array, "*L B T"]  # of H_res from doubly stochastic, the largest of the layer's
    unbalanced_BT: Float[Array, "*L B T"]  # the same before `balance`: how far Sinkhorn's iteration got
    forward_gain_BT: Float[Array, "*L B T"]  # largest absolute row sum of the product of all H_res so far
    backward_gain_BT: Float[Array, "*L B T"]  # and column sum
    rms_BTR: Float[Array, "*L B T R"]  # of each stream as it enters the layer
    mixing_BSPM: Float[Array, "*L B S P M"]  # its H_res (P), row by row, added up over stretches of the row (S)


class LayerReport(NamedTuple):
    game: GameReport | None  # None: one scale
    streams: StreamReport | None  # None: plain residual
    left_BTD: Array | None = None  # the stream after it, where the execution asks for it


def unmixed(cfg: ModelConfig, shape: tuple[int, ...]) -> Matrix | None:
    """The product of no H_res at all, for each token: what `watch_streams` starts from."""
    if not cfg.mixings:
        return None
    one, zero, R = jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32), range(cfg.streams)
    return tuple(tuple(one if i == j else zero for j in R) for i in R)


def watch_streams(entered: State, composite: Matrix, maps: Sequence[Maps]) -> tuple[Matrix, StreamReport]:
    """The product including this layer's H_res, and its report. None of it carries a gradient."""
    entered, composite, maps = jax.lax.stop_gradient((entered, composite, maps))
    total = functools.partial(functools.reduce, jnp.add)
    largest = functools.partial(functools.reduce, jnp.maximum)
    rows_and_columns = lambda m: [total(line) for line in (*m, *zip(*m, strict=True))]
    deviations = [jnp.abs(s - 1.0) for m in maps for s in rows_and_columns(m.res)]
    for m in maps:
        columns = tuple(zip(*composite, strict=True))
        composite = tuple(
            tuple(total([a * b for a, b in zip(row, column, strict=True)]) for column in columns) for row in m.res
        )
    sums = rows_and_columns(composite)  # of what cannot be negative
    report = StreamReport(
        deviation_BT=largest(deviations),
        unbalanced_BT=largest([m.unbalanced_BT for m in maps]),
        forward_gain_BT=largest(sums[: len(composite)]),
        backward_gain_BT=largest(sums[len(composite) :]),
        rms_BTR=jnp.sqrt(entered.squares_BTR / entered.xs[0].shape[-1]),
        mixing_BSPM=jnp.stack([_sums(m.all_BTM[..., -(len(entered.xs) ** 2) :]) for m in maps], axis=2),
    )
    return composite, report


def _sums(x_BTM: Float[Array, "B T M"]) -> Float[Array, "B S M"]:
    """Over stretches of the row. The row may be split over devices: one sum over all of it would cross them, in every
    layer, only to be watched."""
    B, T, M = x_BTM.shape
    S = math.gcd(T, _STRETCHES)
    return jnp.sum(x_BTM.reshape(B, S, T // S, M), axis=2)


def summary(reports: LayerReport) -> dict[str, Array]:
    """One value or one short vector a layer, by name, and its matrices (`res`); reports of all layers stacked."""
    out: dict[str, Array] = {}
    if reports.game is not None:
        game = reports.game
        count_L = jnp.sum(game.tokens_B, axis=1) * game.entropy_BN.shape[-1]
        mean = lambda total_L: total_L / jnp.maximum(count_L, 1.0)
        out["scale_weight"] = jnp.sum(game.weight_BCN, axis=(1, 3)) / jnp.maximum(count_L, 1.0)[:, None]
        out["scale_entropy"] = mean(jnp.sum(game.entropy_BN, axis=(1, 2)))
        use_LCN = jnp.sum(game.weight_BCN, axis=1) / jnp.maximum(jnp.sum(game.tokens_B, axis=1), 1.0)[:, None, None]
        out["scales_unused"] = jnp.sum(use_LCN < UNUSED, axis=(1, 2), dtype=jnp.float32)
        out["nash_residual"] = mean(jnp.sum(game.residual_BN, axis=(1, 2)))
    if reports.streams is not None:
        streams = reports.streams
        largest = lambda x_LBT: jnp.max(x_LBT, axis=(1, 2))
        out["res_deviation"] = largest(streams.deviation_BT)
        out["sinkhorn_deviation"] = largest(streams.unbalanced_BT)
        out["gain_forward"] = largest(streams.forward_gain_BT)
        out["gain_backward"] = largest(streams.backward_gain_BT)
        out["stream_rms"] = jnp.mean(streams.rms_BTR, axis=(1, 2))
        R, (B, T) = streams.rms_BTR.shape[-1], streams.deviation_BT.shape[1:]
        mixing_LPM = jnp.sum(streams.mixing_BSPM, axis=(1, 2)) / (B * T)
        out["res"] = mixing_LPM.reshape(*mixing_LPM.shape[:2], R, R)
    return out
