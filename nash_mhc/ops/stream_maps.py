"""The maps of a token's streams from their logits: weights to read, weights to write, and a doubly stochastic mixing.

A token's coefficients are one row of `maps_BTM`, float32: R of pre, R of post, R x R of res, row by row. The plain form
at the end is for the tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.ops.doubly_stochastic import Matrix, Vector, from_logits, logits_gradient, sinkhorn_reference
from nash_mhc.ops.kernels import stream_maps_gpu
from nash_mhc.ops.platform import on_platform


def coefficients(maps_BTM: Float[Array, "B T M"]) -> tuple[Vector, Vector, Matrix]:
    """Return (pre, post, res by rows), each coefficient an array [B, T]."""
    return _split([maps_BTM[..., m] for m in range(maps_BTM.shape[-1])])


def _split(columns: Sequence[Array]) -> tuple[Vector, Vector, Matrix]:
    R = math.isqrt(len(columns) + 1) - 1  # M + 1 = (R + 1)^2
    res = columns[2 * R :]
    return tuple(columns[:R]), tuple(columns[R : 2 * R]), tuple(tuple(res[i * R : (i + 1) * R]) for i in range(R))


@jax.custom_vjp
def maps(logits_BTM: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """Return H_pre = sigmoid, H_post = 2 sigmoid, and H_res, doubly stochastic."""
    forms: dict[str, Any] = {"default": functools.partial(_in_xla, _maps)}
    if stream_maps_gpu.fits(logits_BTM.shape[:-1]):
        forms["cuda"] = _maps_in_kernel
    return on_platform(logits_BTM, **forms)


def maps_backward(maps_BTM: Float[Array, "B T M"], dmaps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """Return the gradient of the logits from the maps and their gradient."""
    forms: dict[str, Any] = {"default": functools.partial(_in_xla, _maps_backward)}
    if stream_maps_gpu.fits(maps_BTM.shape[:-1]):
        forms["cuda"] = _maps_backward_in_kernel
    return on_platform(maps_BTM, dmaps_BTM, **forms)


def _maps(logits: Sequence[Array]) -> list[Array]:
    pre, post, res = _split(logits)
    mixing = [x for row in from_logits(res) for x in row]
    return [*(jax.nn.sigmoid(x) for x in pre), *(2.0 * jax.nn.sigmoid(x) for x in post), *mixing]


def _maps_backward(numbers: Sequence[Array]) -> list[Array]:
    half = len(numbers) // 2
    (pre, post, res), (dpre, dpost, dres) = _split(numbers[:half]), _split(numbers[half:])
    of_pre = [g * p * (1.0 - p) for p, g in zip(pre, dpre, strict=True)]
    of_post = [g * p * (1.0 - 0.5 * p) for p, g in zip(post, dpost, strict=True)]
    return [*of_pre, *of_post, *(g for row in logits_gradient(res, dres) for g in row)]


def _in_xla(numbers: Callable[[Sequence[Array]], list[Array]], *args: Array) -> Array:
    return jnp.stack(numbers([x for a in args for x in jnp.moveaxis(a, -1, 0)]), axis=-1)


def _maps_in_kernel(logits_BTM: Array, *, interpret: bool = False) -> Array:
    return stream_maps_gpu.over_tokens(_maps, [logits_BTM], logits_BTM.shape[-1], interpret=interpret)


def _maps_backward_in_kernel(maps_BTM: Array, dmaps_BTM: Array, *, interpret: bool = False) -> Array:
    return stream_maps_gpu.over_tokens(_maps_backward, [maps_BTM, dmaps_BTM], maps_BTM.shape[-1], interpret=interpret)


def _forward(logits_BTM: Array) -> tuple[Array, Array]:
    maps_BTM = maps(logits_BTM)
    return maps_BTM, maps_BTM


maps.defvjp(_forward, lambda maps_BTM, dmaps_BTM: (maps_backward(maps_BTM, dmaps_BTM),))


def maps_reference(logits_BTM: Float[Array, "B T M"], rounds: int) -> Float[Array, "B T M"]:
    """With Sinkhorn rounds alone and ordinary gradients."""
    logits_MBT = jnp.moveaxis(logits_BTM, -1, 0)
    R = math.isqrt(len(logits_MBT) + 1) - 1
    mixing_RRBT = sinkhorn_reference(logits_MBT[2 * R :].reshape(R, R, *logits_MBT.shape[1:]), rounds)
    halves = jax.nn.sigmoid(logits_MBT[:R]), 2.0 * jax.nn.sigmoid(logits_MBT[R : 2 * R])
    return jnp.moveaxis(jnp.concatenate([*halves, mixing_RRBT.reshape(-1, *logits_MBT.shape[1:])]), 0, -1)
