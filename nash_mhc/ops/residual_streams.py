"""Residual streams: R copies of the stream, read through one set of weights and written back through two others.

A token's streams are R separate arrays [B, T, D], never one [B, T, R, D]: mixing them is then elementwise, which
compilers fuse into one pass that reads each stream once. `stream_maps.py` says what a token's coefficients are. Sums
are formed in float32 whatever the streams' dtype. These are single passes over the streams, there and back;
`model/residual.py` puts them together, and the plain forms at the end are what the tests compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import add_up, widen
from nash_mhc.ops.kernels import residual_streams_gpu
from nash_mhc.ops.platform import on_platform
from nash_mhc.ops.stream_maps import coefficients

Streams = tuple[Float[Array, "B T D"], ...]

# Written down in its own dtype and read again: otherwise a compiler keeps the float32 sums instead, twice the bytes.
_kept = lax.optimization_barrier


def _over_width(a: Array, b: Array) -> Array:
    """sum_d a[..., d] b[..., d], in float32."""
    return jnp.sum(widen(a) * widen(b), axis=-1)


def _flat(arrays: Sequence[Array]) -> list[Array]:
    """Batch and time in one axis."""
    return [a.reshape(-1, a.shape[-1]) for a in arrays]


def squares(xs: Streams) -> Float[Array, "B T R"]:
    """The sum of squares of each stream of a token."""
    return jnp.stack([_over_width(x, x) for x in xs], axis=-1)


def products(xs: Streams, phi_RDM: Float[Array, "R D M"]) -> Float[Array, "B T M"]:
    """x @ phi, where x is all streams of a token in one vector, in float32."""
    wide = jnp.promote_types(xs[0].dtype, jnp.float32)
    each = [jnp.einsum("btd,dm->btm", x, phi, preferred_element_type=wide) for x, phi in zip(xs, phi_RDM, strict=True)]
    return add_up(each)


def read(xs: Streams, maps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    """sum_r pre[r] * stream r."""
    pre, _, _ = coefficients(maps_BTM)
    return _kept(add_up([c[..., None] * widen(x) for c, x in zip(pre, xs, strict=True)]).astype(xs[0].dtype))


def fits_norm(x_BTD: Float[Array, "B T D"], devices: int = 1) -> bool:
    """Whether streams of that shape, split over so many, can go through a GPU's `read_and_norm`."""
    return residual_streams_gpu.fits_norm(x_BTD.shape, devices)


def read_and_norm(
    xs: Streams, maps_BTM: Float[Array, "B T M"], scale_D: Float[Array, "D"], eps: float
) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """(what is read, over the root of its mean square, times the scale; 1 over that root). Its kernel is worth it where
    there is one: elsewhere, what is read had better be written down."""
    forms = {"default": functools.partial(_read_and_norm_in_xla, eps), "cuda": functools.partial(_read_and_norm_in_kernel, eps)}
    return on_platform(xs, maps_BTM, scale_D, **forms)


def _read_and_norm_in_xla(eps: float, xs: Streams, maps_BTM: Array, scale_D: Array) -> tuple[Array, Array]:
    pre, _, _ = coefficients(maps_BTM)
    read = add_up([c[..., None] * widen(x) for c, x in zip(pre, xs, strict=True)])
    inverse_BT = lax.rsqrt(jnp.mean(read * read, axis=-1) + eps)
    return (read * inverse_BT[..., None] * scale_D[None, None]).astype(xs[0].dtype), inverse_BT


