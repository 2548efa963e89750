"""Cross-entropy and log-probabilities over a vocabulary that is sharded over the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.xent import TokenScores, XentSums, log_probs, xent_and_grads
from nash_mhc.parallel.sharding import mesh_axis, on_shards

# Logical axes of the arguments and results.
HIDDEN_AXES, TABLE_AXES, TOKEN_AXES = ("batch", "time_split", "width"), ("vocab", "embed"), ("batch", "time")


def gather(x: Array, w: Array) -> tuple[Array, Array]:
    """Gather T of this device's sequences and D of its vocabulary columns, in the compute dtype."""
    w = w.astype(x.dtype)
    for axis in mesh_axis("time_split"):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    for axis in mesh_axis("embed"):
        w = lax.all_gather(w, axis, axis=1, tiled=True)
    return x, w


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


class ChunkedLoss(NamedTuple):
    """A loss of hidden states and the output projection, which computes its gradients in the forward pass."""

    # (x_BTD, w_VD, *arrays, vocab_axes=..., with_grads=...) -> (sums, d loss / d x, d loss / d w), as `xent_and_grads`
    compute: Callable[..., tuple[Any, Array | None, Array | None]]
    axes: tuple[Any, ...]  # logical axes of `arrays`
    sums_class: Callable[..., Any]  # NamedTuple of scalars; only its field `loss` has a gradient

    def on_mesh(self, x_BTD: Array, w_VD: Array, arrays: tuple[Any, ...], *, with_grads: bool) -> tuple[Any, ...]:
        """Compute the loss on the mesh; return (sums,), or with gradients (sums, d loss / d x, d loss / d w)."""

        def local(x: Array, w: Array, *arrays: Any) -> tuple[Any, ...]:
            sums, dx, dw = self.compute(*gather(x, w), *arrays, vocab_axes=mesh_axis("vocab"), with_grads=with_grads)
            gradients = () if dx is None or dw is None else reduce_gradients(dx, dw)
            return sum_over_batch(sums), *gradients

        no_axes = self.sums_class(*[()] * len(self.sums_class._fields))  # type: ignore[attr-defined]  # scalars
        out = (no_axes, HIDDEN_AXES, TABLE_AXES) if with_grads else (no_axes,)
        with jax.named_scope("loss"):
            return on_shards(local, [HIDDEN_AXES, TABLE_AXES, *self.axes], out)(x_BTD, w_VD, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sharded_loss(loss: ChunkedLoss, x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], *arrays: Any) -> Any:
    """Return the sums of a loss on the mesh."""
    return loss.on_mesh(x_BTD, w_VD, arrays, with_grads=False)[0]


def _forward(loss: ChunkedLoss, x_BTD: Array, w_VD: Array, *arrays: Any) -> tuple[Any, tuple[Array, Array]]:
    sums, dx_BTD, dw_VD = loss.on_mesh(x_BTD, w_VD, arrays, with_grads=True)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(loss: ChunkedLoss, grads: tuple[Array, Array], cotangent: Any) -> tuple[Any, ...]:
    return *((grad * cotangent.loss).astype(grad.dtype) for grad in grads), *(None for _ in loss.axes)


sharded_loss.defvjp(_forward, _backward)


def sharded_xent(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    vocab_size: int,
    z_weight: float,
) -> XentSums:
    """Return the chunked cross-entropy on the mesh."""
    compute = functools.partial(xent_and_grads, vocab_size=vocab_size, z_weight=z_weight)
    out: XentSums = sharded_loss(ChunkedLoss(compute, (TOKEN_AXES, TOKEN_AXES), XentSums), x_BTD, w_VD, targets_BT, weights_BT)
    return out


def sharded_log_probs(
    x_BTD: Float[Array, "B T D"], w_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], vocab_size: int
) -> TokenScores:
    """Return the log-probability of each target, without a gradient, for evaluations."""

    def local(x: Array, w: Array, targets: Array) -> TokenScores:
        x, w = gather(x, w)
        return log_probs(x, w, targets, vocab_size=vocab_size, vocab_axes=mesh_axis("vocab"))

    out: Any = TokenScores(TOKEN_AXES, TOKEN_AXES)  # type: ignore[arg-type]
    return on_shards(local, [HIDDEN_AXES, TABLE_AXES, TOKEN_AXES], out)(x_BTD, w_VD, targets_BT)
