"""Weights of two, three or four bits: a table of levels times a scale, fitted by the squared error that is left.

A matrix [I, O] of inputs and outputs. Every element is the nearest of 2^b levels, times the scale of its place:

    w~ = levels[nearest(w / s)] * s

Scales are shared by a group of inputs of one output, or are the product of two narrow matrices, one number an element
of the matrix at a fraction of the room. The uniform levels stand half a step off zero (mid-rise), -1 and 1 at the ends:
a level is the centre of its cell, and so what was snapped once does not move when it is snapped again.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Shares of the largest weight of a group that are tried as its scale. At two bits of Gaussian weights the best is near
# 0.65; the largest weight itself leaves nearly twice the error.
_SHARES = np.linspace(0.25, 1.1, 35, dtype=np.float32)
_TINY = 1e-8  # a scale below this is that of zeros
_TURNS = 30  # of k-means
_SWEEPS = 6  # of codes and scales by turns, where a scale is a product


def uniform_levels(bits: int) -> Float[np.ndarray, "L"]:
    """From -1 to 1 in equal steps, without zero."""
    return np.linspace(-1.0, 1.0, 2**bits, dtype=np.float32)


def table_levels(steps_K: Float[Array, "K"]) -> Float[Array, "L"]:
    """A table that is trained: symmetric, ascending whatever its numbers are, and 1 at its end.

    Half as many steps as levels: the first from the middle to the level next to it, the others from level to level.
    """
    above_K = jnp.cumsum(jax.nn.softmax(steps_K))
    return jnp.concatenate([-above_K[::-1], above_K])


@functools.partial(jax.jit, static_argnums=1)
def nearest_steps(u: Float[Array, "..."], bits: int) -> Float[Array, "K"]:
    """The numbers of a table whose levels are the means of what is nearest to them (k-means, symmetric), for weights in
    units of their scales."""
    size_N = jnp.clip(jnp.abs(u).reshape(-1), 0.0, 1.0)

    def turn(levels_K: Array, _: None) -> tuple[Array, None]:
        codes_N = jnp.sum(size_N[:, None] >= ((levels_K[:-1] + levels_K[1:]) / 2)[None], axis=1)
        own_NK = codes_N[:, None] == jnp.arange(levels_K.shape[0])[None]
        counts_K = jnp.sum(own_NK, axis=0)
        means_K = jnp.sum(jnp.where(own_NK, size_N[:, None], 0.0), axis=0) / jnp.maximum(counts_K, 1)
        return jnp.where(counts_K > 0, means_K, levels_K), None

    start = jnp.asarray(uniform_levels(bits))[2 ** (bits - 1) :]
    levels_K, _ = jax.lax.scan(turn, start, None, length=_TURNS)
    # Ascending, a little apart, and 1 at the end: whoever takes the table fits its scales to it.
    distances_K = jnp.maximum(jnp.diff(levels_K, prepend=0.0), 1e-3)
    return jnp.log(distances_K / jnp.sum(distances_K))


def codes_of(w: Float[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Int[Array, "..."]:
    """The number of the nearest level of each element; s is as large as w, or is one for many of it."""
    u, codes = w / _away_from_zero(s), jnp.zeros(w.shape, jnp.int32)
    for border in (levels_L[:-1] + levels_L[1:]) / 2:
        codes += u >= border  # a handful of comparisons, and no gather
    return codes


def _away_from_zero(s: Array) -> Array:
    return jnp.where(jnp.abs(s) < _TINY, jnp.where(s < 0, -_TINY, _TINY), s).astype(s.dtype)


def levels_at(codes: Int[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """`levels_L[codes]`, by choosing: there are few, and a gather of every weight is slow on all devices."""
    values = jnp.broadcast_to(levels_L[0], codes.shape)
    for number in range(1, levels_L.shape[0]):
        values = jnp.where(codes >= number, levels_L[number], values)
    return values


def dequantized(codes: Int[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """What is computed with, in training and from a packed file: the same operations, so they agree bit for bit."""
    return levels_at(codes, levels_L) * s


@jax.custom_vjp
def quantized(w: Float[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """The weights as they would be in so few bits, with straight-through gradients.

    The gradient is that of s * (clip(w / s) + r), with the rounding error r held still: a weight moves as if it were
    not rounded, up to the end of the outermost cell; a scale gets what is left, level - w / s, its own rounding
    included; outside of the cells a weight has no gradient, and its scale the whole level. A level of the table has
    that of all elements that stand on it. `relaxed` is that form, for tests.
    """
    return dequantized(codes_of(w, s, levels_L), s, levels_L)


def _ends(levels_L: Array) -> tuple[Array, Array]:
    """Of the cells: as far outside of the outermost levels as their inner borders are inside."""
    return levels_L[0] - (levels_L[1] - levels_L[0]) / 2, levels_L[-1] + (levels_L[-1] - levels_L[-2]) / 2


def relaxed(w: Array, s: Array, levels_L: Array, error: Array) -> Array:
    """The form whose derivatives `quantized` has, for a rounding error that is held still."""
    low, high = _ends(jax.lax.stop_gradient(levels_L))
    return s * (jnp.clip(w / s, low, high) + error)


def _forward(w: Array, s: Array, levels_L: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return quantized(w, s, levels_L), (w, s, levels_L)


def _backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, Array]:
    w, s, levels_L = saved
    codes, u = codes_of(w, s, levels_L), w / _away_from_zero(s)
    low, high = _ends(levels_L)
    inside = (u > low) & (u < high)
    d_s = d * (levels_at(codes, levels_L) - jnp.where(inside, u, 0))
    d_levels = jnp.stack([jnp.sum(jnp.where(codes == i, d * s, 0)) for i in range(levels_L.shape[0])])
    return jnp.where(inside, d, 0), _summed_like(d_s, s), d_levels.astype(levels_L.dtype)


def _summed_like(x: Array, like: Array) -> Array:
    shared = tuple(i for i, (a, b) in enumerate(zip(x.shape, like.shape, strict=True)) if a != b)
    return jnp.sum(x, shared, keepdims=True)


quantized.defvjp(_forward, _backward)


# Scales of groups ----------------------------------------------------------------------------------------------------


def spread_groups(s_GO: Float[Array, "G O"], inputs: int) -> Float[Array, "I O"]:
    """The scale of every element, from those of its group."""
    return jnp.repeat(s_GO, inputs // s_GO.shape[0], axis=0)


@functools.partial(jax.jit, static_argnums=1)
def fitted_groups(w_IO: Float[Array, "I O"], group: int, levels_L: Float[Array, "L"]) -> Float[Array, "G O"]:
    """The scales of groups of so many inputs that leave the least squared error: the best of several shares of the
    largest weight, then the least squares of the codes that it gave."""
    w_GgO = w_IO.reshape(w_IO.shape[0] // group, group, w_IO.shape[1])
    largest_G1O = jnp.maximum(jnp.max(jnp.abs(w_GgO), axis=1, keepdims=True), _TINY)

    def error_of(s_G1O: Array) -> Array:
        return jnp.sum((dequantized(codes_of(w_GgO, s_G1O, levels_L), s_G1O, levels_L) - w_GgO) ** 2, axis=1, keepdims=True)

    def better(best: tuple[Array, Array], s_G1O: Array) -> tuple[Array, Array]:
        error = error_of(s_G1O)
        return jnp.where(error < best[0], error, best[0]), jnp.where(error < best[0], s_G1O, best[1])

    def share(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        s_G1O = largest_G1O * factor
        best = better(best, s_G1O)
        values = levels_at(codes_of(w_GgO, s_G1O, levels_L), levels_L)
        least = jnp.sum(w_GgO * values, axis=1, keepdims=True) / jnp.sum(values**2, axis=1, keepdims=True)
        return better(best, jnp.maximum(least, _TINY)), None

    start = (jnp.full_like(largest_G1O, jnp.inf), largest_G1O)
    (_, s_G1O), _ = jax.lax.scan(share, start, jnp.asarray(_SHARES))
    return s_G1O[:, 0]


# Scales of low rank --------------------------------------------------------------------------------------------------


def product_scales(a_IR: Float[Array, "*I R"], b_RO: Float[Array, "R *O"]) -> Float[Array, "..."]:
    """The scale of every element, as a product: in float32 and in one order, whatever the devices are asked for."""
    return jnp.tensordot(a_IR, b_RO, axes=1, precision="highest", preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def fitted_product(
    w_IO: Float[Array, "I O"], group: int, rank: int, levels_L: Float[Array, "L"]
) -> tuple[Float[Array, "I R"], Float[Array, "R O"]]:
    """Two narrow matrices whose product scales every element, by the squared error that is left.

    They begin as the singular vectors of the groups' scales. Then by turns: codes for the scales that there are, and
    for those codes each row, then each column, by least squares; the best of all turns is returned.
    """
    s_GO = fitted_groups(w_IO, group, levels_L)
    u_GK, g_K, v_KO = jnp.linalg.svd(s_GO, full_matrices=False)
    root_K = jnp.sqrt(g_K)[:rank]
    a_IR = spread_groups(u_GK[:, :rank] * root_K[None], w_IO.shape[0])
    b_RO = v_KO[:rank] * root_K[:, None]
    if (extra := rank - len(root_K)) > 0:  # more columns than groups: what they will be, the turns below find
        size = 1e-3 * root_K[0] / math.sqrt(w_IO.shape[0])
        more = [size * jax.random.normal(jax.random.key(side), (n, extra)) for side, n in enumerate(w_IO.shape)]
        a_IR, b_RO = jnp.concatenate([a_IR, more[0]], axis=1), jnp.concatenate([b_RO, more[1].T])

    def error_of(a_IR: Array, b_RO: Array) -> Array:
        return jnp.sum((quantized(w_IO, product_scales(a_IR, b_RO), levels_L) - w_IO) ** 2)

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        a_IR, b_RO, best, best_a, best_b = carry
        values_IO = levels_at(codes_of(w_IO, product_scales(a_IR, b_RO), levels_L), levels_L)
        a_IR = _least_squares(values_IO, w_IO, b_RO.T)
        b_RO = _least_squares(values_IO.T, w_IO.T, a_IR).T
        error = error_of(a_IR, b_RO)
        return (a_IR, b_RO, *(jnp.where(error < best, x, y) for x, y in ((error, best), (a_IR, best_a), (b_RO, best_b)))), None

    start = (a_IR, b_RO, error_of(a_IR, b_RO), a_IR, b_RO)
    (_, _, _, a_IR, b_RO), _ = jax.lax.scan(turn, start, None, length=_SWEEPS)
    return a_IR, b_RO


def _least_squares(values_NM: Array, w_NM: Array, b_MR: Array) -> Array:
    """For each row n the x_R that brings values_NM[n] * (b_MR x_R) nearest to w_NM[n]."""
    hp = functools.partial(jnp.einsum, precision="highest")
    square_NRR = hp("nm,mr,mk->nrk", values_NM**2, b_MR, b_MR)
    right_NR = hp("nm,mr->nr", values_NM * w_NM, b_MR)
    # A row of zeros, or columns that say the same, leave directions free: a little of the diagonal holds them still.
    ridge = 1e-6 * jnp.trace(square_NRR, axis1=1, axis2=2)[:, None, None] + 1e-12
    return jnp.linalg.solve(square_NRR + ridge * jnp.eye(b_MR.shape[1])[None], right_NR[..., None])[..., 0]


# Packed --------------------------------------------------------------------------------------------------------------


def packed(codes_OI: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a row one after the other, `bits` of each, the lowest first: u8 [O, ceil(I b / 8)]."""
    each = (codes_OI[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(each.reshape(codes_OI.shape[0], -1), axis=1, bitorder="little")


def unpacked(bytes_OP: np.ndarray, bits: int, inputs: int) -> np.ndarray:
    """The codes that `packed` was given, [O, I]."""
    each = np.unpackbits(bytes_OP, axis=1, count=inputs * bits, bitorder="little")
    return (each.reshape(bytes_OP.shape[0], inputs, bits) << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
