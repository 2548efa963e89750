"""Residual streams (mHC): the maps of a token, and the passes that read and write its R streams.

The streams are R separate arrays [B, T, D], never one [B, T, R, D]: mixing them is then elementwise and fuses into one
pass that reads each stream once. A token's coefficients are one float32 row of `maps_BTM`: R of pre, R of post, R x R
of res by rows. Sums are accumulated in float32. `model/residual.py` combines these passes. The references at the end
are for tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from nash_mhc.ops.arithmetic import add_up, widen
from nash_mhc.ops.doubly_stochastic import Matrix, Vector, from_logits, logits_gradient, sinkhorn_reference
from nash_mhc.ops.kernels import residual_streams_gpu as gpu
from nash_mhc.ops.platform import on_platform

Streams = tuple[Float[Array, "B T D"], ...]

# Without a barrier, XLA would save the float32 sums instead of the rounded result, twice the bytes.
_materialize = lax.optimization_barrier


def _over_width(a: Array, b: Array) -> Array:
    """Return sum_d a[..., d] b[..., d] in float32."""
    return jnp.sum(widen(a) * widen(b), axis=-1)


def coefficients(maps_BTM: Float[Array, "B T M"]) -> tuple[Vector, Vector, Matrix]:
    """Return (pre, post, res by rows), each coefficient an array [B, T]."""
    return _split([maps_BTM[..., m] for m in range(maps_BTM.shape[-1])])


def _split(columns: Sequence[Array]) -> tuple[Vector, Vector, Matrix]:
    R = math.isqrt(len(columns) + 1) - 1  # M + 1 = (R + 1)^2
    res = columns[2 * R :]
    return tuple(columns[:R]), tuple(columns[R : 2 * R]), tuple(tuple(res[i * R : (i + 1) * R]) for i in range(R))


@jax.custom_vjp
def maps(logits_BTM: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """Return H_pre = sigmoid, H_post = 2 sigmoid, and H_res, doubly stochastic."""
    return _per_token(_maps, logits_BTM)


def maps_backward(maps_BTM: Float[Array, "B T M"], dmaps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """Return the gradient of the logits from the maps and their gradient."""
    return _per_token(_maps_backward, maps_BTM, dmaps_BTM)


def _per_token(numbers: Callable[[Sequence[Array]], list[Array]], *args_BTM: Array) -> Array:
    """Return the array [B, T, M] of `numbers(columns of all args)`."""
    in_xla, in_kernel = (functools.partial(form, numbers) for form in (_maps_in_xla, gpu.maps))
    return on_platform(*args_BTM, default=in_xla, cuda=in_kernel, fits=gpu.fits_maps(args_BTM[0].shape[:-1]))


def _maps(logits: Sequence[Array]) -> list[Array]:
    pre, post, res = _split(logits)
    mixing = [x for row in from_logits(res) for x in row]
    return [*(jax.nn.sigmoid(x) for x in pre), *(2.0 * jax.nn.sigmoid(x) for x in post), *mixing]


def _maps_backward(numbers: Sequence[Array]) -> list[Array]:
    half = len(numbers) // 2
    (pre, post, res), (dpre, dpost, dres) = _split(numbers[:half]), _split(numbers[half:])
    of_pre = [g * p * (1.0 - p) for p, g in zip(pre, dpre, strict=True)]
    of_post = [g * p * (1.0 - 0.5 * p) for p, g in zip(post, dpost, strict=True)]
    return [*of_pre, *of_post, *(g for row in logits_gradient(res, dres) for g in row)]


def _maps_in_xla(numbers: Callable[[Sequence[Array]], list[Array]], *args: Array) -> Array:
    return jnp.stack(numbers([x for a in args for x in jnp.moveaxis(a, -1, 0)]), axis=-1)


maps.defvjp(lambda logits_BTM: (maps(logits_BTM),) * 2, lambda maps_BTM, dmaps_BTM: (maps_backward(maps_BTM, dmaps_BTM),))


def squares(xs: Streams) -> Float[Array, "B T R"]:
    """Return the sum of squares of each stream of a token."""
    return jnp.stack([_over_width(x, x) for x in xs], axis=-1)


def products(xs: Streams, phi_RDM: Float[Array, "R D M"]) -> Float[Array, "B T M"]:
    """Return x @ phi in float32, where x is the concatenation of a token's streams."""
    wide = jnp.promote_types(xs[0].dtype, jnp.float32)
    each = [jnp.einsum("btd,dm->btm", x, phi, preferred_element_type=wide) for x, phi in zip(xs, phi_RDM, strict=True)]
    return add_up(each)


