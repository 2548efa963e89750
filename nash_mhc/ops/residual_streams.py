"""Residual streams: R copies of the stream, read through one set of weights and written back through two others.

A token's streams are R separate arrays [B, T, D], never one [B, T, R, D]: mixing them is then elementwise, which
compilers fuse into one pass that reads each stream once. A token's coefficients are one row of `maps_BTM`, float32: R
of pre, R of post, R x R of res, row by row. Sums are formed in float32 whatever the streams' dtype. Each function has
its gradient written out, so that nothing wider than the streams themselves is ever kept;
the plain forms at the end are what the tests compare with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nash_mhc.ops import residual_streams_gpu, sinkhorn_gpu
from nash_mhc.ops.platform import on_platform
from nash_mhc.ops.sinkhorn import Matrix, Vector, balance, sinkhorn, sinkhorn_reference, sum_over
from nash_mhc.ops.sinkhorn_gpu import balanced, iterate, reverse

Streams = tuple[Float[Array, "B T D"], ...]


COEFFICIENTS = "stream_coefficients"  # checkpoint name of what is small and costly: a few numbers a token, a whole pass to get

# Written down in its own dtype and read again: otherwise a compiler keeps the float32 sums instead, twice the bytes.
_kept = lax.optimization_barrier


def _sum(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _wide(x: Array) -> Array:
    """float32 for the arithmetic (float64 stays)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _over_width(a: Array, b: Array) -> Array:
    """sum_d a[..., d] b[..., d], in float32."""
    return jnp.sum(_wide(a) * _wide(b), axis=-1)


def coefficients(maps_BTM: Float[Array, "B T M"]) -> tuple[Vector, Vector, Matrix]:
    """(pre, post, res by rows), each coefficient an array [B, T]."""
    return _split([maps_BTM[..., m] for m in range(maps_BTM.shape[-1])])


def _split(each: Sequence[Array]) -> tuple[Vector, Vector, Matrix]:
    """M arrays -> those of pre, of post, and of res by rows."""
    R = math.isqrt(len(each) + 1) - 1  # M + 1 = (R + 1)^2
    res = each[2 * R :]
    return tuple(each[:R]), tuple(each[R : 2 * R]), tuple(tuple(res[i * R : (i + 1) * R]) for i in range(R))


def squares(xs: Streams) -> Float[Array, "B T R"]:
    """The sum of squares of each stream of a token."""
    return jnp.stack([_over_width(x, x) for x in xs], axis=-1)


@jax.custom_vjp
def read(xs: Streams, maps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    """sum_r pre[r] * stream r."""
    pre, _, _ = coefficients(maps_BTM)
    return _kept(_sum([c[..., None] * _wide(x) for c, x in zip(pre, xs, strict=True)]).astype(xs[0].dtype))


def _read_fwd(xs, maps_BTM):  # type: ignore[no-untyped-def]
    return read(xs, maps_BTM), (xs, maps_BTM)


def _read_bwd(saved, dout):  # type: ignore[no-untyped-def]
    xs, maps_BTM = saved
    pre, _, _ = coefficients(maps_BTM)
    dxs = tuple((c[..., None] * _wide(dout)).astype(x.dtype) for c, x in zip(pre, xs, strict=True))
    dpre_BTR = jnp.stack([_over_width(x, dout) for x in xs], axis=-1)
    return dxs, jnp.pad(dpre_BTR, ((0, 0), (0, 0), (0, maps_BTM.shape[-1] - len(xs))))


read.defvjp(_read_fwd, _read_bwd)


@jax.custom_vjp
def write(xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]) -> tuple[Streams, Float[Array, "B T R"]]:
    """(stream i becomes sum_j res[i][j] * stream j + post[i] * y;
    the `squares` of the new streams, without a gradient)."""
    forms: dict[str, Any] = {"default": _write_in_xla}
    if residual_streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_in_kernel
    return _kept(on_platform(xs, y_BTD, maps_BTM, **forms))


