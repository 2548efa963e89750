"""A token's maps from their logits: what is read, what is written, and a doubly stochastic mixing of the streams.

A token's coefficients are one row of `maps_BTM`, float32: R of pre, R of post, R x R of res, row by row. The plain form
at the end is what the tests compare with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nash_mhc.ops import sinkhorn_gpu
from nash_mhc.ops.arithmetic import add_up
from nash_mhc.ops.platform import on_platform
from nash_mhc.ops.sinkhorn import Matrix, Vector, balance, sinkhorn, sinkhorn_reference, sum_over
from nash_mhc.ops.sinkhorn_gpu import balanced, iterate, reverse


def coefficients(maps_BTM: Float[Array, "B T M"]) -> tuple[Vector, Vector, Matrix]:
    """(pre, post, res by rows), each coefficient an array [B, T]."""
    return _split([maps_BTM[..., m] for m in range(maps_BTM.shape[-1])])


def _split(each: Sequence[Array]) -> tuple[Vector, Vector, Matrix]:
    """M arrays -> those of pre, of post, and of res by rows."""
    R = math.isqrt(len(each) + 1) - 1  # M + 1 = (R + 1)^2
    res = each[2 * R :]
    return tuple(each[:R]), tuple(each[R : 2 * R]), tuple(tuple(res[i * R : (i + 1) * R]) for i in range(R))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def maps(logits_BTM: Float[Array, "B T M"], iterations: int) -> tuple[Float[Array, "B T M"], Float[Array, "B T"]]:
    """H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn's iteration, then balanced: doubly stochastic.

    Second, only to be looked at: how far Sinkhorn's columns were from 1 before they were balanced.
    """
    forms: dict[str, Any] = {"default": functools.partial(_maps_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_in_kernel, iterations)
    return on_platform(logits_BTM, **forms)


def _maps_in_xla(iterations: int, logits_BTM: Array) -> tuple[Array, Array]:
    pre_RBT, post_RBT, res_RRBT = _by_kind(logits_BTM)
    mixing_RRBT = sinkhorn(res_RRBT, iterations)
    unbalanced_BT = jnp.max(jnp.abs(sum_over(mixing_RRBT, axis=0) - 1.0), axis=0)
    halves = jax.nn.sigmoid(pre_RBT), 2.0 * jax.nn.sigmoid(post_RBT)
    maps_MBT = jnp.concatenate([*halves, balance(mixing_RRBT).reshape(-1, *unbalanced_BT.shape)])
    return jnp.moveaxis(maps_MBT, 0, -1), unbalanced_BT


def _by_kind(logits_BTM: Array) -> tuple[Array, Array, Array]:
    """Of pre [R, B, T], of post [R, B, T] and of res [R, R, B, T]."""
    logits_MBT = jnp.moveaxis(logits_BTM, -1, 0)
    R = math.isqrt(len(logits_MBT) + 1) - 1  # M + 1 = (R + 1)^2
    return logits_MBT[:R], logits_MBT[R : 2 * R], logits_MBT[2 * R :].reshape(R, R, *logits_MBT.shape[1:])


def _maps_in_numbers(iterations: int, each: Sequence[Array]) -> list[Array]:
    """The same of M numbers a token, for a kernel: the coefficients, and how far from balanced."""
    pre, post, res = _split(each)
    mixing = iterate(res, iterations)
    sums = [add_up(column) for column in zip(*mixing, strict=True)]
    unbalanced = functools.reduce(jnp.maximum, [jnp.abs(s - 1.0) for s in sums])
    halves = [jax.nn.sigmoid(x) for x in pre], [2.0 * jax.nn.sigmoid(x) for x in post]
    return [*halves[0], *halves[1], *(x for row in balanced(mixing) for x in row), unbalanced]


def _maps_in_kernel(iterations: int, logits_BTM: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    body = lambda each, _: _maps_in_numbers(iterations, each)
    maps_BTM, unbalanced = sinkhorn_gpu.over_tokens(body, [logits_BTM], [logits_BTM.shape[-1], 1], interpret=interpret)
    return maps_BTM, unbalanced[..., 0]


def _maps_fwd(logits_BTM, iterations):  # type: ignore[no-untyped-def]
    return maps(logits_BTM, iterations), logits_BTM


def _maps_bwd(iterations, logits_BTM, cotangents):  # type: ignore[no-untyped-def]
    return (maps_backward(logits_BTM, cotangents[0], iterations),)


def maps_backward(
    logits_BTM: Float[Array, "B T M"], dmaps_BTM: Float[Array, "B T M"], iterations: int
) -> Float[Array, "B T M"]:
    """The gradient of the logits."""
    forms: dict[str, Any] = {"default": functools.partial(_maps_backward_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_backward_in_kernel, iterations)
    return on_platform(logits_BTM, dmaps_BTM, **forms)


def _maps_backward_in_xla(iterations: int, logits_BTM: Array, dmaps_BTM: Array) -> Array:
    return jax.vjp(lambda logits_BTM: _maps_in_xla(iterations, logits_BTM)[0], logits_BTM)[1](dmaps_BTM)[0]


def _maps_backward_in_numbers(
    iterations: int, each: Sequence[Array], grads: tuple[Vector, Vector, Matrix], aside: sinkhorn_gpu.Aside
) -> list[Array]:
    """Gradients of the M logits."""
    pre, post, res = _split(each)
    slope = lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)
    dpre = [g * slope(x) for x, g in zip(pre, grads[0], strict=True)]
    dpost = [2.0 * g * slope(x) for x, g in zip(post, grads[1], strict=True)]
    dres = reverse(res, lambda mixing: jax.vjp(balanced, mixing)[1](grads[2])[0], iterations, aside)
    return [*dpre, *dpost, *(g for row in dres for g in row)]


def _maps_backward_in_kernel(iterations: int, logits_BTM: Array, dmaps_BTM: Array, *, interpret: bool = False) -> Array:
    M = logits_BTM.shape[-1]
    R = math.isqrt(M + 1) - 1

    def body(each: list[Array], aside: sinkhorn_gpu.Aside) -> list[Array]:
        return _maps_backward_in_numbers(iterations, each[:M], _split(each[M:]), aside)

    args, room = [logits_BTM, dmaps_BTM], (iterations, R)
    return sinkhorn_gpu.over_tokens(body, args, [M], aside=room, interpret=interpret)[0]


maps.defvjp(_maps_fwd, _maps_bwd)


def maps_reference(logits_BTM: Float[Array, "B T M"], iterations: int) -> Float[Array, "B T M"]:
    """With ordinary gradients."""
    pre_RBT, post_RBT, res_RRBT = _by_kind(logits_BTM)
    mixing_RRBT = balance(sinkhorn_reference(res_RRBT, iterations))
    each = [jax.nn.sigmoid(pre_RBT), 2.0 * jax.nn.sigmoid(post_RBT), mixing_RRBT.reshape(-1, *pre_RBT.shape[1:])]
    return jnp.moveaxis(jnp.concatenate(each), 0, -1)
