"""Cross-entropy, distillation loss and log-probabilities over a vocabulary that is sharded over the mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.distill import DistillSums, Teacher, Weights, distill, distill_and_grads, likeliest
from nash_mhc.ops.xent import TokenScores, XentSums, log_probs, xent, xent_and_grads
from nash_mhc.parallel.sharding import mesh_axis, on_shards

# Logical axes of the arguments and results.
_X, _W, _TOKENS = ("batch", "time_split", "width"), ("vocab", "embed"), ("batch", "time")
_TEACHER: Any = Teacher((*_TOKENS, "candidates"), (*_TOKENS, "candidates"), _TOKENS)  # type: ignore[arg-type]
_SCALARS: Any = XentSums(*((),) * len(XentSums._fields))  # type: ignore[arg-type]
_DISTILLED: Any = DistillSums(*((),) * len(DistillSums._fields))  # type: ignore[arg-type]


def _gather(x: Array, w: Array) -> tuple[Array, Array]:
    """Gather T of this device's sequences and D of its vocabulary columns, in the compute dtype."""
    w = w.astype(x.dtype)
    for axis in mesh_axis("time_split"):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    for axis in mesh_axis("embed"):
        w = lax.all_gather(w, axis, axis=1, tiled=True)
    return x, w


def _settings(vocab_size: int, z_weight: float, smoothing: float) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "z_weight": z_weight, "smoothing": smoothing, "vocab_axes": mesh_axis("vocab")}


def _over_batch(sums: Any) -> Any:
    return lax.psum(sums, mesh_axis("batch")) if mesh_axis("batch") else sums


def _reduce_scatter(dx: Array, dw: Array) -> tuple[Array, Array]:
    """Reduce each gradient in one collective: sum partial gradients, and split those of split arrays."""
    for axis in mesh_axis("time_split"):
        dx = lax.psum_scatter(dx, axis, scatter_dimension=1, tiled=True)
    for axis in mesh_axis("batch"):
        split = axis in mesh_axis("embed")
        dw = lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True) if split else lax.psum(dw, axis)
    return dx, dw


def _scaled(grad: Array, cotangent: Array) -> Array:
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
        return _over_batch(sums), *_reduce_scatter(dx, dw)

    out = (_SCALARS, _X, _W)
    with jax.named_scope("loss"):
        sums, dx_BTD, dw_VD = on_shards(local, [_X, _W, _TOKENS, _TOKENS], out)(x_BTD, w_VD, targets_BT, weights_BT)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(vocab_size, z_weight, smoothing, grads, cotangent):  # type: ignore[no-untyped-def]
    return *(_scaled(grad, cotangent.loss) for grad in grads), None, None


sharded_xent.defvjp(_forward, _backward)


def _how(vocab_size: int, parts: Weights) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "parts": parts, "vocab_axes": mesh_axis("vocab")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def sharded_distill(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    teacher: Teacher,
    vocab_size: int,
    parts: Weights,
) -> DistillSums:
    """Return the distillation loss. Only `loss` has a gradient; the other sums are for reports."""

    def local(x: Array, w: Array, targets: Array, weights: Array, teacher: Teacher) -> DistillSums:
        x, w = _gather(x, w)
        return _over_batch(distill(x, w, targets, weights, teacher, **_how(vocab_size, parts)))

    with jax.named_scope("loss"):
        return on_shards(local, [_X, _W, _TOKENS, _TOKENS, _TEACHER], _DISTILLED)(x_BTD, w_VD, targets_BT, weights_BT, teacher)


def _distill_forward(x_BTD, w_VD, targets_BT, weights_BT, teacher, vocab_size, parts):  # type: ignore[no-untyped-def]
    def local(x: Array, w: Array, targets: Array, weights: Array, teacher: Teacher) -> tuple[DistillSums, Array, Array]:
        x, w = _gather(x, w)
        sums, dx, dw = distill_and_grads(x, w, targets, weights, teacher, **_how(vocab_size, parts))
        return _over_batch(sums), *_reduce_scatter(dx, dw)

    axes = [_X, _W, _TOKENS, _TOKENS, _TEACHER]
    with jax.named_scope("loss"):
        sums, dx_BTD, dw_VD = on_shards(local, axes, (_DISTILLED, _X, _W))(x_BTD, w_VD, targets_BT, weights_BT, teacher)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _distill_backward(vocab_size, parts, grads, cotangent):  # type: ignore[no-untyped-def]
    return *(_scaled(grad, cotangent.loss) for grad in grads), None, None, None


sharded_distill.defvjp(_distill_forward, _distill_backward)


def sharded_likeliest(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], rows_BT: Int[Array, "B T"], **how: Any
) -> Teacher:
    """Return the teacher's top-k logits; `how` as in `likeliest`."""

    def local(x: Array, w: Array, rows: Array) -> Teacher:
        x, w = _gather(x, w)
        return likeliest(x, w, rows, vocab_axes=mesh_axis("vocab"), **how)

    return on_shards(local, [_X, _W, _TOKENS], _TEACHER)(x_BTD, w_VD, rows_BT)


def sharded_log_probs(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], vocab_size: int
) -> TokenScores:
    """Return the log-probability of each target, without a gradient, for evaluations."""

    def local(x: Array, w: Array, targets: Array) -> TokenScores:
        x, w = _gather(x, w)
        return log_probs(x, w, targets, vocab_size=vocab_size, vocab_axes=mesh_axis("vocab"))

    out: Any = TokenScores(_TOKENS, _TOKENS)  # type: ignore[arg-type]
    return on_shards(local, [_X, _W, _TOKENS], out)(x_BTD, w_VD, targets_BT)
