"""Pad the documents of a sequence so that each begins at a multiple of a stride, and undo it.

Coarse scales need every block to lie in one document. Aligning the data itself would waste much of a sequence with
short documents. Here only the code that works on blocks sees the padded sequence. Tokens map one to one, so both
directions and their gradients are lookups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from nash_mhc.ops.rope import positions_in_segments


class Spread(NamedTuple):
    """Index maps between T tokens and U positions of the padded sequence."""

    place_BT: Int[Array, "B T"]  # padded position of each token
    slot_BU: Int[Array, "B U"]  # token at each padded position; in padding, the token before
    is_slot_BU: Bool[Array, "B U"]  # whether a padded position holds a token


def plan_spread(segments_BT: Int[Array, "B T"], stride: int, padded_length: int) -> tuple[Spread, Int[Array, "B U"]]:
    """Return (index maps, segments of the padded sequence), for a padded length that is a multiple of the stride.

    Padding has the segment of the token before it.
    """
    B, T = segments_BT.shape
    positions_BT = positions_in_segments(segments_BT)
    # Before each document but the first, pad the previous one to whole blocks.
    ends_BT = jnp.pad(positions_BT[:, :-1] + 1, ((0, 0), (1, 0)))
    gaps_BT = jnp.where(positions_BT == 0, -ends_BT % stride, 0)
    place_BT = jnp.arange(T, dtype=jnp.int32)[None] + jnp.cumsum(gaps_BT, axis=1, dtype=jnp.int32)
    rows_B1 = jnp.arange(B)[:, None]
    slot_BU = (
        jnp.zeros((B, padded_length), jnp.int32).at[rows_B1, place_BT].set(jnp.arange(T, dtype=jnp.int32)[None], mode="drop")
    )
    is_slot_BU = jnp.zeros((B, padded_length), bool).at[rows_B1, place_BT].set(True, mode="drop")
    slot_BU = jax.lax.cummax(slot_BU, axis=1)
    return Spread(place_BT, slot_BU, is_slot_BU), _take(segments_BT, slot_BU)


def _take(x: Shaped[Array, "B X ..."], index: Int[Array, "B Y"]) -> Shaped[Array, "B Y ..."]:
    return jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds"))(x, index)


def _only_slots(x: Shaped[Array, "B U ..."], is_slot_BU: Bool[Array, "B U"]) -> Shaped[Array, "B U ..."]:
    return jnp.where(is_slot_BU.reshape(*is_slot_BU.shape, *(1,) * (x.ndim - 2)), x, 0)


@jax.custom_vjp
def spread(x: Shaped[Array, "B T ..."], by: Spread) -> Shaped[Array, "B U ..."]:
    """Move tokens to their padded positions; padding is 0."""
    return _only_slots(_take(x, by.slot_BU), by.is_slot_BU)


@jax.custom_vjp
def gather(x: Shaped[Array, "B U ..."], by: Spread) -> Shaped[Array, "B T ..."]:
    """Undo `spread`."""
    return _take(x, by.place_BT)


# Each is the other's adjoint. Autodiff would use scatter-add, which is nondeterministic on a GPU.
spread.defvjp(lambda x, by: (spread(x, by), by), lambda by, dx: (gather(dx, by), None))
gather.defvjp(lambda x, by: (gather(x, by), by), lambda by, dx: (spread(dx, by), None))
