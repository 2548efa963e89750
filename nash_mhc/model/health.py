"""Health metrics of the architecture: mixing of the streams, and the game of the scales, layer by layer.

A layer captures what it has at hand, as it lies on the mesh. `summary` reduces the captures of all layers at once: in
each layer, that would be a dozen small operations for the compiler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.model.multiscale import GameReport
from nash_mhc.model.residual import Maps, State
from nash_mhc.ops.doubly_stochastic import Matrix

UNUSED = 1e-3  # mean weight of a scale in a head, below which the head does without it


class StreamReport(NamedTuple):
    """The residual streams of one layer, for each token."""

    mixing_PMBT: Float[Array, "*L P M B T"]  # its H_res (P), row by row
    rms_BTR: Float[Array, "*L B T R"]  # of each stream as it enters the layer


def watch_streams(entered: State, maps: Sequence[Maps]) -> StreamReport:
    """None of it carries a gradient."""
    entered, maps = jax.lax.stop_gradient((entered, maps))
    numbers = len(entered.xs) ** 2
    return StreamReport(
        mixing_PMBT=jnp.stack([jnp.moveaxis(m.all_BTM[..., -numbers:], -1, 0) for m in maps]),
        rms_BTR=jnp.sqrt(entered.squares_BTR / entered.xs[0].shape[-1]),
    )


_total = functools.partial(functools.reduce, jnp.add)
_largest = functools.partial(functools.reduce, jnp.maximum)


def _product(a: Matrix, b: Matrix) -> Matrix:
    columns = tuple(zip(*b, strict=True))
    along = lambda row, column: _total([x * y for x, y in zip(row, column, strict=True)])
    return tuple(tuple(along(row, column) for column in columns) for row in a)


def _gains(mixing_LPMBT: Float[Array, "L P M B T"]) -> tuple[Float[Array, "L B T"], Float[Array, "L B T"]]:
    """(largest absolute row sum, column sum) of the product of all H_res up to each layer, for each token."""
    R, (B, T) = math.isqrt(mixing_LPMBT.shape[2]), mixing_LPMBT.shape[-2:]
    one, zero = jnp.ones((B, T), jnp.float32), jnp.zeros((B, T), jnp.float32)
    nothing = tuple(tuple(one if i == j else zero for j in range(R)) for i in range(R))

    def after(composite: Matrix, mixing_PMBT: Array) -> tuple[Matrix, tuple[Array, Array]]:
        for m in mixing_PMBT:
            composite = _product(tuple(tuple(m[R * i : R * (i + 1)]) for i in range(R)), composite)
        largest = lambda lines: _largest([_total(line) for line in lines])  # of what cannot be negative
        return composite, (largest(composite), largest(zip(*composite, strict=True)))

    return jax.lax.scan(after, nothing, mixing_LPMBT)[1]


@jax.named_scope("health")
def summary(captured: dict[str, Any]) -> dict[str, Array]:
    """Return one value or one short vector per layer, by name, and matrices (`res`), from captures of all layers."""
    out: dict[str, Array] = {}
    game: GameReport | None = captured.get("game")
    streams: StreamReport | None = captured.get("streams")
    if game is not None:
        count_L = jnp.sum(game.tokens_B, axis=1) * game.entropy_BN.shape[-1]
        mean = lambda total_L: total_L / jnp.maximum(count_L, 1.0)
        out["scale_weight"] = jnp.sum(game.weight_BCN, axis=(1, 3)) / jnp.maximum(count_L, 1.0)[:, None]
        out["scale_entropy"] = mean(jnp.sum(game.entropy_BN, axis=(1, 2)))
        use_LCN = jnp.sum(game.weight_BCN, axis=1) / jnp.maximum(jnp.sum(game.tokens_B, axis=1), 1.0)[:, None, None]
        out["scales_unused"] = jnp.sum(use_LCN < UNUSED, axis=(1, 2), dtype=jnp.float32)
        out["nash_residual"] = mean(jnp.sum(game.residual_BN, axis=(1, 2)))
    if streams is not None:
        L, P, M, B, T = streams.mixing_PMBT.shape
        R = math.isqrt(M)
        mixing_LPRRBT = streams.mixing_PMBT.reshape(L, P, R, R, B, T)
        largest = lambda x_LBT: jnp.max(x_LBT, axis=tuple(range(1, x_LBT.ndim)))
        deviation = lambda axis: largest(jnp.abs(jnp.sum(mixing_LPRRBT, axis=axis) - 1.0))
        out["res_deviation"] = jnp.maximum(deviation(2), deviation(3))
        out["gain_forward"], out["gain_backward"] = map(largest, _gains(streams.mixing_PMBT))
        out["stream_rms"] = jnp.mean(streams.rms_BTR, axis=(1, 2))
        out["res"] = jnp.mean(mixing_LPRRBT, axis=(4, 5))
    return out
