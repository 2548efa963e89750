"""Named intermediates of a layer, which a forward pass returns on request, and the health metrics computed from them.

A layer calls `capture("name", lambda: value)`. Nothing is computed or saved unless the forward pass records that name.
`summary` reduces the captures of all layers at once, which compiles faster than reducing them in each layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nash_mhc.model.residual import Maps, State
from nash_mhc.ops.doubly_stochastic import Matrix

UNUSED = 1e-3  # mean weight of a scale in a head below which the scale counts as unused


class _Recorder:
    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.values: dict[str, Any] = {}


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a dict that collects the captures with these names.

    The traced function that contains the `with` block must return the dict, or tracers leak.
    """
    recorder = _Recorder(names)
    token = _recorder.set(recorder)
    try:
        yield recorder.values
    finally:
        _recorder.reset(token)


def capture(name: str, value: Callable[[], Any]) -> None:
    """Record value() under this name, if the forward pass records it."""
    recorder = _recorder.get()
    if recorder is not None and name in recorder.names:
        recorder.values[name] = value()


class GameReport(NamedTuple):
    """The game of one layer, summed over the real tokens of each sequence. Per head, so nothing crosses devices."""

    weight_BCN: Float[Array, "*L B C N"]
    entropy_BN: Float[Array, "*L B N"]  # of the weights, over ln C; the only field with a gradient
    residual_BN: Float[Array, "*L B N"]  # |BR(w) - w|_1
    tokens_B: Float[Array, "*L B"]


def game_report(
    weights: Sequence[Float[Array, "B T N"]], residual_BTN: Float[Array, "B T N"], real_BT: Bool[Array, "B T"]
) -> GameReport:
    real_BT = real_BT.astype(residual_BTN.dtype)
    # w ln w tends to 0 with w; the max keeps its gradient finite.
    entropy_BTN = -sum(w * jnp.log(jnp.maximum(w, 1e-30)) for w in weights) / math.log(max(len(weights), 2))
    # Sums as matmuls: a reduction over T with short axes after it is slow on a GPU.
    each_BTXN = jnp.stack([*map(jax.lax.stop_gradient, (*weights, residual_BTN)), entropy_BTN], axis=2)
    sums_BXN = jnp.einsum("bt,btxn->bxn", real_BT, each_BTXN, precision=jax.lax.Precision.HIGHEST)
    return GameReport(
        weight_BCN=sums_BXN[:, :-2], entropy_BN=sums_BXN[:, -1], residual_BN=sums_BXN[:, -2],
        tokens_B=jnp.sum(real_BT, axis=1),
    )  # fmt: skip


class StreamReport(NamedTuple):
    """The residual streams of one layer, per token."""

    mixing_PMBT: Float[Array, "*L P M B T"]  # H_res of each residual (P), by rows
    rms_BTR: Float[Array, "*L B T R"]  # of each stream as it enters the layer


def watch_streams(entered: State, maps: Sequence[Maps]) -> StreamReport:
    """Return the maps and sizes of the streams that enter a layer, without gradients."""
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
    """Return (largest row sum, largest column sum) of the product of all H_res up to each layer, per token."""
    R, (B, T) = math.isqrt(mixing_LPMBT.shape[2]), mixing_LPMBT.shape[-2:]
    one, zero = jnp.ones((B, T), jnp.float32), jnp.zeros((B, T), jnp.float32)
    identity = tuple(tuple(one if i == j else zero for j in range(R)) for i in range(R))

    def after(composite: Matrix, mixing_PMBT: Array) -> tuple[Matrix, tuple[Array, Array]]:
        for m in mixing_PMBT:
            composite = _product(tuple(tuple(m[R * i : R * (i + 1)]) for i in range(R)), composite)
        largest = lambda lines: _largest([_total(line) for line in lines])  # entries are never negative
        return composite, (largest(composite), largest(zip(*composite, strict=True)))

    return jax.lax.scan(after, identity, mixing_LPMBT)[1]


@jax.named_scope("health")
def summary(captured: dict[str, Any]) -> dict[str, Array]:
    """Return the health metrics by name, each with a leading layer axis, from the captures of all layers."""
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
