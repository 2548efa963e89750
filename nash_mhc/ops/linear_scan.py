"""h_t = a h_{t-1} + b_t for every unit by itself, along T; a state begins anew with every document.

Numbers are complex, and written as pairs, real parts first (a leading axis of two): no remat policy takes complex
arrays, and accelerators have no complex arithmetic of their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def times(x: Float[Array, "2 ..."], y: Float[Array, "2 ..."]) -> Float[Array, "2 ..."]:
    """The product of complex numbers."""
    return jnp.stack([x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]])


def goes_on(segments_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a token belongs to the document of the one before it."""
    return jnp.pad(segments_BT[:, 1:] == segments_BT[:, :-1], ((0, 0), (1, 0)))


def linear_scan_reference(
    a_2N: Float[Array, "2 N"], b_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]
) -> Float[Array, "2 B T N"]:
    """The definition: one token after the other."""

    def step(h_2BN: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        b_2BN, on_B = inputs
        h_2BN = jnp.where(on_B[None, :, None], times(a_2N[:, None], h_2BN), 0) + b_2BN
        return h_2BN, h_2BN

    along = (jnp.moveaxis(b_2BTN, 2, 0), goes_on(segments_BT).T)
    return jnp.moveaxis(lax.scan(step, jnp.zeros_like(b_2BTN[:, :, 0]), along)[1], 0, 2)


def linear_scan(
    a_2N: Float[Array, "2 N"], b_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]
) -> Float[Array, "2 B T N"]:
    """The same in log T rounds, each over all tokens at once: a multiplier of 0 where a document begins."""
    a_2BTN = jnp.where(goes_on(segments_BT)[None, ..., None], a_2N[:, None, None], 0)

    def after(first: tuple[Array, Array], then: tuple[Array, Array]) -> tuple[Array, Array]:
        return times(then[0], first[0]), times(then[0], first[1]) + then[1]

    with jax.named_scope("linear_scan"):
        return lax.associative_scan(after, (a_2BTN, b_2BTN), axis=2)[1]
