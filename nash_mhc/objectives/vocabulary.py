"""Cross-entropy and log-probabilities over a vocabulary that is sharded over the mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.xent import TokenScores, XentSums, log_probs, xent, xent_and_grads
from nash_mhc.parallel.sharding import mesh_axis, on_shards

# Logical axes of the arguments and results.
HIDDEN_AXES, TABLE_AXES, TOKEN_AXES = ("batch", "time_split", "width"), ("vocab", "embed"), ("batch", "time")
_SCALARS: Any = XentSums(*((),) * len(XentSums._fields))  # type: ignore[arg-type]


def gather(x: Array, w: Array) -> tuple[Array, Array]:
    """Gather T of this device's sequences and D of its vocabulary columns, in the compute dtype."""
    w = w.astype(x.dtype)
    for axis in mesh_axis("time_split"):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    for axis in mesh_axis("embed"):
        w = lax.all_gather(w, axis, axis=1, tiled=True)
    return x, w


def _settings(vocab_size: int, z_weight: float, smoothing: float) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "z_weight": z_weight, "smoothing": smoothing, "vocab_axes": mesh_axis("vocab")}


def sum_over_batch(sums: Any) -> Any:
    return lax.psum(sums, mesh_axis("batch")) if mesh_axis("batch") else sums


def reduce_gradients(dx: Array, dw: Array) -> tuple[Array, Array]:
    """Reduce each gradient in one collective: sum partial gradients, and split those of split arrays."""
    for axis in mesh_axis("time_split"):
        dx = lax.psum_scatter(dx, axis, scatter_dimension=1, tiled=True)
    for axis in mesh_axis("batch"):
        split = axis in mesh_axis("embed")
        dw = lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True) if split else lax.psum(dw, axis)
    return dx, dw


def scaled(grad: Array, cotangent: Array) -> Array:
    return (grad * cotangent).astype(grad.dtype)


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
    """Return the chunked cross-entropy. Only `loss` has a gradient; the other sums are for reports."""

    def local(x: Array, w: Array, targets: Array, weights: Array) -> XentSums:
        x, w = gather(x, w)
        settings = _settings(vocab_size, z_weight, smoothing)
        return sum_over_batch(xent(x, w, targets, weights, **settings))

    with jax.named_scope("loss"):
        return on_shards(local, [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES, TOKEN_AXES], _SCALARS)(
            x_BTD, w_VD, targets_BT, weights_BT
        )


def _forward(x_BTD, w_VD, targets_BT, weights_BT, vocab_size, z_weight, smoothing):  # type: ignore[no-untyped-def]
    def local(x: Array, w: Array, targets: Array, weights: Array) -> tuple[XentSums, Array, Array]:
        x, w = gather(x, w)
        settings = _settings(vocab_size, z_weight, smoothing)
        sums, dx, dw = xent_and_grads(x, w, targets, weights, **settings)
        return sum_over_batch(sums), *reduce_gradients(dx, dw)

    out = (_SCALARS, HIDDEN_AXES, TABLE_AXES)
    with jax.named_scope("loss"):
        sums, dx_BTD, dw_VD = on_shards(local, [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES, TOKEN_AXES], out)(
            x_BTD, w_VD, targets_BT, weights_BT
        )
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(vocab_size, z_weight, smoothing, grads, cotangent):  # type: ignore[no-untyped-def]
    return *(scaled(grad, cotangent.loss) for grad in grads), None, None


sharded_xent.defvjp(_forward, _backward)


def sharded_log_probs(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], vocab_size: int
) -> TokenScores:
    """Return the log-probability of each target, without a gradient, for evaluations."""

    def local(x: Array, w: Array, targets: Array) -> TokenScores:
        x, w = gather(x, w)
        return log_probs(x, w, targets, vocab_size=vocab_size, vocab_axes=mesh_axis("vocab"))

    out: Any = TokenScores(TOKEN_AXES, TOKEN_AXES)  # type: ignore[arg-type]
    return on_shards(local, [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES], out)(x_BTD, w_VD, targets_BT)
