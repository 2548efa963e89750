"""Solve for the last readout of a reservoir model by ridge regression instead of training it.

The readout is linear in its weights, so a few batches give those that best predict the embedding of the next token:

    gram = sum f f',    cross = sum f y',    weights = (gram + strength * mean(diag gram) * I)^-1 cross,

with the layer's gated states f and the next token's embedding y, times the final norm's scale. The scale of the readout
in the residual stream is then chosen by the loss on one more batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.kits.reservoir.model import Reservoir
from nash_mhc.model.architectures import abstract_model
from nash_mhc.model.lm import kernel_for
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.parts import embed
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.sharding import for_compute, named_sharding, shardings

log = logging.getLogger(__name__)
_STRENGTH = 1e-3  # ridge strength, relative to a feature's mean square
_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)  # readout scales, relative to the input embeddings


class Normal(NamedTuple):
    """The sums of the normal equations. F = 2N: real and imaginary parts."""

    gram_FF: Float[Array, "F F"]
    cross_FD: Float[Array, "F D"]


def features(
    model: Reservoir, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"], execution: Execution
) -> Float[Array, "B T F"]:
    """Return the gated states that the last layer reads."""
    cfg = model.cfg
    x_BTD = embed(model.embed_VD, tokens_BT, jnp.dtype(execution.dtype)) * cfg.width**0.5
    kernel = kernel_for(execution, tokens_BT.shape[1], cfg.head_dim, cfg.window)
    layout = attention_layout(tokens_BT.shape, segments_BT, (1,), kernel, execution.most_documents)
    layer = lambda stack, index: for_compute(jax.tree.map(lambda a: a[index], stack), x_BTD.dtype)
    for number in range(cfg.layers - 1):
        x_BTD = layer(model.layers, number)(x_BTD, segments_BT, cfg, number)
        if cfg.attention_every and (number + 1) % cfg.attention_every == 0:
            x_BTD = layer(model.attention, number // cfg.attention_every)(x_BTD, layout, cfg, kernel)
    last = layer(model.layers, cfg.layers - 1)
    return jnp.concatenate(last.gated(*last.states(x_BTD, segments_BT, cfg, cfg.layers - 1)), axis=-1)


def sums(model: Reservoir, batch: Batch, execution: Execution) -> Normal:
    """Return the sums over a microbatch [B, T]."""
    f_BTF = features(model, batch.inputs, batch.segments, execution).astype(jnp.float32)
    target_BTD = embed(model.unembed_VD, batch.targets, jnp.float32) * model.cfg.width**0.5
    target_BTD = target_BTD * model.norm.scale_D[None, None]
    weighted_BTF = f_BTF * (batch.weights > 0)[..., None]
    # At full precision: the features are nearly parallel.
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return Normal(einsum("btf,btg->fg", weighted_BTF, f_BTF), einsum("btf,btd->fd", weighted_BTF, target_BTD))


def solutions(normal: Normal) -> list[np.ndarray]:
    """Return the readout [F, D] at several scales."""
    gram_FF, cross_FD = (np.asarray(a, np.float64) for a in normal)
    ridge = _STRENGTH * np.trace(gram_FF) / len(gram_FF)
    readout_FD = np.linalg.solve(gram_FF + ridge * np.eye(len(gram_FF)), cross_FD)
    return [(scale * readout_FD).astype(np.float32) for scale in _SCALES]


def put(model: Reservoir, readout_FD: Float[Array, "F D"]) -> Reservoir:
    halves = jnp.split(readout_FD, 2)
    places = lambda m: (m.layers.read_real_ND, m.layers.read_imaginary_ND)
    return eqx.tree_at(places, model, tuple(w.at[-1].set(half) for w, half in zip(places(model), halves, strict=True)))


def warm_start(cfg: RunConfig, source: RowSource, mesh: Mesh) -> Reservoir | None:
    """Return a fresh model with the best readout on the batch after the first `ridge_batches`; None without any."""
    from nash_mhc.train.device_batches import host_batches, prefetched  # deferred: a model needs no training
    from nash_mhc.train.step import make_objective

    model_cfg: Any = cfg.model
    if not (count := model_cfg.ridge_batches):
        return None
    on_mesh = shardings(abstract_model(model_cfg), mesh)
    init = jax.jit(lambda key: Reservoir.init(model_cfg, key=key), out_shardings=on_mesh)
    execution = Execution(cfg.train.dtype, "none", cfg.train.attention, source.most_documents)
    objective = make_objective(cfg.with_next_token(), source, most_documents=source.most_documents)

    @functools.partial(jax.jit, out_shardings=named_sharding(mesh))
    def batch_sums(model: Reservoir, batch: Batch) -> Normal:
        return jax.tree.map(lambda a: a.sum(axis=0), jax.lax.map(lambda part: sums(model, part, execution), batch))

    @jax.jit
    def loss(model: Reservoir, batch: Batch) -> Any:
        total = objective(model, jax.tree.map(lambda a: a[0], batch))[1].sums["loss"]
        return total.total / total.weight

    put_on_mesh = jax.jit(put, out_shardings=on_mesh)
    rows = host_batches(cfg.data, source, mesh, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed)
    with jax.set_mesh(mesh), contextlib.closing(rows):
        model = init(jax.random.key(cfg.train.seed))
        batches = prefetched(itertools.islice(rows, count + 1), mesh)
        each = (batch_sums(model, batch) for batch in itertools.islice(batches, count))
        in_float64 = (jax.tree.map(lambda a: np.asarray(a, np.float64), normal) for normal in each)
        total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), in_float64)
        last = next(batches)
        best = before = float(loss(model, last))
        for readout_FD in solutions(total):
            candidate = put_on_mesh(model, readout_FD)
            if (candidate_loss := float(loss(candidate, last))) < best or math.isnan(best):
                model, best = candidate, candidate_loss
    log.info(f"solved for weights with {count} batches: loss {before:.4f} -> {best:.4f} on the next batch")
    return model
