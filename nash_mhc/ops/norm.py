"""RMS normalisation, alone and followed by a rotation to positions, with gradients written out."""

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
from nash_mhc.ops.rope import Rotation, rope, turns

# The reductions are kept as values of their own, and results in their own dtype: fused into what comes after (a
# rotation, a transposed copy), a GPU computed them again for every element,
# and wrote float32 where half of it was asked for.
_kept = lax.optimization_barrier


def _inverse_rms(x: Array, eps: float) -> Array:
    return _kept(lax.rsqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) * scale, in float32, back in x's dtype."""
    return _fwd(x, scale_D, eps)[0]


def _aligned(scale_D: Array, x: Array) -> Array:
    return scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)


def rms_norm_reference(x: Float[Array, "... D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """The same in one line, with ordinary gradients."""
    rms = jnp.sqrt(jnp.mean(widen(x) ** 2, axis=-1, keepdims=True) + eps)
    return (widen(x) / rms * _aligned(scale_D, x)).astype(x.dtype)


def _fits(x: Array) -> bool:
    """Whether a GPU's kernels take it: on one device, since nobody says here how x would be split."""
    alone = jax.sharding.get_abstract_mesh().size <= 1
    return alone and norm_gpu.fits_width(math.prod(x.shape[:-1]), x.shape[-1])


def _fwd(x, scale_D, eps):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": _normed_in_xla} | (
        {"cuda": functools.partial(_normed_in_kernel, eps)} if _fits(x) else {}
    )
    saved = x, scale_D, _inverse_rms(x, eps)  # which the kernels compute by themselves: for them, nobody does here
    return _kept(on_platform(*saved, **forms)), saved


def _bwd(eps, saved, dout):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": _normed_back_in_xla}
    if _fits(dout):
        forms["cuda"] = functools.partial(_normed_back_in_kernel, eps)
    dx, dscale = on_platform(*saved, dout, **forms)
    return _kept(dx), dscale  # each residual stream takes its share of it: computed once


def _normed_in_xla(x: Array, scale_D: Array, inverse: Array) -> Array:
    return (widen(x) * inverse * _aligned(scale_D, x)).astype(x.dtype)


def _normed_back_in_xla(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    return _norm_gradients(x, scale_D, inverse, widen(_kept(dout)))


def _normed_in_kernel(eps: float, x: Array, scale_D: Array, _: Array, *, interpret: bool = False) -> Array:
    return norm_gpu.normed(x.reshape(-1, x.shape[-1]), scale_D, eps, interpret=interpret).reshape(x.shape)


def _normed_back_in_kernel(
    eps: float, x: Array, scale_D: Array, _: Array, dout: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dx, dscale = norm_gpu.normed_back(flat(x), scale_D, flat(dout), eps, interpret=interpret)
    return dx.reshape(x.shape), dscale.astype(scale_D.dtype)


def _norm_gradients(x: Array, scale_D: Array, inverse: Array, dout: Array) -> tuple[Array, Array]:
    normed = widen(x) * inverse
    dnormed = dout * _aligned(scale_D, x)
    along = _kept(jnp.mean(dnormed * normed, axis=-1, keepdims=True))
    dx = ((dnormed - normed * along) * inverse).astype(x.dtype)
    return dx, jnp.sum(dout * normed, axis=tuple(range(x.ndim - 1))).astype(scale_D.dtype)


rms_norm.defvjp(_fwd, _bwd)


def norm_and_rope(
    x_BTNH: Float[Array, "B T N H"], scale_H: Float[Array, "H"], positions_BT: Int[Array, "B T"], eps: float, by: Rotation
) -> Float[Array, "B T N H"]:
    """rope(rms_norm(x)): one pass after the reduction, and nothing rounded in between."""
    return norm_and_rope_copies(x_BTNH, scale_H, positions_BT, eps, by, 1)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def norm_and_rope_copies(
    x_BTNH: Float[Array, "B T N H"], scale_H: Float[Array, "H"], positions_BT: Int[Array, "B T"], eps: float, by: Rotation,
    copies: int,
) -> tuple[Float[Array, "B T N H"], ...]:  # fmt: skip
    """The same, once for each that reads it: the pass that takes it back adds their gradients up."""
    return _turn_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies)[0]


def _turn_fwd(x_BTNH, scale_H, positions_BT, eps, by, copies):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": functools.partial(_turned_in_xla, by)}
    if norm_gpu.fits(x_BTNH.shape):
        forms["cuda"] = functools.partial(_turned_in_kernel, eps, by)
    # The kernels compute the root by themselves: for them, nobody computes it here.
    saved = x_BTNH, scale_H, positions_BT, _inverse_rms(x_BTNH, eps)
    return (_kept(on_platform(*saved, **forms)),) * copies, saved


def _turn_bwd(eps, by, copies, saved, douts):  # type: ignore[no-untyped-def]
    forms: dict[str, Any] = {"default": functools.partial(_turned_back_in_xla, by)}
    if norm_gpu.fits(saved[0].shape):
        forms["cuda"] = functools.partial(_turned_back_in_kernel, eps, by)
    return *on_platform(*saved, *douts, **forms), None


def _turned_in_xla(by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array) -> Array:
    normed = widen(x_BTNH) * inverse_BTN1 * _aligned(scale_H, x_BTNH)
    return rope(normed, positions_BT, by).astype(x_BTNH.dtype)


def _turned_back_in_xla(
    by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, inverse_BTN1: Array, *douts_BTNH: Array
) -> tuple[Array, Array]:
    # A rotation's transpose turns back, with the same amplitude.
    dout_BTNH = functools.reduce(jnp.add, map(widen, _kept(douts_BTNH)))
    straight = rope(dout_BTNH, -positions_BT, by)
    return _norm_gradients(x_BTNH, scale_H, inverse_BTN1, straight)


def _for_kernel(x_BTNH: Array, scale_H: Array, positions_BT: Array, by: Rotation) -> tuple[Array, Array, Array, Array]:
    """A head as two halves, whose numbers make pairs, and cosines and sines of all tokens: written down once, not
    computed for every head."""
    B, T, N, H = x_BTNH.shape
    cos, sin = (each.reshape(B * T, H // 2) for each in turns(positions_BT, H, by))
    return x_BTNH.reshape(B * T, N, 2, H // 2), scale_H.reshape(2, H // 2), cos, sin


def _turned_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *, interpret: bool = False
) -> Array:
    return norm_gpu.turned(*_for_kernel(x_BTNH, scale_H, positions_BT, by), eps, interpret=interpret).reshape(x_BTNH.shape)


def _turned_back_in_kernel(
    eps: float, by: Rotation, x_BTNH: Array, scale_H: Array, positions_BT: Array, _: Array, *douts_BTNH: Array,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    given = _for_kernel(x_BTNH, scale_H, positions_BT, by)
    douts = [dout_BTNH.reshape(given[0].shape) for dout_BTNH in douts_BTNH]
    dx, dscale = norm_gpu.turned_back(*given, douts, eps, interpret=interpret)
    return dx.reshape(x_BTNH.shape), dscale.reshape(scale_H.shape).astype(scale_H.dtype)


norm_and_rope_copies.defvjp(_turn_fwd, _turn_bwd)
