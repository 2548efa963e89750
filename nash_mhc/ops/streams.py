"""Residual streams: R copies of the stream, read through one set of weights and written back through two others.

A token's streams are R separate arrays [B, T, D], never one [B, T, R, D]: mixing them is then elementwise, which compilers
fuse into one pass that reads each stream once. All coefficients are float32, each an array [B, T]; sums are
formed in float32 whatever the streams' dtype. Each function has its gradient written out, so that nothing wider than the
streams themselves is ever kept; the plain forms at the end are what the tests compare with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nash_mhc.ops import sinkhorn_gpu, streams_gpu
from nash_mhc.ops.sinkhorn import Matrix, Vector, balance, balanced, iterate, reverse, reverse_in_kernel, sinkhorn_reference

Streams = tuple[Float[Array, "B T D"], ...]


COEFFICIENTS = "stream_coefficients"  # checkpoint name of what is small and dear: a few numbers a token, a whole pass to get

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


@jax.custom_vjp
def read(xs: Streams, pre: Vector) -> Float[Array, "B T D"]:
    """sum_r pre[r] * stream r."""
    return _kept(_sum([c[..., None] * _wide(x) for c, x in zip(pre, xs, strict=True)]).astype(xs[0].dtype))


def _read_fwd(xs, pre):  # type: ignore[no-untyped-def]
    return read(xs, pre), (xs, pre)


def _read_bwd(saved, dout):  # type: ignore[no-untyped-def]
    xs, pre = saved
    dxs = tuple((c[..., None] * _wide(dout)).astype(x.dtype) for c, x in zip(pre, xs, strict=True))
    return dxs, tuple(_over_width(x, dout) for x in xs)


read.defvjp(_read_fwd, _read_bwd)


@jax.custom_vjp
def write(xs: Streams, y_BTD: Float[Array, "B T D"], res: Matrix, post: Vector) -> Streams:
    """Stream i becomes sum_j res[i][j] * stream j + post[i] * y."""
    forms: dict[str, Any] = {"default": _write_in_xla}
    if streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_in_kernel
    return _kept(lax.platform_dependent(xs, y_BTD, res, post, **forms))


def _write_in_xla(xs: Streams, y_BTD: Array, res: Matrix, post: Vector) -> Streams:
    y, wide = _wide(y_BTD), [_wide(x) for x in xs]
    mixed = [_sum([c[..., None] * x for c, x in zip(row, wide, strict=True)]) for row in res]
    return tuple((m + c[..., None] * y).astype(x.dtype) for m, c, x in zip(mixed, post, xs, strict=True))


def _flat(arrays: Sequence[Array], *, axes: int) -> list[Array]:
    """Batch and time in one axis, before `axes` others."""
    return [a.reshape(-1, *a.shape[a.ndim - axes :]) for a in arrays]


def _write_in_kernel(xs: Streams, y_BTD: Array, res: Matrix, post: Vector, *, interpret: bool = False) -> Streams:
    *flat_xs, y = _flat([*xs, y_BTD], axes=1)
    coefficients = [_flat(c, axes=0) for c in ([c for row in res for c in row], post)]
    outs = streams_gpu.write(flat_xs, y, *coefficients, interpret=interpret)
    return tuple(out.reshape(y_BTD.shape) for out in outs)


def _write_fwd(xs, y_BTD, res, post):  # type: ignore[no-untyped-def]
    return write(xs, y_BTD, res, post), (xs, y_BTD, res, post)


def _write_bwd(saved, douts):  # type: ignore[no-untyped-def]
    xs, y_BTD, res, post = saved
    wide = [_wide(d) for d in douts]
    dxs = tuple(_sum([res[i][j][..., None] * d for i, d in enumerate(wide)]).astype(x.dtype) for j, x in enumerate(xs))
    forms: dict[str, Any] = {"default": _write_sums_in_xla}
    if streams_gpu.fits(y_BTD.shape):
        forms["cuda"] = _write_sums_in_kernel
    return dxs, *lax.platform_dependent(xs, y_BTD, post, douts, **forms)


def _write_sums_in_xla(xs: Streams, y_BTD: Array, post: Vector, douts: Streams) -> tuple[Array, Matrix, Vector]:
    """(dy, d res, d post)."""
    dy = _sum([c[..., None] * _wide(d) for c, d in zip(post, douts, strict=True)]).astype(y_BTD.dtype)
    dres = tuple(tuple(_over_width(d, x) for x in xs) for d in douts)
    return dy, dres, tuple(_over_width(d, y_BTD) for d in douts)


def _write_sums_in_kernel(
    xs: Streams, y_BTD: Array, post: Vector, douts: Streams, *, interpret: bool = False
) -> tuple[Array, Matrix, Vector]:
    *flat_xs, y = _flat([*xs, y_BTD], axes=1)
    dy, dres, dpost = streams_gpu.write_backward(flat_xs, y, _flat(post, axes=0), _flat(douts, axes=1), interpret=interpret)
    R, tokens = len(xs), y_BTD.shape[:2]
    by_row = tuple(tuple(c.reshape(tokens) for c in dres[i * R : (i + 1) * R]) for i in range(R))
    return dy.reshape(y_BTD.shape), by_row, tuple(c.reshape(tokens) for c in dpost)


write.defvjp(_write_fwd, _write_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "B T M"]:
    """(x @ phi) / rms(x), where x is all streams of a token in one vector; the division after the product saves a pass."""
    return _project(xs, phi_RDM, eps)[0]


def _project(xs: Streams, phi_RDM: Array, eps: float) -> tuple[Array, Array, Array]:
    size = len(xs) * xs[0].shape[-1]
    wide = jnp.promote_types(xs[0].dtype, jnp.float32)
    products_BTM = _sum(
        [jnp.einsum("btd,dm->btm", x, phi, preferred_element_type=wide) for x, phi in zip(xs, phi_RDM, strict=True)]
    )
    scale_BT = checkpoint_name(lax.rsqrt(_sum([_over_width(x, x) for x in xs]) / size + eps), COEFFICIENTS)
    return products_BTM * scale_BT[..., None], products_BTM, scale_BT


def _project_fwd(xs, phi_RDM, eps):  # type: ignore[no-untyped-def]
    out, products_BTM, scale_BT = _project(xs, phi_RDM, eps)
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
    return dxs, dphi.astype(phi_RDM.dtype)


project.defvjp(_project_fwd, _project_bwd)


class Maps(NamedTuple):
    """The three maps of one sub-layer, for each token; every coefficient is an array [B, T] of its own, float32."""

    pre: Vector
    post: Vector
    res: Matrix  # doubly stochastic
    unbalanced_BT: Float[Array, "B T"]  # how far Sinkhorn's columns were from 1 before they were balanced


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def maps(logits_BTM: Float[Array, "B T M"], iterations: int) -> Maps:
    """H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn's iteration, then balanced; M = R + R + R R logits a token."""
    forms: dict[str, Any] = {"default": functools.partial(_maps_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_in_kernel, iterations)
    return lax.platform_dependent(logits_BTM, **forms)


def _columns_of(logits_BTM: Array) -> list[Array]:
    return [logits_BTM[..., m] for m in range(logits_BTM.shape[-1])]


def _split(each: Sequence[Array]) -> tuple[Vector, Vector, Matrix]:
    """M arrays -> those of pre, of post, and of res by rows."""
    R = math.isqrt(len(each) + 1) - 1  # M + 1 = (R + 1)^2
    res = each[2 * R :]
    return tuple(each[:R]), tuple(each[R : 2 * R]), tuple(tuple(res[i * R : (i + 1) * R]) for i in range(R))


def _maps(iterations: int, each: Sequence[Array]) -> Maps:
    pre, post, res = _split(each)
    mixing = iterate(res, iterations)
    sums = [_sum(column) for column in zip(*mixing, strict=True)]
    unbalanced = functools.reduce(jnp.maximum, [jnp.abs(s - 1.0) for s in sums])
    halves = tuple(jax.nn.sigmoid(x) for x in pre), tuple(2.0 * jax.nn.sigmoid(x) for x in post)
    return Maps(*halves, balanced(mixing), unbalanced)


def _maps_in_xla(iterations: int, logits_BTM: Array) -> Maps:
    return _maps(iterations, _columns_of(logits_BTM))


def _maps_in_kernel(iterations: int, logits_BTM: Array, *, interpret: bool = False) -> Maps:
    body = lambda each, _: jax.tree.leaves(_maps(iterations, each))
    *coefficients, unbalanced = sinkhorn_gpu.over_tokens(
        body, _columns_of(logits_BTM), logits_BTM.shape[-1] + 1, interpret=interpret
    )
    return Maps(*_split(coefficients), unbalanced)


def _maps_fwd(logits_BTM, iterations):  # type: ignore[no-untyped-def]
    return maps(logits_BTM, iterations), logits_BTM


def _maps_bwd(iterations, logits_BTM, grads):  # type: ignore[no-untyped-def]
    wanted = (grads.pre, grads.post, grads.res)  # `unbalanced` is only looked at
    forms: dict[str, Any] = {"default": functools.partial(_maps_backward_in_xla, iterations)}
    if sinkhorn_gpu.fits(logits_BTM.shape[:2]):
        forms["cuda"] = functools.partial(_maps_backward_in_kernel, iterations)
    return (lax.platform_dependent(logits_BTM, wanted, **forms),)


def _maps_backward(
    iterations: int, each: Sequence[Array], grads: tuple[Vector, Vector, Matrix], back: Callable[..., Matrix]
) -> list[Array]:
    """Gradients of the M logits; `back` is the reverse of Sinkhorn's iteration."""
    pre, post, res = _split(each)
    slope = lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)
    dpre = [g * slope(x) for x, g in zip(pre, grads[0], strict=True)]
    dpost = [2.0 * g * slope(x) for x, g in zip(post, grads[1], strict=True)]
    _, through_balance = jax.vjp(balanced, iterate(res, iterations))
    dres = back(res, through_balance(grads[2])[0], iterations)
    return [*dpre, *dpost, *(g for row in dres for g in row)]


