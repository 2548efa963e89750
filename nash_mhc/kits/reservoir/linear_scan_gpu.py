"""A linear recurrence along T as one GPU kernel (Pallas, Triton): every number is read once and written once.

XLA's associative scan goes over all tokens log T times, and over multipliers as large as they are. Here a thread walks
along a row with the state of its unit in registers, and asks for the next tokens before it needs them.
`linear_scan.py` has the same function in plain arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_UNITS = 32  # of a block: one a thread, a warp in all, so that few rows still reach every processor
_TOKENS = 32  # loaded at once: a thread waits for memory once for all of them (16: a quarter slower in long rows)


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a [2, B, T, N] array can be cut into whole blocks."""
    return shape[2] % _TOKENS == 0 and shape[3] % _UNITS == 0


def walk(
    a_2N: Array, b_2BTN: Array, goes_on_BT: Array, *, backwards: bool, interpret: bool = False,
    units: int = _UNITS, tokens: int = _TOKENS,
) -> Array:  # fmt: skip
    """h = (a h if it goes on, else 0) + b, from one token to the next, or from the last one to the first."""
    _, B, T, N = b_2BTN.shape

    def kernel(a_ref: Any, b_ref: Any, on_ref: Any, h_ref: Any) -> None:
        row, here = pl.program_id(0), pl.ds(pl.program_id(1) * units, units)
        a_real, a_imaginary = a_ref[0, here], a_ref[1, here]

        def body(n: Array, h: tuple[Array, Array]) -> tuple[Array, Array]:
            first = T - (n + 1) * tokens if backwards else n * tokens
            at = [first + k for k in (reversed(range(tokens)) if backwards else range(tokens))]
            loaded = [(b_ref[0, row, t, here], b_ref[1, row, t, here], on_ref[row, t] != 0) for t in at]
            real, imaginary = h
            for t, (b_real, b_imaginary, on) in zip(at, loaded, strict=True):
                real, imaginary = (
                    jnp.where(on, a_real * real - a_imaginary * imaginary, 0.0) + b_real,
                    jnp.where(on, a_real * imaginary + a_imaginary * real, 0.0) + b_imaginary,
                )
                h_ref[0, row, t, here] = real
                h_ref[1, row, t, here] = imaginary
            return real, imaginary

        nothing = jnp.zeros(units, b_ref.dtype)
        lax.fori_loop(0, T // tokens, body, (nothing, nothing))

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(b_2BTN.shape, b_2BTN.dtype), grid=(B, N // units),
        compiler_params=plgpu.CompilerParams(num_warps=max(units // 32, 1), num_stages=1), name="linear_scan",
        interpret=interpret,
    )(a_2N, b_2BTN, goes_on_BT.astype(jnp.int32))  # fmt: skip