def read(xs: Streams, maps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    """Return sum_r pre[r] * stream r."""
    pre, _, _ = coefficients(maps_BTM)
    return _materialize(add_up([c[..., None] * widen(x) for c, x in zip(pre, xs, strict=True)]).astype(xs[0].dtype))


def fits_norm(x_BTD: Float[Array, "B T D"], devices: int = 1) -> bool:
    """Return whether the GPU kernel of `read_and_norm` supports streams of that shape, split over `devices`."""
    return gpu.fits_norm(x_BTD.shape, devices)


def read_and_norm(
    xs: Streams, maps_BTM: Float[Array, "B T M"], scale_D: Float[Array, "D"], eps: float
) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """Return (RMS norm of `read`, times the scale; 1 / rms), without storing `read`.

    Only worthwhile with the GPU kernel: elsewhere, storing the result of `read` is faster.
    """
    in_xla, in_kernel = (functools.partial(form, eps) for form in (_read_and_norm_in_xla, gpu.read_and_norm))
    return on_platform(xs, maps_BTM, scale_D, default=in_xla, cuda=in_kernel)


def _read_and_norm_in_xla(eps: float, xs: Streams, maps_BTM: Array, scale_D: Array) -> tuple[Array, Array]:
    pre, _, _ = coefficients(maps_BTM)
    read = add_up([c[..., None] * widen(x) for c, x in zip(pre, xs, strict=True)])
    inverse_BT = lax.rsqrt(jnp.mean(read * read, axis=-1) + eps)
    return (read * inverse_BT[..., None] * scale_D[None, None]).astype(xs[0].dtype), inverse_BT


def read_and_norm_backward(
    xs: Streams, maps_BTM: Float[Array, "B T M"], scale_D: Float[Array, "D"], inverse_BT: Float[Array, "B T"],
    dnormed_BTD: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T R"], Float[Array, "1 1 D"]]:  # fmt: skip
    """Return the gradients of the result of `read`, of pre, and of the scale (summed over this device's tokens)."""
    operands = xs, maps_BTM, scale_D, inverse_BT, dnormed_BTD
    return on_platform(*operands, default=_read_and_norm_backward_in_xla, cuda=gpu.read_and_norm_backward)


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


def read_sums(xs: Streams, dx_BTD: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
    """Return the gradient of pre, from that of the result of `read`."""
    return jnp.stack([_over_width(x, dx_BTD) for x in xs], axis=-1)


def write(xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]) -> tuple[Streams, Float[Array, "B T R"]]:
    """Return (new streams, their `squares`). Stream i becomes sum_j res[i][j] * stream j + post[i] * y."""
    operands, fits = (xs, y_BTD, maps_BTM), gpu.fits(y_BTD.shape)
    return _materialize(on_platform(*operands, default=_write_in_xla, cuda=gpu.write, fits=fits))


def _write_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array) -> tuple[Streams, Array]:
    _, post, res = coefficients(maps_BTM)
    y, wide = widen(y_BTD), [widen(x) for x in xs]
    mixed = [add_up([c[..., None] * x for c, x in zip(row, wide, strict=True)]) for row in res]
    outs = _materialize(tuple((m + c[..., None] * y).astype(x.dtype) for m, c, x in zip(mixed, post, xs, strict=True)))
    return outs, squares(outs)


def write_sums(
    xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"], douts: Streams
) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"]]:
    """Return (dy, d maps) from the gradients of the written streams; 0 for pre."""
    operands, fits = (xs, y_BTD, maps_BTM, douts), gpu.fits(y_BTD.shape)
    return on_platform(*operands, default=_write_sums_in_xla, cuda=gpu.write_sums, fits=fits)


def _write_sums_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array, douts: Streams) -> tuple[Array, Array]:
    _, post, _ = coefficients(maps_BTM)
    dy = add_up([c[..., None] * widen(d) for c, d in zip(post, douts, strict=True)]).astype(y_BTD.dtype)
    dres = [_over_width(d, x) for d in douts for x in xs]
    dpost = [_over_width(d, y_BTD) for d in douts]
    return dy, jnp.stack([*(jnp.zeros_like(d) for d in dpost), *dpost, *dres], axis=-1)


def gradient(
    xs: Streams, douts: Streams, dx_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"],
    dproducts_BTM: Float[Array, "B T M"], along_BT: Float[Array, "B T"], phi_RDM: Float[Array, "R D M"],
) -> tuple[Streams, Float[Array, "1 1 R D M"]]:  # fmt: skip
    """Return the gradients of the streams and of phi (summed over this device's tokens).

    They come from the gradients of the written streams, of the read value and of the products. `along` is the
    coefficient of each stream in its own gradient, which comes from the token's norm.
    """
    operands = xs, douts, dx_BTD, maps_BTM, dproducts_BTM, along_BT, phi_RDM
    fits = gpu.fits_gradient(dx_BTD.shape, phi_RDM.shape[-1], dx_BTD.dtype)
    return on_platform(*operands, default=_gradient_in_xla, cuda=gpu.gradient, fits=fits)


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
    """Return the products divided by the rms of all streams of a token."""
    rms_BT = jnp.sqrt(jnp.mean(widen(jnp.stack(xs)) ** 2, axis=(0, -1)) + eps)
    return products_reference(xs, phi_RDM) / rms_BT[..., None]


def maps_reference(logits_BTM: Float[Array, "B T M"], rounds: int) -> Float[Array, "B T M"]:
    """Reference for `maps`: only Sinkhorn iterations, differentiated by JAX."""
    logits_MBT = jnp.moveaxis(logits_BTM, -1, 0)
    R = math.isqrt(len(logits_MBT) + 1) - 1
    mixing_RRBT = sinkhorn_reference(logits_MBT[2 * R :].reshape(R, R, *logits_MBT.shape[1:]), rounds)
    halves = jax.nn.sigmoid(logits_MBT[:R]), 2.0 * jax.nn.sigmoid(logits_MBT[R : 2 * R])
    return jnp.moveaxis(jnp.concatenate([*halves, mixing_RRBT.reshape(-1, *logits_MBT.shape[1:])]), 0, -1)
