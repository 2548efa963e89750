"""A short causal depthwise convolution along time, within a document."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nash_mhc.ops.kernels import conv_gpu
from nash_mhc.ops.platform import on_platform


def short_conv_reference(
    x_BTD: Float[Array, "B T D"], taps_JD: Float[Array, "J D"], segments_BT: Int[Array, "B T"] | None = None
) -> Float[Array, "B T D"]:
    """Return y[t] = sum_j taps[j] x[t - j] over the tokens t - j of the same document."""
    mixed = taps_JD[0][None, None] * x_BTD.astype(jnp.float32)
    for j in range(1, taps_JD.shape[0]):
        mixed += taps_JD[j][None, None] * _within_document(_later(x_BTD, j), j, segments_BT).astype(jnp.float32)
    return mixed.astype(x_BTD.dtype)


def _later(x: Array, j: int) -> Array:
    """Shift tokens: token t gets the value of token t - j."""
    T = x.shape[1]
    return jnp.pad(x[:, : max(T - j, 0)], ((0, 0), (min(j, T), 0), (0, 0)))


def _earlier(x: Array, j: int) -> Array:
    return jnp.pad(x[:, j:], ((0, 0), (0, min(j, x.shape[1])), (0, 0)))


def _within_document(x_BTD: Array, j: int, segments_BT: Array | None) -> Array:
    """Zero the tokens t for which token t - j is not in the same document."""
    if segments_BT is None:
        return x_BTD
    same_BT = segments_BT == jnp.where(jnp.arange(segments_BT.shape[1])[None] >= j, jnp.roll(segments_BT, j, axis=1), -1)
    return x_BTD * same_BT[..., None].astype(x_BTD.dtype)


@jax.custom_vjp
def short_conv(
    x_BTD: Float[Array, "B T D"], taps_JD: Float[Array, "J D"], segments_BT: Int[Array, "B T"] | None = None
) -> Float[Array, "B T D"]:
    """Compute `short_conv_reference` in one pass over x, with x as the only residual."""
    forms: dict[str, Any] = {"default": short_conv_reference}
    if conv_gpu.fits(x_BTD.shape):
        forms["cuda"] = _conv_in_kernel
    return on_platform(x_BTD, taps_JD, segments_BT, **forms)


def _forward(x_BTD, taps_JD, segments_BT):  # type: ignore[no-untyped-def]
    return short_conv(x_BTD, taps_JD, segments_BT), (x_BTD, taps_JD, segments_BT)


def _backward(saved, dy_BTD):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": _backward_in_xla}
    if conv_gpu.fits(dy_BTD.shape):
        forms["cuda"] = _backward_in_kernel
    return *on_platform(*saved, dy_BTD, **forms), None


def _backward_in_xla(x_BTD: Array, taps_JD: Array, segments_BT: Array | None, dy_BTD: Array) -> tuple[Array, Array]:
    wide = lambda a: a.astype(jnp.float32)
    dx, dtaps = taps_JD[0][None, None] * wide(dy_BTD), [jnp.sum(wide(dy_BTD) * wide(x_BTD), axis=(0, 1))]
    for j in range(1, taps_JD.shape[0]):
        dtap = _within_document(dy_BTD, j, segments_BT)
        dx += taps_JD[j][None, None] * wide(_earlier(dtap, j))
        dtaps.append(jnp.sum(wide(dtap) * wide(_later(x_BTD, j)), axis=(0, 1)))
    return dx.astype(x_BTD.dtype), jnp.stack(dtaps).astype(taps_JD.dtype)


def _same(shape: tuple[int, ...], J: int, segments_BT: Array | None) -> Int[Array, "X"]:
    """Return a bit mask per token, all sequences in one axis. Bit j: token t - j is in the document of token t."""
    segments_BT = jnp.ones(shape[:2], jnp.int32) if segments_BT is None else segments_BT
    is_same = lambda j: (jnp.arange(shape[1]) >= j)[None] & (segments_BT == jnp.roll(segments_BT, j, axis=1))
    return functools.reduce(jnp.bitwise_or, (is_same(j).astype(jnp.int32) << j for j in range(J))).reshape(-1)


def _flat(x_BTD: Array) -> Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _conv_in_kernel(x_BTD: Array, taps_JD: Array, segments_BT: Array | None, *, interpret: bool = False) -> Array:
    same = _same(x_BTD.shape, taps_JD.shape[0], segments_BT)
    return conv_gpu.conv(_flat(x_BTD), taps_JD, same, interpret=interpret).reshape(x_BTD.shape)


def _backward_in_kernel(
    x_BTD: Array, taps_JD: Array, segments_BT: Array | None, dy_BTD: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    same = _same(x_BTD.shape, taps_JD.shape[0], segments_BT)
    dx, dtaps = conv_gpu.conv_backward(_flat(x_BTD), taps_JD, same, _flat(dy_BTD), interpret=interpret)
    return dx.reshape(x_BTD.shape), dtaps.astype(taps_JD.dtype)


short_conv.defvjp(_forward, _backward)
