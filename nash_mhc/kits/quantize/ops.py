"""Quantize a matrix to 2, 3 or 4 bits per weight: each element becomes the nearest level times its scale.

    w~ = levels[nearest(w / s)] * s

A scale belongs to a group of inputs of one output, or all scales are the product of two narrow matrices.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Candidate scales of a group, as shares of its largest weight. At 2 bits the best share for Gaussian weights is about
# 0.65; a share of 1 nearly doubles the squared error.
_SHARES = np.linspace(0.25, 1.1, 35, dtype=np.float32)
_TINY = 1e-8  # smallest scale
_KMEANS_ITERATIONS = 30
_ALTERNATIONS = 6  # of codes and scales in `fit_product_scales`


def uniform_levels(bits: int) -> Float[np.ndarray, "L"]:
    """Return evenly spaced levels from -1 to 1, without zero (mid-rise). Quantizing twice changes nothing."""
    return np.linspace(-1.0, 1.0, 2**bits, dtype=np.float32)


def table_levels(steps_K: Float[Array, "K"]) -> Float[Array, "L"]:
    """Return the levels of a trained table: symmetric, ascending for any parameters, largest level 1.

    `steps_K` are logits of the distances between neighboring levels of the positive half, the first from zero.
    """
    above_K = jnp.cumsum(jax.nn.softmax(steps_K))
    return jnp.concatenate([-above_K[::-1], above_K])


@functools.partial(jax.jit, static_argnums=1)
def nearest_steps(u: Float[Array, "..."], bits: int) -> Float[Array, "K"]:
    """Fit the parameters of a table to weights in units of their scales, by symmetric k-means."""
    size_N = jnp.clip(jnp.abs(u).reshape(-1), 0.0, 1.0)

    def iterate(levels_K: Array, _: None) -> tuple[Array, None]:
        codes_N = jnp.sum(size_N[:, None] >= ((levels_K[:-1] + levels_K[1:]) / 2)[None], axis=1)
        own_NK = codes_N[:, None] == jnp.arange(levels_K.shape[0])[None]
        counts_K = jnp.sum(own_NK, axis=0)
        means_K = jnp.sum(jnp.where(own_NK, size_N[:, None], 0.0), axis=0) / jnp.maximum(counts_K, 1)
        return jnp.where(counts_K > 0, means_K, levels_K), None

    start = jnp.asarray(uniform_levels(bits))[2 ** (bits - 1) :]
    levels_K, _ = jax.lax.scan(iterate, start, None, length=_KMEANS_ITERATIONS)
    # Keep the levels ascending. The largest becomes 1: the caller fits its scales to the table afterwards.
    distances_K = jnp.maximum(jnp.diff(levels_K, prepend=0.0), 1e-3)
    return jnp.log(distances_K / jnp.sum(distances_K))


def codes_of(w: Float[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Int[Array, "..."]:
    """Return the index of each element's nearest level; the scales `s` broadcast against `w`."""
    u, codes = w / _away_from_zero(s), jnp.zeros(w.shape, jnp.int32)
    for border in (levels_L[:-1] + levels_L[1:]) / 2:
        codes += u >= border  # a few comparisons are faster than a gather
    return codes


def _away_from_zero(s: Array) -> Array:
    return jnp.where(jnp.abs(s) < _TINY, jnp.where(s < 0, -_TINY, _TINY), s).astype(s.dtype)


