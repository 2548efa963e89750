"""Rows whose documents begin anywhere, spread out so that each begins at a multiple of a stride, and gathered again.

Coarse scales want every block in one document. Short documents that are laid so waste much of a row; here the row stays
full, and only what works on blocks sees the gaps. Each slot has one place and each place at most one slot, so both ways
are plain lookups, and so are their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from nash_mhc.ops.rope import positions_in_segments


class Spread(NamedTuple):
    """Where the slots of each row go: T slots to U places."""

    place_BT: Int[Array, "B T"]
    slot_BU: Int[Array, "B U"]  # that is in a place; in a gap, the one before it
    is_slot_BU: Bool[Array, "B U"]  # and not a gap


def plan(segments_BT: Int[Array, "B T"], stride: int, room: int) -> tuple[Spread, Int[Array, "B U"]]:
    """(the plan, segments of the places) for rows that need no more than `room` places, a multiple of the stride.

    A gap belongs to the document before it. Places beyond the last slot belong to what is there:
    padding, or its document.
    """
    B, T = segments_BT.shape
    positions_BT = positions_in_segments(segments_BT)
    # Before each document but the first, what the one before it lacks to whole blocks.
    ends_BT = jnp.pad(positions_BT[:, :-1] + 1, ((0, 0), (1, 0)))
    gaps_BT = jnp.where(positions_BT == 0, -ends_BT % stride, 0)
    place_BT = jnp.arange(T, dtype=jnp.int32)[None] + jnp.cumsum(gaps_BT, axis=1, dtype=jnp.int32)
    rows_B1 = jnp.arange(B)[:, None]
    slot_BU = jnp.zeros((B, room), jnp.int32).at[rows_B1, place_BT].set(jnp.arange(T, dtype=jnp.int32)[None], mode="drop")
    is_slot_BU = jnp.zeros((B, room), bool).at[rows_B1, place_BT].set(True, mode="drop")
    slot_BU = jax.lax.cummax(slot_BU, axis=1)
    return Spread(place_BT, slot_BU, is_slot_BU), _looked_up(segments_BT, slot_BU)


def _looked_up(x: Shaped[Array, "B X ..."], index: Int[Array, "B Y"]) -> Shaped[Array, "B Y ..."]:
    return jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds"))(x, index)


def _only_slots(x: Shaped[Array, "B U ..."], is_slot_BU: Bool[Array, "B U"]) -> Shaped[Array, "B U ..."]:
    return jnp.where(is_slot_BU.reshape(*is_slot_BU.shape, *(1,) * (x.ndim - 2)), x, 0)


@jax.custom_vjp
def spread(x: Shaped[Array, "B T ..."], by: Spread) -> Shaped[Array, "B U ..."]:
    """Every slot in its place; gaps are 0."""
    return _only_slots(_looked_up(x, by.slot_BU), by.is_slot_BU)


@jax.custom_vjp
def gather(x: Shaped[Array, "B U ..."], by: Spread) -> Shaped[Array, "B T ..."]:
    """Every slot from its place."""
    return _looked_up(x, by.place_BT)


# Each is the other's adjoint. Left to autodiff they would be sums by scattering, which a GPU does in any order.
spread.defvjp(lambda x, by: (spread(x, by), by), lambda by, dx: (gather(dx, by), None))
gather.defvjp(lambda x, by: (gather(x, by), by), lambda by, dx: (spread(dx, by), None))