def _write_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array) -> tuple[Streams, Array]:
    _, post, res = coefficients(maps_BTM)
    y, wide = _wide(y_BTD), [_wide(x) for x in xs]
    mixed = [_sum([c[..., None] * x for c, x in zip(row, wide, strict=True)]) for row in res]
    outs = _kept(tuple((m + c[..., None] * y).astype(x.dtype) for m, c, x in zip(mixed, post, xs, strict=True)))
    return outs, squares(outs)


def _flat(arrays: Sequence[Array]) -> list[Array]:
    """Batch and time in one axis."""
    return [a.reshape(-1, a.shape[-1]) for a in arrays]


def _write_in_kernel(xs: Streams, y_BTD: Array, maps_BTM: Array, *, interpret: bool = False) -> tuple[Streams, Array]:
    *flat_xs, y, maps = _flat([*xs, y_BTD, maps_BTM])
    outs, sums = residual_streams_gpu.write(flat_xs, y, maps, interpret=interpret)
    return tuple(out.reshape(y_BTD.shape) for out in outs), sums.reshape(*y_BTD.shape[:2], len(xs))


def _write_fwd(xs, y_BTD, maps_BTM):  # type: ignore[no-untyped-def]
    return write(xs, y_BTD, maps_BTM), (xs, y_BTD, maps_BTM)


def _write_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    xs, y_BTD, maps_BTM = saved
    douts, _ = cotangents
    _, _, res = coefficients(maps_BTM)
    wide = [_wide(d) for d in douts]
    dxs = tuple(_sum([res[i][j][..., None] * d for i, d in enumerate(wide)]).astype(x.dtype) for j, x in enumerate(xs))
    forms: dict[str, Any] = {"default": _write_sums_in_xla}
    if residual_streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_sums_in_kernel
    return dxs, *on_platform(xs, y_BTD, maps_BTM, douts, **forms)


def _write_sums_in_xla(xs: Streams, y_BTD: Array, maps_BTM: Array, douts: Streams) -> tuple[Array, Array]:
    """(dy, d maps)."""
    _, post, _ = coefficients(maps_BTM)
    dy = _sum([c[..., None] * _wide(d) for c, d in zip(post, douts, strict=True)]).astype(y_BTD.dtype)
    dres = [_over_width(d, x) for d in douts for x in xs]
    dpost = [_over_width(d, y_BTD) for d in douts]
    return dy, jnp.stack([*(jnp.zeros_like(d) for d in dpost), *dpost, *dres], axis=-1)


def _write_sums_in_kernel(
    xs: Streams, y_BTD: Array, maps_BTM: Array, douts: Streams, *, interpret: bool = False
) -> tuple[Array, Array]:
    *flat_xs, y, maps = _flat([*xs, y_BTD, maps_BTM])
    dy, dmaps = residual_streams_gpu.write_backward(flat_xs, y, maps, _flat(douts), interpret=interpret)
    return dy.reshape(y_BTD.shape), dmaps.reshape(maps_BTM.shape)


