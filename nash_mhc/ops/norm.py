"""RMS normalization, alone and followed by rotary position embedding, with explicit gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.arithmetic import widen
from nash_mhc.ops.kernels import norm_gpu
from nash_mhc.ops.platform import on_platform
from nash_mhc.ops.rope import Rotation, cos_and_sin, rope

# A barrier materializes reductions, and results in their own dtype. Fused into later code (a rotation, a transposed
# copy), a GPU recomputed reductions for every element and wrote float32 instead of bfloat16.
_materialize = lax.optimization_barrier


def _inverse_rms(x: Array, eps: float) -> Array:
    return _materialize(lax.rsqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Return x / rms(x) * scale, computed in float32, in the dtype of x."""
    return _rms_norm_fwd(x, scale_D, eps)[0]


def _aligned(scale_D: Array, x: Array) -> Array:
    return scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)


def rms_norm_reference(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Compute `rms_norm` with automatic gradients."""
    rms = jnp.sqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps)
    return (widen(x) / rms * _aligned(scale_D, x)).astype(x.dtype)


def _fits(x: Array) -> bool:
    """Return whether the GPU kernels support x. One device only, as the sharding of x is unknown here."""
    is_one_device = jax.sharding.get_abstract_mesh().size <= 1
    return is_one_device and norm_gpu.fits_width(math.prod(x.shape[:-1]), x.shape[-1])


def _rms_norm_fwd(x, scale_D, eps):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": _norm_in_xla}
    if _fits(x):
        forms["cuda"] = functools.partial(_norm_in_kernel, eps)
    saved = x, scale_D, _inverse_rms(x, eps)  # the kernels compute the rms themselves; XLA then drops this one
    return _materialize(on_platform(*saved, **forms)), saved


def _rms_norm_bwd(eps, saved, dout):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": _norm_backward_in_xla}
    if _fits(dout):
        forms["cuda"] = functools.partial(_norm_backward_in_kernel, eps)
    dx, dscale = on_platform(*saved, dout, **forms)
    return _materialize(dx), dscale  # every residual stream reads dx: compute it once


def _norm_in_xla(x: Array, scale_D: Array, inverse: Array) -> Array:
    return (widen(x) * inverse * _aligned(scale_D, x)).astype(x.dtype)


def _norm_backward_in_xla(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    return _norm_gradients(x, scale_D, inverse, widen(_materialize(dout)))


def _norm_in_kernel(eps: float, x: Array, scale_D: Array, _: Array, *, interpret: bool = False) -> Array:
    return norm_gpu.norm(x.reshape(-1, x.shape[-1]), scale_D, eps, interpret=interpret).reshape(x.shape)


def _norm_backward_in_kernel(
    eps: float, x: Array, scale_D: Array, _: Array, dout: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dx, dscale = norm_gpu.norm_backward(flat(x), scale_D, flat(dout), eps, interpret=interpret)
    return dx.reshape(x.shape), dscale.astype(scale_D.dtype)


def _norm_gradients(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    normed = widen(x) * inverse
    dnormed = dout * _aligned(scale_D, x)
    along = _materialize(jnp.mean(dnormed * normed, axis=-1, keepdims=True))
    dx = ((dnormed - normed * along) * inverse).astype(x.dtype)
    return dx, jnp.sum(dout * normed, axis=tuple(range(x.ndim - 1))).astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def norm_and_rope(
    x_BTNH: Float[Array, "B T N H"], scale_H: Float[Array, "H"], positions_BT: Int[Array, "B T"], eps: float, by: Rotation
) -> Float[Array, "B T N H"]:
    """Return rope(rms_norm(x)): one pass after the reduction, without rounding in between."""
    return norm_and_rope_copies(x_BTNH, scale_H, positions_BT, eps, by, 1)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def norm_and_rope_copies(
    x_BTNH: Float[Array, "B T N H"], scale_H: Float[Array, "H"], positions_BT: Int[Array, "B T"], eps: float, by: Rotation,
    copies: int,
) -> tuple[Float[Array, "B T N H"], ...]:  # fmt: skip
    """Return `norm_and_rope` once for each reader, so that one pass of the backward sums their gradients."""
    return _norm_rope_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies)[0]


def _norm_rope_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": functools.partial(_norm_rope_in_xla, by)}
    if norm_gpu.fits(x_BTNH.shape):
        forms["cuda"] = functools.partial(_norm_rope_in_kernel, eps, by)
    saved = x_BTNH, scale_H, positions_BT, _inverse_rms(x_BTNH, eps)
    return (_materialize(on_platform(*saved, **forms)),) * copies, saved


def _norm_rope_bwd(eps, by, copies, saved, douts):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": functools.partial(_norm_rope_backward_in_xla, by)}
    if norm_gpu.fits(saved[0].shape):
        forms["cuda"] = functools.partial(_norm_rope_backward_in_kernel, eps, by)
    return *on_platform(*saved, *douts, **forms), None


def _norm_rope_in_xla(by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array) -> Array:
    normed = widen(x_BTNH) * inverse_BTN1 * _aligned(scale_H, x_BTNH)
    return rope(normed, positions_BT, by).astype(x_BTNH.dtype)


def _norm_rope_backward_in_xla(
    by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array, *douts_BTNH: Array
) -> tuple[Array, Array]:
    # The transpose of a rotation is the inverse rotation, with the same amplitude.
    dout_BTNH = functools.reduce(jnp.add, map(widen, _materialize(douts_BTNH)))
    dnormed_BTNH = rope(dout_BTNH, -positions_BT, by)
    return _norm_gradients(x_BTNH, scale_H, inverse_BTN1, dnormed_BTNH)


def _for_kernel(x_BTNH: Array, scale_H: Array, positions_BT: Array, by: Rotation) -> tuple[Array, Array, Array, Array]:
    """Return x and scale with each head in two halves, and the cosines and sines of each token, shared by all heads."""
    B, T, N, H = x_BTNH.shape
    cos, sin = (each.reshape(B * T, H // 2) for each in cos_and_sin(positions_BT, H, by))
    return x_BTNH.reshape(B * T, N, 2, H // 2), scale_H.reshape(2, H // 2), cos, sin


def _norm_rope_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *, interpret: bool = False
) -> Array:
    args = _for_kernel(x_BTNH, scale_H, positions_BT, by)
    return norm_gpu.norm_rope(*args, eps, interpret=interpret).reshape(x_BTNH.shape)


def _norm_rope_backward_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *douts_BTNH: Array,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    args = _for_kernel(x_BTNH, scale_H, positions_BT, by)
    douts = [dout_BTNH.reshape(args[0].shape) for dout_BTNH in douts_BTNH]
    dx, dscale = norm_gpu.norm_rope_backward(*args, douts, eps, interpret=interpret)
    return dx.reshape(x_BTNH.shape), dscale.reshape(scale_H.shape).astype(scale_H.dtype)


norm_and_rope_copies.defvjp(_norm_rope_fwd, _norm_rope_bwd)
