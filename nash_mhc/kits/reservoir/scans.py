"""The recurrences of a reservoir along T, restarted at every document: linear complex units and rings of tanh units.

Complex numbers are pairs on a leading axis of two, real parts first: remat policies and accelerators do not support
complex arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.platform import on_platform, run_kernel

CHUNK = 64  # tokens per chunk of `tanh_scan`, which saves one state per chunk and recomputes the others
_BLOCK_UNITS = 32  # one per thread, one warp per block, so that a few rows still occupy all multiprocessors
_BLOCK_TOKENS = 32  # prefetched together (16: 25% slower on long rows)


def complex_product(x: Float[Array, "2 ..."], y: Float[Array, "2 ..."]) -> Float[Array, "2 ..."]:
    return jnp.stack([x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]])


def continues(segments_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return whether each token belongs to the same document as the one before it."""
    return jnp.pad(segments_BT[:, 1:] == segments_BT[:, :-1], ((0, 0), (1, 0)))


@jax.custom_vjp
def linear_scan(
    a_2N: Float[Array, "2 N"], b_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]
) -> Float[Array, "2 B T N"]:
    """Compute h_t = a h_{t-1} + b_t, in parallel over tokens or in one kernel on a GPU."""
    return _recurrence(a_2N, b_2BTN, continues(segments_BT), backwards=False)


def _linear_scan_fwd(a_2N, b_2BTN, segments_BT):  # type: ignore[no-untyped-def]
    h_2BTN = linear_scan(a_2N, b_2BTN, segments_BT)
    return h_2BTN, (a_2N, h_2BTN, segments_BT)


