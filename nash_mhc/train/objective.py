"""From a model and a batch to `(loss_sum, sums)`: sums over tokens, so that accumulated batches add up exactly.

A training mode is an objective. This one is next-token prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.ops.xent import XentSums, xent, xent_and_grads
from nash_mhc.parallel.sharding import mesh_axis, on_shards


class Batch(NamedTuple):
    """Packed rows. Segment 0 is padding; targets are the inputs moved by one within a document."""

    inputs: Int[Array, "*A B T"]
    targets: Int[Array, "*A B T"]
    segments: Int[Array, "*A B T"]
    weights: Float[Array, "*A B T"]  # of each target in the loss


class Sums(NamedTuple):
    """Sums over target tokens; divided by `weight` they are the reported means."""

    loss: Float[Array, ""]
    ce: Float[Array, ""]
    z: Float[Array, ""]
    sparsity: Float[Array, ""]
    correct: Float[Array, ""]
    weight: Float[Array, ""]


# Logical axes of what the loss takes and gives.
_X, _W, _TOKENS = ("batch", "time_split", "width"), ("vocab", "embed"), ("batch", "time")
_SCALARS: Any = XentSums(*((),) * 5)  # type: ignore[arg-type]


def _gather(x: Array, w: Array) -> tuple[Array, Array]:
    """This device's rows with all of T, and its vocabulary columns with all of D, in the compute dtype."""
    w = w.astype(x.dtype)
    for axis in mesh_axis("time_split"):
        x = lax.all_gather(x, axis, axis=1, tiled=True)
    for axis in mesh_axis("embed"):
        w = lax.all_gather(w, axis, axis=1, tiled=True)
    return x, w


def _over_batch(sums: XentSums) -> XentSums:
    return lax.psum(sums, mesh_axis("batch")) if mesh_axis("batch") else sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def sharded_xent(
    x_BTD: Float[Array, "B T D"],
    w_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    vocab_size: int,
    z_weight: float,
) -> XentSums:
    """Chunked cross-entropy on the mesh. Only `loss` carries a gradient; the other sums are for reports."""

    def local(x: Array, w: Array, targets: Array, weights: Array) -> XentSums:
        x, w = _gather(x, w)
        axes = mesh_axis("vocab")
        return _over_batch(xent(x, w, targets, weights, vocab_size=vocab_size, z_weight=z_weight, vocab_axes=axes))

    return on_shards(local, [_X, _W, _TOKENS, _TOKENS], _SCALARS)(x_BTD, w_VD, targets_BT, weights_BT)


def _forward(x_BTD, w_VD, targets_BT, weights_BT, vocab_size, z_weight):  # type: ignore[no-untyped-def]
    def local(x: Array, w: Array, targets: Array, weights: Array) -> tuple[XentSums, Array, Array]:
        x, w = _gather(x, w)
        sums, dx, dw = xent_and_grads(
            x, w, targets, weights, vocab_size=vocab_size, z_weight=z_weight, vocab_axes=mesh_axis("vocab")
        )
        # Each gradient goes home in one collective: summed where it is partial, split where its array is split.
        for axis in mesh_axis("time_split"):
            dx = lax.psum_scatter(dx, axis, scatter_dimension=1, tiled=True)
        for axis in mesh_axis("batch"):
            split = axis in mesh_axis("embed")
            dw = lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True) if split else lax.psum(dw, axis)
        return _over_batch(sums), dx, dw

    out = (_SCALARS, _X, _W)
    sums, dx_BTD, dw_VD = on_shards(local, [_X, _W, _TOKENS, _TOKENS], out)(x_BTD, w_VD, targets_BT, weights_BT)
    return sums, (dx_BTD, dw_VD.astype(w_VD.dtype))


def _backward(vocab_size, z_weight, grads, cotangent):  # type: ignore[no-untyped-def]
    dx_BTD, dw_VD = grads
    return (dx_BTD * cotangent.loss).astype(dx_BTD.dtype), dw_VD * cotangent.loss, None, None


sharded_xent.defvjp(_forward, _backward)


class Aux(NamedTuple):
    """What an objective reports beside its loss; accumulated parts add up."""

    sums: Sums
    health: dict[str, Array]  # see model/health.py; one row a layer


def next_token(
    model: LanguageModel, batch: Batch, *, execution: Execution, z_weight: float, penalties: Mapping[str, float] = {}
) -> tuple[Float[Array, ""], Aux]:
    """Cross-entropy of the next token, z-loss, and what the model itself has to be kept from, weighted by `penalties`."""
    x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
    out = sharded_xent(x_BTD, model.unembed_VD, batch.targets, batch.weights, model.cfg.vocab_size, z_weight)
    sparsity = jnp.zeros(())
    if penalties.get("sparsity", 0.0) > 0:
        sparsity = penalties["sparsity"] * model.penalties(report).get("sparsity", sparsity) * out.weight
    loss = out.loss + sparsity
    sums = Sums(loss, out.ce, z_weight * out.z, sparsity, out.correct, out.weight)
    return loss, Aux(sums, model.health(report))