def _read_and_norm_in_kernel(
    eps: float, xs: Streams, maps_BTM: Array, scale_D: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    *flat_xs, maps = _flat([*xs, maps_BTM])
    normed, inverse = residual_streams_gpu.read_and_norm(flat_xs, maps, scale_D, eps, interpret=interpret)
    return normed.reshape(xs[0].shape), inverse.reshape(xs[0].shape[:2])


def read_and_norm_backward(
    xs: Streams, maps_BTM: Float[Array, "B T M"], scale_D: Float[Array, "D"], inverse_BT: Float[Array, "B T"],
    dnormed_BTD: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R"], Float[Array, "1 1 D"]]:  # fmt: skip
    """Gradients (of what was read, of pre, of the scale for all tokens here)."""
    forms = {"default": _read_and_norm_backward_in_xla, "cuda": _read_and_norm_backward_in_kernel}
    return on_platform(xs, maps_BTM, scale_D, inverse_BT, dnormed_BTD, **forms)


def _read_and_norm_backward_in_xla(
    xs: Streams, maps_BTM: Array, scale_D: Array, inverse_BT: Array, dnormed_BTD: Array
) -> tuple[Array, Array, Array]:
    pre, _, _ = coefficients(maps_BTM)
    inverse = inverse_BT[..., None]
    normed = add_up([c[..., None] * widen(x) for c, x in zip(pre, xs, strict=True)]) * inverse
    d = widen(dnormed_BTD)
    dscale, d = jnp.sum(d * normed, axis=(0, 1)), d * scale_D[None, None]
    dx = (d - normed * jnp.mean(d * normed, axis=-1, keepdims=True)) * inverse
    return dx.astype(dnormed_BTD.dtype), read_sums(xs, dx), dscale[None, None]


def _read_and_norm_backward_in_kernel(
    xs: Streams, maps_BTM: Array, scale_D: Array, inverse_BT: Array, dnormed_BTD: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    *flat_xs, maps, dnormed = _flat([*xs, maps_BTM, dnormed_BTD])
    dx, dpre, dscale = residual_streams_gpu.read_and_norm_backward(
        flat_xs, maps, scale_D, inverse_BT.reshape(-1, 1), dnormed, interpret=interpret
    )
    return dx.reshape(xs[0].shape), dpre.reshape(*xs[0].shape[:2], len(xs)), dscale[None, None]


def read_sums(xs: Streams, dx_BTD: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
    """The gradient of pre, from that of what was read."""
    return jnp.stack([_over_width(x, dx_BTD) for x in xs], axis=-1)


def write(xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]) -> tuple[Streams, Float[Array, "B T R"]]:
    """(stream i becomes sum_j res[i][j] * stream j + post[i] * y; the `squares` of the new streams)."""
    forms: dict[str, Any] = {"default": _write_in_xla}
    if residual_streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_in_kernel
    return _kept(on_platform(xs, y_BTD, maps_BTM, **forms))


def _write_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array) -> tuple[Streams, Array]:
    _, post, res = coefficients(maps_BTM)
    y, wide = widen(y_BTD), [widen(x) for x in xs]
    mixed = [add_up([c[..., None] * x for c, x in zip(row, wide, strict=True)]) for row in res]
    outs = _kept(tuple((m + c[..., None] * y).astype(x.dtype) for m, c, x in zip(mixed, post, xs, strict=True)))
    return outs, squares(outs)


def _write_in_kernel(xs: Streams, y_BTD: Array, maps_BTM: Array, *, interpret: bool = False) -> tuple[Streams, Array]:
    *flat_xs, y, maps = _flat([*xs, y_BTD, maps_BTM])
    outs, sums = residual_streams_gpu.write(flat_xs, y, maps, interpret=interpret)
    return tuple(out.reshape(y_BTD.shape) for out in outs), sums.reshape(*y_BTD.shape[:2], len(xs))


def write_sums(
    xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"], douts: Streams
) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"]]:
    """(dy, d maps) from the gradients of what was written; 0 for pre, which had no part in it."""
    forms: dict[str, Any] = {"default": _write_sums_in_xla}
    if residual_streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_sums_in_kernel
    return on_platform(xs, y_BTD, maps_BTM, douts, **forms)


def _write_sums_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array, douts: Streams) -> tuple[Array, Array]:
    _, post, _ = coefficients(maps_BTM)
    dy = add_up([c[..., None] * widen(d) for c, d in zip(post, douts, strict=True)]).astype(y_BTD.dtype)
    dres = [_over_width(d, x) for d in douts for x in xs]
    dpost = [_over_width(d, y_BTD) for d in douts]
    return dy, jnp.stack([*(jnp.zeros_like(d) for d in dpost), *dpost, *dres], axis=-1)


def _write_sums_in_kernel(
    xs: Streams, y_BTD: Array, maps_BTM: Array, douts: Streams, *, interpret: bool = False
) -> tuple[Array, Array]:
    *flat_xs, y, maps = _flat([*xs, y_BTD, maps_BTM])
    dy, dmaps = residual_streams_gpu.write_backward(flat_xs, y, maps, _flat(douts), interpret=interpret)
    return dy.reshape(y_BTD.shape), dmaps.reshape(maps_BTM.shape)


def gradient(
    xs: Streams, douts: Streams, dx_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"],
    dproducts_BTM: Float[Array, "B T M"], along_BT: Float[Array, "B T"], phi_RDM: Float[Array, "R D M"],
) -> tuple[Streams, Float[Array, "1 1 R D M"]]:  # fmt: skip
    """(of the streams, of phi for all tokens here), from the gradients of what was written, read and projected.

    `along` is how much of each stream its own gradient contains: what came through the norm of the token.
    """
    forms: dict[str, Any] = {"default": _gradient_in_xla}
    if residual_streams_gpu.fits_gradient(dx_BTD.shape, phi_RDM.shape[-1], dx_BTD.dtype):
        forms["cuda"] = _gradient_in_kernel
    return on_platform(xs, douts, dx_BTD, maps_BTM, dproducts_BTM, along_BT, phi_RDM, **forms)


def _gradient_in_xla(xs, douts, dx_BTD, maps_BTM, dproducts_BTM, along_BT, phi_RDM):  # type: ignore[no-untyped-def]
    pre, _, res = coefficients(maps_BTM)
    wide, dx = [widen(d) for d in douts], widen(dx_BTD)
    dxs = []
    for j, x in enumerate(xs):
        mixed = add_up([res[i][j][..., None] * d for i, d in enumerate(wide)]) + pre[j][..., None] * dx
        projected = widen(jnp.einsum("btm,dm->btd", dproducts_BTM, phi_RDM[j]))
        dxs.append((mixed + projected + along_BT[..., None] * widen(x)).astype(x.dtype))
    sums = jnp.promote_types(phi_RDM.dtype, jnp.float32)
    dphi = [jnp.einsum("btd,btm->dm", x, dproducts_BTM, preferred_element_type=sums) for x in xs]
    return tuple(dxs), jnp.stack(dphi)[None, None]


def _gradient_in_kernel(xs, douts, dx_BTD, maps_BTM, dproducts_BTM, along_BT, phi_RDM, *, interpret=False):  # type: ignore[no-untyped-def]
    dx, maps, dproducts = _flat([dx_BTD, maps_BTM, dproducts_BTM])
    dxs, dphi = residual_streams_gpu.gradient(
        _flat(xs), _flat(douts), dx, maps, dproducts, along_BT.reshape(-1), phi_RDM, interpret=interpret
    )
    return tuple(d.reshape(dx_BTD.shape) for d in dxs), dphi[None, None]


def read_reference(xs: Streams, maps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    pre_BTR = maps_BTM[..., : len(xs)]
    return jnp.einsum("btr,rbtd->btd", pre_BTR, widen(jnp.stack(xs))).astype(xs[0].dtype)


def write_reference(xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]) -> Streams:
    R = len(xs)
    post_BTR, res_BTRR = maps_BTM[..., R : 2 * R], maps_BTM[..., 2 * R :].reshape(*maps_BTM.shape[:2], R, R)
    mixed_RBTD = jnp.einsum("btij,jbtd->ibtd", res_BTRR, widen(jnp.stack(xs)))
    return tuple((mixed_RBTD + jnp.einsum("bti,btd->ibtd", post_BTR, widen(y_BTD))).astype(xs[0].dtype))


def products_reference(xs: Streams, phi_RDM: Float[Array, "R D M"]) -> Float[Array, "B T M"]:
    return jnp.einsum("rbtd,rdm->btm", widen(jnp.stack(xs)), widen(phi_RDM))


def project_reference(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "B T M"]:
    """Products over the root of the mean square of all streams of a token."""
    rms_BT = jnp.sqrt(jnp.mean(widen(jnp.stack(xs)) ** 2, axis=(0, -1)) + eps)
    return products_reference(xs, phi_RDM) / rms_BT[..., None]