def _maps_backward_in_xla(iterations: int, logits_BTM: Array, grads: tuple[Vector, Vector, Matrix]) -> Array:
    return jnp.stack(_maps_backward(iterations, _columns_of(logits_BTM), grads, reverse), axis=-1)


def _maps_backward_in_kernel(
    iterations: int, logits_BTM: Array, grads: tuple[Vector, Vector, Matrix], *, interpret: bool = False
) -> Array:
    M = logits_BTM.shape[-1]

    def body(each: list[Array], aside: sinkhorn_gpu.Aside) -> list[Array]:
        return _maps_backward(iterations, each[:M], _split(each[M:]), functools.partial(reverse_in_kernel, aside=aside))

    args = [*_columns_of(logits_BTM), *jax.tree.leaves(grads)]
    room = (iterations, len(grads[0]))
    return jnp.stack(sinkhorn_gpu.over_tokens(body, args, M, aside=room, interpret=interpret), axis=-1)


maps.defvjp(_maps_fwd, _maps_bwd)


def read_reference(xs: Streams, pre: Vector) -> Float[Array, "B T D"]:
    return jnp.einsum("rbt,rbtd->btd", jnp.stack(pre), _wide(jnp.stack(xs))).astype(xs[0].dtype)


def write_reference(xs: Streams, y_BTD: Float[Array, "B T D"], res: Matrix, post: Vector) -> Streams:
    res_RRBT = jnp.stack([jnp.stack(row) for row in res])
    mixed_RBTD = jnp.einsum("ijbt,jbtd->ibtd", res_RRBT, _wide(jnp.stack(xs)))
    return tuple((mixed_RBTD + jnp.einsum("ibt,btd->ibtd", jnp.stack(post), _wide(y_BTD))).astype(xs[0].dtype))


def project_reference(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "B T M"]:
    x_RBTD = _wide(jnp.stack(xs))
    rms_BT = jnp.sqrt(jnp.mean(x_RBTD**2, axis=(0, -1)) + eps)
    return jnp.einsum("rbtd,rdm->btm", x_RBTD, _wide(phi_RDM)) / rms_BT[..., None]


def maps_reference(logits_BTM: Float[Array, "B T M"], iterations: int) -> tuple[Array, Array, Array]:
    """(pre [R, B, T], post, res [R, R, B, T]) with ordinary gradients."""
    logits_MBT = jnp.moveaxis(logits_BTM, -1, 0)
    R = math.isqrt(len(logits_MBT) + 1) - 1
    res_RRBT = balance(sinkhorn_reference(logits_MBT[2 * R :].reshape(R, R, *logits_MBT.shape[1:]), iterations))
    return jax.nn.sigmoid(logits_MBT[:R]), 2.0 * jax.nn.sigmoid(logits_MBT[R : 2 * R]), res_RRBT