def levels_at(codes: Int[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """Return `levels_L[codes]` without a gather, which is slow for every weight on all devices."""
    values = jnp.broadcast_to(levels_L[0], codes.shape)
    for number in range(1, levels_L.shape[0]):
        values = jnp.where(codes >= number, levels_L[number], values)
    return values


def dequantized(codes: Int[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """Return the weights of these codes. Training and packed files use it, so they agree bit for bit."""
    return levels_at(codes, levels_L) * s


@jax.custom_vjp
def quantized(w: Float[Array, "..."], s: Float[Array, "..."], levels_L: Float[Array, "L"]) -> Float[Array, "..."]:
    """Return the quantized weights, with straight-through gradients.

    The gradient is that of s * (clip(w / s) + r) with a constant rounding error r. A weight inside the outermost cells
    gets its gradient unchanged, one outside gets none. A scale gets level - w / s inside and level outside. A level of
    the table gets the sum over its elements.
    """
    return dequantized(codes_of(w, s, levels_L), s, levels_L)


def _ends(levels_L: Array) -> tuple[Array, Array]:
    """Return the outer borders of the outermost cells, which are symmetric around their levels."""
    return levels_L[0] - (levels_L[1] - levels_L[0]) / 2, levels_L[-1] + (levels_L[-1] - levels_L[-2]) / 2


def _forward(w: Array, s: Array, levels_L: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return quantized(w, s, levels_L), (w, s, levels_L)


def _backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, Array]:
    w, s, levels_L = saved
    codes, u = codes_of(w, s, levels_L), w / _away_from_zero(s)
    low, high = _ends(levels_L)
    inside = (u > low) & (u < high)
    d_s = d * (levels_at(codes, levels_L) - jnp.where(inside, u, 0))
    d_levels = jnp.stack([jnp.sum(jnp.where(codes == i, d * s, 0)) for i in range(levels_L.shape[0])])
    shared = tuple(i for i, (a, b) in enumerate(zip(w.shape, s.shape, strict=True)) if a != b)
    return jnp.where(inside, d, 0), jnp.sum(d_s, shared, keepdims=True), d_levels.astype(levels_L.dtype)


quantized.defvjp(_forward, _backward)


# Scales of groups ----------------------------------------------------------------------------------------------------


def spread_groups(s_GO: Float[Array, "G O"], inputs: int) -> Float[Array, "I O"]:
    """Return the scale of every element from those of the groups."""
    return jnp.repeat(s_GO, inputs // s_GO.shape[0], axis=0)


@functools.partial(jax.jit, static_argnums=1)
def fit_group_scales(w_IO: Float[Array, "I O"], group: int, levels_L: Float[Array, "L"]) -> Float[Array, "G O"]:
    """Fit one scale per group of `group` inputs by squared error.

    Tries several fractions of the group's largest weight as the scale, and the least-squares scale for the codes that
    each gives; returns the best.
    """
    w_GgO = w_IO.reshape(w_IO.shape[0] // group, group, w_IO.shape[1])
    largest_G1O = jnp.maximum(jnp.max(jnp.abs(w_GgO), axis=1, keepdims=True), _TINY)

    def error_of(s_G1O: Array) -> Array:
        return jnp.sum((dequantized(codes_of(w_GgO, s_G1O, levels_L), s_G1O, levels_L) - w_GgO) ** 2, axis=1, keepdims=True)

    def better(best: tuple[Array, Array], s_G1O: Array) -> tuple[Array, Array]:
        error = error_of(s_G1O)
        return jnp.where(error < best[0], error, best[0]), jnp.where(error < best[0], s_G1O, best[1])

    def try_share(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        s_G1O = largest_G1O * factor
        best = better(best, s_G1O)
        values = levels_at(codes_of(w_GgO, s_G1O, levels_L), levels_L)
        least = jnp.sum(w_GgO * values, axis=1, keepdims=True) / jnp.sum(values**2, axis=1, keepdims=True)
        return better(best, jnp.maximum(least, _TINY)), None

    start = (jnp.full_like(largest_G1O, jnp.inf), largest_G1O)
    (_, s_G1O), _ = jax.lax.scan(try_share, start, jnp.asarray(_SHARES))
    return s_G1O[:, 0]


# Scales of low rank --------------------------------------------------------------------------------------------------


def product_scales(a_IR: Float[Array, "*I R"], b_RO: Float[Array, "R *O"]) -> Float[Array, "..."]:
    """Return the scale of every element as a product, always in float32 at the highest precision."""
    return jnp.tensordot(a_IR, b_RO, axes=1, precision="highest", preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def fit_product_scales(
    w_IO: Float[Array, "I O"], group: int, rank: int, levels_L: Float[Array, "L"]
) -> tuple[Float[Array, "I R"], Float[Array, "R O"]]:
    """Fit two narrow matrices whose product scales every element, by squared error.

    Starts from the singular vectors of the groups' scales. Then alternates: codes for the current scales, then each
    row and each column by least squares for those codes. Returns the best iterate.
    """
    s_GO = fit_group_scales(w_IO, group, levels_L)
    u_GK, g_K, v_KO = jnp.linalg.svd(s_GO, full_matrices=False)
    root_K = jnp.sqrt(g_K)[:rank]
    a_IR = spread_groups(u_GK[:, :rank] * root_K[None], w_IO.shape[0])
    b_RO = v_KO[:rank] * root_K[:, None]
    if (extra := rank - len(root_K)) > 0:  # more columns than groups: begin with small random ones
        size = 1e-3 * root_K[0] / math.sqrt(w_IO.shape[0])
        more = [size * jax.random.normal(jax.random.key(side), (n, extra)) for side, n in enumerate(w_IO.shape)]
        a_IR, b_RO = jnp.concatenate([a_IR, more[0]], axis=1), jnp.concatenate([b_RO, more[1].T])

    def error_of(a_IR: Array, b_RO: Array) -> Array:
        return jnp.sum((quantized(w_IO, product_scales(a_IR, b_RO), levels_L) - w_IO) ** 2)

    def iterate(carry: Any, _: None) -> tuple[Any, None]:
        a_IR, b_RO, best, best_a, best_b = carry
        values_IO = levels_at(codes_of(w_IO, product_scales(a_IR, b_RO), levels_L), levels_L)
        a_IR = _least_squares(values_IO, w_IO, b_RO.T)
        b_RO = _least_squares(values_IO.T, w_IO.T, a_IR).T
        error = error_of(a_IR, b_RO)
        return (a_IR, b_RO, *(jnp.where(error < best, x, y) for x, y in ((error, best), (a_IR, best_a), (b_RO, best_b)))), None

    start = (a_IR, b_RO, error_of(a_IR, b_RO), a_IR, b_RO)
    (_, _, _, a_IR, b_RO), _ = jax.lax.scan(iterate, start, None, length=_ALTERNATIONS)
    return a_IR, b_RO


def _least_squares(values_NM: Array, w_NM: Array, b_MR: Array) -> Array:
    """Return for each row n the x_R that minimizes |values_NM[n] * (b_MR x_R) - w_NM[n]|."""
    hp = functools.partial(jnp.einsum, precision="highest")
    square_NRR = hp("nm,mr,mk->nrk", values_NM**2, b_MR, b_MR)
    right_NR = hp("nm,mr->nr", values_NM * w_NM, b_MR)
    # Rows of zeros and dependent columns make the system singular: regularize it a little.
    ridge = 1e-6 * jnp.trace(square_NRR, axis1=1, axis2=2)[:, None, None] + 1e-12
    return jnp.linalg.solve(square_NRR + ridge * jnp.eye(b_MR.shape[1])[None], right_NR[..., None])[..., 0]


# Packed codes --------------------------------------------------------------------------------------------------------


def packed(codes_OI: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of each row in `bits` bits each, lowest bits first: u8 [O, ceil(I b / 8)]."""
    each = (codes_OI[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(each.reshape(codes_OI.shape[0], -1), axis=1, bitorder="little")


def unpacked(bytes_OP: np.ndarray, bits: int, inputs: int) -> np.ndarray:
    """Return the codes [O, I] that `packed` was given."""
    each = np.unpackbits(bytes_OP, axis=1, count=inputs * bits, bitorder="little")
    return (each.reshape(bytes_OP.shape[0], inputs, bits) << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
