"""Cross-entropy over a vocabulary that is split over the mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.log_probs import TokenScores, log_probs
from nash_mhc.ops.xent import XentSums, xent, xent_and_grads
from nash_mhc.parallel.sharding import mesh_axis, on_shards

# Logical axes of what the loss takes and gives.
_X, _W, _TOKENS = ("batch", "time_split", "width"), ("vocab", "embed"), ("batch", "time")
_SCALARS: Any = XentSums(*((),) * len(XentSums._fields))  # type: ignore[arg-type]


def _gather(x: Array, w: Array) -> tuple[Array, Array]:
    """This device's rows with all of T, and its vocabulary columns with all of D, in the compute dtype."""
    w = w.astype(x.dtype)
    for axis in mesh_axis("time_split"):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    for axis in mesh_axis("embed"):
        w = lax.all_gather(w, axis, axis=1, tiled=True)
    return x, w


def _settings(vocab_size: int, z_weight: float, smoothing: float) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "z_weight": z_weight, "smoothing": smoothing, "vocab_axes": mesh_axis("vocab")}


def _over_batch(sums: XentSums) -> XentSums:
    return lax.psum(sums, mesh_axis("batch")) if mesh_axis("batch") else sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def sharded_xent(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    vocab_size: int,
    z_weight: float,
    smoothing: float = 0.0,
) -> XentSums:
    """Chunked cross-entropy on the mesh. Only `loss` carries a gradient; the other sums are for reports."""

    def local(x: Array, w: Array, targets: Array, weights: Array) -> XentSums:
        x, w = _gather(x, w)
        settings = _settings(vocab_size, z_weight, smoothing)
        return _over_batch(xent(x, w, targets, weights, **settings))

    with jax.named_scope("loss"):
        return on_shards(local, [_X, _W, _TOKENS, _TOKENS], _SCALARS)(x_BTD, w_VD, targets_BT, weights_BT)


def _forward(x_BTD, w_VD, targets_BT, weights_BT, vocab_size, z_weight, smoothing):  # type: ignore[no-untyped-def]
    def local(x: Array, w: Array, targets: Array, weights: Array) -> tuple[XentSums, Array, Array]:
        x, w = _gather(x, w)
        settings = _settings(vocab_size, z_weight, smoothing)
        sums, dx, dw = xent_and_grads(x, w, targets, weights, **settings)
        # Each gradient goes home in one collective: summed where it is partial, split where its array is split.
        for axis in mesh_axis("time_split"):
            dx = lax.psum_scatter(dx, axis, scatter_dimension=1, tiled=True)
        for axis in mesh_axis("batch"):
            split = axis in mesh_axis("embed")
            dw = lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True) if split else lax.psum(dw, axis)
        return _over_batch(sums), dx, dw

    out = (_SCALARS, _X, _W)
    with jax.named_scope("loss"):
        sums, dx_BTD, dw_VD = on_shards(local, [_X, _W, _TOKENS, _TOKENS], out)(x_BTD, w_VD, targets_BT, weights_BT)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(vocab_size, z_weight, smoothing, grads, cotangent):  # type: ignore[no-untyped-def]
    dx_BTD, dw_VD = grads
    scaled = lambda grad: (grad * cotangent.loss).astype(grad.dtype)
    return scaled(dx_BTD), scaled(dw_VD), None, None


sharded_xent.defvjp(_forward, _backward)


def sharded_log_probs(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], vocab_size: int
) -> TokenScores:
    """How likely each target is, on the mesh; for evaluations, so without a gradient."""

    def local(x: Array, w: Array, targets: Array) -> TokenScores:
        x, w = _gather(x, w)
        return log_probs(x, w, targets, vocab_size=vocab_size, vocab_axes=mesh_axis("vocab"))

    out: Any = TokenScores(_TOKENS, _TOKENS)  # type: ignore[arg-type]
    return on_shards(local, [_X, _W, _TOKENS], out)(x_BTD, w_VD, targets_BT)
