"""Residual streams: R copies of the stream, read through one set of weights and written back through two others.

A token's streams are R separate arrays [B, T, D], never one [B, T, R, D]: mixing them is then elementwise, which compilers
fuse into one pass that reads each stream once. All coefficients are float32 with the tokens last (`pre[r]` is [B, T]); sums are
formed in float32 whatever the streams' dtype. Each function has its gradient written out, so that nothing wider than the
streams themselves is ever kept; the plain forms at the end are what the tests compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

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
def read(xs: Streams, pre_RBT: Float[Array, "R B T"]) -> Float[Array, "B T D"]:
    """sum_r pre[r] * stream r."""
    return _kept(_sum([c[..., None] * _wide(x) for c, x in zip(pre_RBT, xs, strict=True)]).astype(xs[0].dtype))


def _read_fwd(xs, pre_RBT):  # type: ignore[no-untyped-def]
    return read(xs, pre_RBT), (xs, pre_RBT)


def _read_bwd(saved, dout):  # type: ignore[no-untyped-def]
    xs, pre_RBT = saved
    dxs = tuple((c[..., None] * _wide(dout)).astype(x.dtype) for c, x in zip(pre_RBT, xs, strict=True))
    return dxs, jnp.stack([_over_width(x, dout) for x in xs])


read.defvjp(_read_fwd, _read_bwd)


@jax.custom_vjp
def write(
    xs: Streams, y_BTD: Float[Array, "B T D"], res_RRBT: Float[Array, "R R B T"], post_RBT: Float[Array, "R B T"]
) -> Streams:
    """Stream i becomes sum_j res[i, j] * stream j + post[i] * y."""
    y = _wide(y_BTD)
    wide = [_wide(x) for x in xs]
    mixed = [_sum([c[..., None] * x for c, x in zip(row, wide, strict=True)]) for row in res_RRBT]
    return _kept(tuple((m + c[..., None] * y).astype(x.dtype) for m, c, x in zip(mixed, post_RBT, xs, strict=True)))


def _write_fwd(xs, y_BTD, res_RRBT, post_RBT):  # type: ignore[no-untyped-def]
    return write(xs, y_BTD, res_RRBT, post_RBT), (xs, y_BTD, res_RRBT, post_RBT)


def _write_bwd(saved, douts):  # type: ignore[no-untyped-def]
    xs, y_BTD, res_RRBT, post_RBT = saved
    wide = [_wide(d) for d in douts]
    dxs = tuple(_sum([res_RRBT[i, j][..., None] * d for i, d in enumerate(wide)]).astype(x.dtype) for j, x in enumerate(xs))
    dy = _sum([c[..., None] * d for c, d in zip(post_RBT, wide, strict=True)]).astype(y_BTD.dtype)
    dres = jnp.stack([jnp.stack([_over_width(d, x) for x in xs]) for d in douts])
    dpost = jnp.stack([_over_width(d, y_BTD) for d in douts])
    return dxs, dy, dres, dpost


write.defvjp(_write_fwd, _write_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "M B T"]:
    """(x @ phi) / rms(x), where x is all streams of a token in one vector; the division after the product saves a pass."""
    return _project(xs, phi_RDM, eps)[0]


def _project(xs: Streams, phi_RDM: Array, eps: float) -> tuple[Array, Array, Array]:
    size = len(xs) * xs[0].shape[-1]
    wide = jnp.promote_types(xs[0].dtype, jnp.float32)
    products_BTM = _sum(
        [jnp.einsum("btd,dm->btm", x, phi, preferred_element_type=wide) for x, phi in zip(xs, phi_RDM, strict=True)]
    )
    scale_BT = checkpoint_name(lax.rsqrt(_sum([_over_width(x, x) for x in xs]) / size + eps), COEFFICIENTS)
    return jnp.moveaxis(products_BTM, -1, 0) * scale_BT[None], products_BTM, scale_BT


def _project_fwd(xs, phi_RDM, eps):  # type: ignore[no-untyped-def]
    out, products_BTM, scale_BT = _project(xs, phi_RDM, eps)
    return out, (xs, phi_RDM, products_BTM, scale_BT)


def _project_bwd(eps, saved, dout_MBT):  # type: ignore[no-untyped-def]
    xs, phi_RDM, products_BTM, scale_BT = saved
    size = len(xs) * xs[0].shape[-1]
    dout_BTM = jnp.moveaxis(dout_MBT, 0, -1)
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


def read_reference(xs: Streams, pre_RBT: Float[Array, "R B T"]) -> Float[Array, "B T D"]:
    return jnp.einsum("rbt,rbtd->btd", pre_RBT, _wide(jnp.stack(xs))).astype(xs[0].dtype)


def write_reference(
    xs: Streams, y_BTD: Float[Array, "B T D"], res_RRBT: Float[Array, "R R B T"], post_RBT: Float[Array, "R B T"]
) -> Streams:
    mixed_RBTD = jnp.einsum("ijbt,jbtd->ibtd", res_RRBT, _wide(jnp.stack(xs)))
    return tuple((mixed_RBTD + jnp.einsum("ibt,btd->ibtd", post_RBT, _wide(y_BTD))).astype(xs[0].dtype))


def project_reference(xs: Streams, phi_RDM: Float[Array, "R D M"], eps: float) -> Float[Array, "M B T"]:
    x_RBTD = _wide(jnp.stack(xs))
    rms_BT = jnp.sqrt(jnp.mean(x_RBTD**2, axis=(0, -1)) + eps)
    return jnp.einsum("rbtd,rdm->mbt", x_RBTD, _wide(phi_RDM)) / rms_BT[None]
