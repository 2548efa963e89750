"""Tokens times a weight, with the gradient of the weight computed from the side that is cheap to turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def project(x_BTD: Float[Array, "*B D"], w_DX: Float[Array, "D *X"]) -> Float[Array, "..."]:
    """x w, over the last axis of x and the first of w.

    The gradient of w is a product over all tokens, for which a CPU turns the left side round. Autodiff puts the
    gradient of the result there, with all that it is made of: a silu, element by element across the memory, once for
    each weight. Here it is x, which all weights of a sub-layer share. Elsewhere both cost the same.
    """
    return jnp.tensordot(x_BTD, w_DX, axes=1)


def _forward(x_BTD, w_DX):  # type: ignore[no-untyped-def]
    return project(x_BTD, w_DX), (x_BTD, w_DX)


def _backward(saved, dy):  # type: ignore[no-untyped-def]
    x_BTD, w_DX = saved
    tokens, own = tuple(range(x_BTD.ndim - 1)), w_DX.ndim - 1
    dx = jnp.tensordot(dy, w_DX, axes=(tuple(range(dy.ndim - own, dy.ndim)), tuple(range(1, w_DX.ndim))))
    return dx, jnp.tensordot(x_BTD, dy, axes=(tokens, tokens))


project.defvjp(_forward, _backward)
