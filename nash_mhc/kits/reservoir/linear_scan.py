"""h_t = a h_{t-1} + b_t for every unit by itself, along T; a state begins anew with every document.

Numbers are complex, and written as pairs, real parts first (a leading axis of two): no remat policy takes complex
arrays, and accelerators have no complex arithmetic of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.kits.reservoir import linear_scan_gpu
from nash_mhc.ops.platform import on_platform


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


@jax.custom_vjp
def linear_scan(
    a_2N: Float[Array, "2 N"], b_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]
) -> Float[Array, "2 B T N"]:
    """The same, all tokens at once, or in a kernel of their own."""
    return _walk(a_2N, b_2BTN, goes_on(segments_BT), backwards=False)


def _scan_fwd(a_2N, b_2BTN, segments_BT):  # type: ignore[no-untyped-def]
    h_2BTN = linear_scan(a_2N, b_2BTN, segments_BT)
    return h_2BTN, (a_2N, h_2BTN, segments_BT)


def _scan_bwd(saved, dh_2BTN):  # type: ignore[no-untyped-def]
    """A state's gradient is the next state's, times the conjugate: the same recurrence, from the last token on."""
    a_2N, h_2BTN, segments_BT = saved
    on_BT = goes_on(segments_BT)
    conjugate_2N = jnp.stack([a_2N[0], -a_2N[1]])
    db_2BTN = _walk(conjugate_2N, dh_2BTN, jnp.pad(on_BT[:, 1:], ((0, 0), (0, 1))), backwards=True)
    before_2BTN = jnp.where(on_BT[None, ..., None], jnp.pad(h_2BTN[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0))), 0)
    da_2N = times(jnp.stack([before_2BTN[0], -before_2BTN[1]]), db_2BTN).sum((1, 2))
    return da_2N, db_2BTN, None


linear_scan.defvjp(_scan_fwd, _scan_bwd)


def _walk(a_2N: Array, b_2BTN: Array, goes_on_BT: Array, *, backwards: bool) -> Array:
    """h = (a h if the token goes on, else 0) + b, from one token to the next or from the last to the first."""
    forms: dict[str, Any] = {"default": functools.partial(_in_rounds, backwards=backwards)}
    if linear_scan_gpu.fits(b_2BTN.shape):
        forms["cuda"] = functools.partial(linear_scan_gpu.walk, backwards=backwards)
    with jax.named_scope("linear_scan"):
        return on_platform(a_2N, b_2BTN, goes_on_BT, **forms)


def _in_rounds(a_2N: Array, b_2BTN: Array, goes_on_BT: Array, *, backwards: bool) -> Array:
    """In log T rounds, each over all tokens: a multiplier of 0 where a document begins."""
    a_2BTN = jnp.where(goes_on_BT[None, ..., None], a_2N[:, None, None], 0)

    def after(first: tuple[Array, Array], then: tuple[Array, Array]) -> tuple[Array, Array]:
        return times(then[0], first[0]), times(then[0], first[1]) + then[1]

    return lax.associative_scan(after, (a_2BTN, b_2BTN), axis=2, reverse=backwards)[1]