write.defvjp(_write_fwd, _write_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def project(
    xs: Streams, squares_BTR: Float[Array, "B T R"], phi_RDM: Float[Array, "R D M"], eps: float
) -> Float[Array, "B T M"]:
    """(x @ phi) / rms(x), where x is all streams of a token in one vector; the division after the product saves a pass.

    `squares` of the streams saves another: whoever wrote them had them at hand. The whole gradient, through the rms
    too, goes to the streams.
    """
    return _project(xs, squares_BTR, phi_RDM, eps)[0]


def _project(xs: Streams, squares_BTR: Array, phi_RDM: Array, eps: float) -> tuple[Array, Array, Array]:
    size = len(xs) * xs[0].shape[-1]
    wide = jnp.promote_types(xs[0].dtype, jnp.float32)
    products_BTM = _sum(
        [jnp.einsum("btd,dm->btm", x, phi, preferred_element_type=wide) for x, phi in zip(xs, phi_RDM, strict=True)]
    )
    scale_BT = checkpoint_name(lax.rsqrt(jnp.sum(squares_BTR, axis=-1) / size + eps), COEFFICIENTS)
    return products_BTM * scale_BT[..., None], products_BTM, scale_BT


def _project_fwd(xs, squares_BTR, phi_RDM, eps):  # type: ignore[no-untyped-def]
    out, products_BTM, scale_BT = _project(xs, squares_BTR, phi_RDM, eps)
    return out, (xs, phi_RDM, products_BTM, scale_BT)


def _project_bwd(eps, saved, dout_BTM):  # type: ignore[no-untyped-def]
    xs, phi_RDM, products_BTM, scale_BT = saved
    size = len(xs) * xs[0].shape[-1]
    dscale_BT = jnp.sum(dout_BTM * products_BTM, axis=-1)
    along_BT = -dscale_BT * scale_BT**3 / size  # how much of each x its own gradient contains
    dproducts_BTM = (dout_BTM * scale_BT[..., None]).astype(xs[0].dtype)
    dxs = tuple(
        (_wide(jnp.einsum("btm,dm->btd", dproducts_BTM, phi)) + along_BT[..., None] * _wide(x)).astype(x.dtype)
        for x, phi in zip(xs, phi_RDM, strict=True)
    )
    wide = jnp.promote_types(phi_RDM.dtype, jnp.float32)
    dphi = jnp.stack([jnp.einsum("btd,btm->dm", x, dproducts_BTM, preferred_element_type=wide) for x in xs])
    return dxs, jnp.zeros((*scale_BT.shape, len(xs)), scale_BT.dtype), dphi.astype(phi_RDM.dtype)


project.defvjp(_project_fwd, _project_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def maps(logits_BTM: Float[Array, "B T M"], iterations: int) -> tuple[Float[Array, "B T M"], Float[Array, "B T"]]:
    """H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn's iteration, then balanced: doubly stochastic.

    Second, only to be looked at: how far Sinkhorn's columns were from 1 before they were balanced.
    """
    forms: dict[str, Any] = {"default": functools.partial(_maps_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_in_kernel, iterations)
    return on_platform(logits_BTM, **forms)


def _maps_in_xla(iterations: int, logits_BTM: Array) -> tuple[Array, Array]:
    pre_RBT, post_RBT, res_RRBT = _by_kind(logits_BTM)
    mixing_RRBT = sinkhorn(res_RRBT, iterations)
    unbalanced_BT = jnp.max(jnp.abs(sum_over(mixing_RRBT, axis=0) - 1.0), axis=0)
    halves = jax.nn.sigmoid(pre_RBT), 2.0 * jax.nn.sigmoid(post_RBT)
    maps_MBT = jnp.concatenate([*halves, balance(mixing_RRBT).reshape(-1, *unbalanced_BT.shape)])
    return jnp.moveaxis(maps_MBT, 0, -1), unbalanced_BT


def _by_kind(logits_BTM: Array) -> tuple[Array, Array, Array]:
    """Of pre [R, B, T], of post [R, B, T] and of res [R, R, B, T]."""
    logits_MBT = jnp.moveaxis(logits_BTM, -1, 0)
    R = math.isqrt(len(logits_MBT) + 1) - 1  # M + 1 = (R + 1)^2
    return logits_MBT[:R], logits_MBT[R : 2 * R], logits_MBT[2 * R :].reshape(R, R, *logits_MBT.shape[1:])


def _maps_in_numbers(iterations: int, each: Sequence[Array]) -> list[Array]:
    """The same of M numbers a token, for a kernel: the coefficients, and how far from balanced."""
    pre, post, res = _split(each)
    mixing = iterate(res, iterations)
    sums = [_sum(column) for column in zip(*mixing, strict=True)]
    unbalanced = functools.reduce(jnp.maximum, [jnp.abs(s - 1.0) for s in sums])
    halves = [jax.nn.sigmoid(x) for x in pre], [2.0 * jax.nn.sigmoid(x) for x in post]
    return [*halves[0], *halves[1], *(x for row in balanced(mixing) for x in row), unbalanced]


def _maps_in_kernel(iterations: int, logits_BTM: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    body = lambda each, _: _maps_in_numbers(iterations, each)
    maps_BTM, unbalanced = sinkhorn_gpu.over_tokens(body, [logits_BTM], [logits_BTM.shape[-1], 1], interpret=interpret)
    return maps_BTM, unbalanced[..., 0]


def _maps_fwd(logits_BTM, iterations):  # type: ignore[no-untyped-def]
    return maps(logits_BTM, iterations), logits_BTM


def _maps_bwd(iterations, logits_BTM, cotangents):  # type: ignore[no-untyped-def]
    dmaps_BTM, _ = cotangents
    forms: dict[str, Any] = {"default": functools.partial(_maps_backward_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_backward_in_kernel, iterations)
    return (on_platform(logits_BTM, dmaps_BTM, **forms),)


def _maps_backward_in_xla(iterations: int, logits_BTM: Array, dmaps_BTM: Array) -> Array:
    return jax.vjp(lambda logits_BTM: _maps_in_xla(iterations, logits_BTM)[0], logits_BTM)[1](dmaps_BTM)[0]


def _maps_backward_in_numbers(
    iterations: int, each: Sequence[Array], grads: tuple[Vector, Vector, Matrix], aside: sinkhorn_gpu.Aside
) -> list[Array]:
    """Gradients of the M logits."""
    pre, post, res = _split(each)
    slope = lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)
    dpre = [g * slope(x) for x, g in zip(pre, grads[0], strict=True)]
    dpost = [2.0 * g * slope(x) for x, g in zip(post, grads[1], strict=True)]
    dres = reverse(res, lambda mixing: jax.vjp(balanced, mixing)[1](grads[2])[0], iterations, aside)
    return [*dpre, *dpost, *(g for row in dres for g in row)]


def _maps_backward_in_kernel(iterations: int, logits_BTM: Array, dmaps_BTM: Array, *, interpret: bool = False) -> Array:
    M = logits_BTM.shape[-1]
    R = math.isqrt(M + 1) - 1

    def body(each: list[Array], aside: sinkhorn_gpu.Aside) -> list[Array]:
        return _maps_backward_in_numbers(iterations, each[:M], _split(each[M:]), aside)

    args, room = [logits_BTM, dmaps_BTM], (iterations, R)
    return sinkhorn_gpu.over_tokens(body, args, [M], aside=room, interpret=interpret)[0]


maps.defvjp(_maps_fwd, _maps_bwd)


def read_reference(xs: Streams, maps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    pre_BTR = maps_BTM[..., : len(xs)]
    return jnp.einsum("btr,rbtd->btd", pre_BTR, _wide(jnp.stack(xs))).astype(xs[0].dtype)


def write_reference(xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]) -> Streams:
    R = len(xs)
    post_BTR, res_BTRR = maps_BTM[..., R : 2 * R], maps_BTM[..., 2 * R :].reshape(*maps_BTM.shape[:2], R, R)
    mixed_RBTD = jnp.einsum("btij,jbtd->ibtd", res_BTRR, _wide(jnp.stack(xs)))
    return tuple((mixed_RBTD + jnp.einsum("bti,btd->ibtd", post_BTR, _wide(y_BTD))).astype(xs[0].dtype))


def project_reference(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "B T M"]:
    x_RBTD = _wide(jnp.stack(xs))
    rms_BT = jnp.sqrt(jnp.mean(x_RBTD**2, axis=(0, -1)) + eps)
    return jnp.einsum("rbtd,rdm->btm", x_RBTD, _wide(phi_RDM)) / rms_BT[..., None]


def maps_reference(logits_BTM: Float[Array, "B T M"], iterations: int) -> Float[Array, "B T M"]:
    """With ordinary gradients."""
    pre_RBT, post_RBT, res_RRBT = _by_kind(logits_BTM)
    mixing_RRBT = balance(sinkhorn_reference(res_RRBT, iterations))
    each = [jax.nn.sigmoid(pre_RBT), 2.0 * jax.nn.sigmoid(post_RBT), mixing_RRBT.reshape(-1, *pre_RBT.shape[1:])]
    return jnp.moveaxis(jnp.concatenate(each), 0, -1)