def _linear_scan_bwd(saved, dh_2BTN):  # type: ignore[no-untyped-def]
    """Compute the gradients, by the same recurrence with the conjugate, from the last token to the first."""
    a_2N, h_2BTN, segments_BT = saved
    continues_BT = continues(segments_BT)
    conjugate_2N = jnp.stack([a_2N[0], -a_2N[1]])
    db_2BTN = _recurrence(conjugate_2N, dh_2BTN, jnp.pad(continues_BT[:, 1:], ((0, 0), (0, 1))), backwards=True)
    shifted_2BTN = jnp.pad(h_2BTN[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    before_2BTN = jnp.where(continues_BT[None, ..., None], shifted_2BTN, 0)
    da_2N = complex_product(jnp.stack([before_2BTN[0], -before_2BTN[1]]), db_2BTN).sum((1, 2))
    return da_2N, db_2BTN, None


linear_scan.defvjp(_linear_scan_fwd, _linear_scan_bwd)


def _recurrence(a_2N: Array, b_2BTN: Array, continues_BT: Array, *, backwards: bool) -> Array:
    """Compute h = (a h if the token continues, else 0) + b along T, or from the last token to the first."""
    in_xla, in_kernel = (functools.partial(f, backwards=backwards) for f in (associative_recurrence, gpu_recurrence))
    with jax.named_scope("linear_scan"):
        return on_platform(a_2N, b_2BTN, continues_BT, default=in_xla, cuda=in_kernel, fits=fits_gpu_kernel(b_2BTN.shape))


def associative_recurrence(a_2N: Array, b_2BTN: Array, continues_BT: Array, *, backwards: bool) -> Array:
    """Use XLA's associative scan: log T rounds over all tokens. The multiplier is 0 at the start of a document."""
    a_2BTN = jnp.where(continues_BT[None, ..., None], a_2N[:, None, None], 0)

    def combine(first: tuple[Array, Array], then: tuple[Array, Array]) -> tuple[Array, Array]:
        return complex_product(then[0], first[0]), complex_product(then[0], first[1]) + then[1]

    return lax.associative_scan(combine, (a_2BTN, b_2BTN), axis=2, reverse=backwards)[1]


def fits_gpu_kernel(shape: tuple[int, ...]) -> bool:
    """Return whether a [2, B, T, N] array divides into whole blocks."""
    return shape[2] % _BLOCK_TOKENS == 0 and shape[3] % _BLOCK_UNITS == 0


def gpu_recurrence(
    a_2N: Array, b_2BTN: Array, continues_BT: Array, *, backwards: bool, interpret: bool = False,
    units: int = _BLOCK_UNITS, tokens: int = _BLOCK_TOKENS,
) -> Array:  # fmt: skip
    """Use one Pallas kernel, which reads and writes every number once.

    A thread walks along a row with the state of its unit in registers, and prefetches the next tokens.
    """
    _, B, T, N = b_2BTN.shape

    def kernel(a_ref: Any, b_ref: Any, continues_ref: Any, h_ref: Any) -> None:
        row, lanes = pl.program_id(0), pl.ds(pl.program_id(1) * units, units)
        a_real, a_imaginary = a_ref[0, lanes], a_ref[1, lanes]

        def body(n: Array, h: tuple[Array, Array]) -> tuple[Array, Array]:
            first = T - (n + 1) * tokens if backwards else n * tokens
            at = [first + k for k in (reversed(range(tokens)) if backwards else range(tokens))]
            loaded = [(b_ref[0, row, t, lanes], b_ref[1, row, t, lanes], continues_ref[row, t] != 0) for t in at]
            real, imaginary = h
            for t, (b_real, b_imaginary, on) in zip(at, loaded, strict=True):
                real, imaginary = (
                    jnp.where(on, a_real * real - a_imaginary * imaginary, 0.0) + b_real,
                    jnp.where(on, a_real * imaginary + a_imaginary * real, 0.0) + b_imaginary,
                )
                h_ref[0, row, t, lanes] = real
                h_ref[1, row, t, lanes] = imaginary
            return real, imaginary

        zeros = jnp.zeros(units, b_ref.dtype)
        lax.fori_loop(0, T // tokens, body, (zeros, zeros))

    args, outs = (a_2N, b_2BTN, continues_BT.astype(jnp.int32)), [(b_2BTN.shape, b_2BTN.dtype)]
    warps = max(units // 32, 1)
    (h_2BTN,) = run_kernel("linear_scan", kernel, args, outs, grid=(B, N // units), warps=warps, interpret=interpret)
    return h_2BTN


def tanh_step(
    weight_2N: Float[Array, "2 N"],
    leak_N: Float[Array, "N"],
    h_2BN: Float[Array, "2 B N"],
    b_2BN: Float[Array, "2 B N"],
    ring: int,
) -> Float[Array, "2 B N"]:
    """Return h_t[n] = (1 - leak) h_{t-1}[n] + leak tanh(weight[n] h_{t-1}[n - 1] + b_t[n]), n - 1 along each ring.

    A ring is a permutation times its weights. With |weight| = radius everywhere, that is its spectral radius and its
    norm.
    """
    by_ring = h_2BN.reshape(*h_2BN.shape[:-1], -1, ring)
    neighbor_2BN = jnp.roll(by_ring, 1, axis=-1).reshape(h_2BN.shape)
    leak_11N = leak_N[None, None]
    return (1 - leak_11N) * h_2BN + leak_11N * jnp.tanh(weight_2N[:, None] * neighbor_2BN + b_2BN)


def tanh_scan(
    weight_2N: Float[Array, "2 N"],
    leak_N: Float[Array, "N"],
    b_2BTN: Float[Array, "2 B T N"],
    segments_BT: Int[Array, "B T"],
    ring: int,
    chunk: int = CHUNK,
) -> Float[Array, "2 B T N"]:
    """Return the states after every token, computed one token after the other."""
    _, B, T, N = b_2BTN.shape
    missing = -T % chunk

    def in_chunks(x: Array, axis: int) -> Array:
        padded = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
        return jnp.moveaxis(padded, axis, 0).reshape(-1, chunk, *(s for a, s in enumerate(x.shape) if a != axis))

    def step(h_2BN: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        b_2BN, continues_B = inputs
        h_2BN = tanh_step(weight_2N, leak_N, jnp.where(continues_B[None, :, None], h_2BN, 0.0), b_2BN, ring)
        return h_2BN, h_2BN

    @jax.checkpoint
    def scan_chunk(h_2BN: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return lax.scan(step, h_2BN, inputs)

    with jax.named_scope("tanh_scan"):
        chunks = (in_chunks(b_2BTN, 2), in_chunks(continues(segments_BT), 1))
        _, h_C = lax.scan(scan_chunk, jnp.zeros((2, B, N), b_2BTN.dtype), chunks)
    return jnp.moveaxis(h_C.reshape(-1, 2, B, N)[:T], 0, 2)
