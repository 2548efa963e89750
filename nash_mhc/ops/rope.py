"""Rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Rotation(NamedTuple):
    """Frequencies of the pairs of a head: theta^(-2i/H), times multipliers if frequencies are scaled."""

    theta: float
    multipliers: tuple[float, ...] = ()  # one per pair, or none
    amplitude: float = 1.0  # factor of cos and sin


def rope(x_BTNH: Float[Array, "B T N H"], positions_BT: Int[Array, "B T"], by: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2) of each head by position * frequency, with angles in float32."""
    cos, sin = (x_BTF[:, :, None] for x_BTF in cos_and_sin(positions_BT, x_BTNH.shape[-1], by))
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def cos_and_sin(
    positions_BT: Int[Array, "B T"], head_dim: int, by: Rotation
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """Return the cosine and sine of each of the F = H/2 pairs of a head, in float32, times the amplitude."""
    half = head_dim // 2
    frequency = by.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if by.multipliers:
        frequency = frequency * jnp.array(by.multipliers, jnp.float32)
    angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if by.amplitude == 1 else (by.amplitude * cos, by.amplitude * sin)


def positions_in_segments(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the position of each token in its document, from 0."""
    T = segments_BT.shape[1]
    index = jnp.arange(T, dtype=jnp.int32)[None]
    starts = jnp.concatenate([jnp.ones_like(segments_BT[:, :1]), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    start_BT = lax.cummax(jnp.where(starts.astype(bool), index, 0), axis=1)
    return index - start_BT
