"""The last readout of a reservoir model solved for, instead of learned: what made reservoirs quick to train.

A readout is linear in its weights, and what it reads depends on nothing that is trained after it. So one pass over some
batches gives the weights whose output is nearest to the next tokens' rows of the output table: two sums over tokens,

    gram = sum f f',    cross = sum f y',    weights = (gram + strength * mean(diag gram) * I)^-1 cross,

with f what the layer's gates let through, and y the next token's row, as the final norm will turn it. How large what is
read shall be beside the rest of the residual stream, least squares do not say: the loss of one more batch does.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nash_mhc.kits.reservoir.model import Reservoir
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.attention import attention_layout
from nash_mhc.model.lm import kernel_for
from nash_mhc.model.parts import embed
from nash_mhc.model.protocol import Execution, WarmStart
from nash_mhc.parallel.sharding import for_compute

_STRENGTH = 1e-3  # of the ridge, in units of a feature's mean square
_SIZES = (0.5, 1.0, 2.0, 4.0, 8.0)  # of what is read, beside embeddings as tokens enter by


class Normal(NamedTuple):
    """The two sums that a least-squares problem comes down to; F = 2N: both parts of every unit."""

    gram_FF: Float[Array, "F F"]
    cross_FD: Float[Array, "F D"]


def features(
    model: Reservoir, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"], execution: Execution
) -> Float[Array, "B T F"]:
    """What the last layer reads."""
    cfg = model.cfg
    x_BTD = embed(model.embed_VD, tokens_BT, jnp.dtype(execution.dtype)) * cfg.width**0.5
    kernel = kernel_for(execution, tokens_BT.shape[1], cfg.head_dim, cfg.window)
    layout = attention_layout(tokens_BT.shape, segments_BT, (1,), kernel, execution.most_documents)
    at = lambda stack, index: for_compute(jax.tree.map(lambda a: a[index], stack), x_BTD.dtype)
    for number in range(cfg.layers - 1):
        x_BTD = at(model.layers, number)(x_BTD, segments_BT, cfg, number)
        if cfg.attention_every and (number + 1) % cfg.attention_every == 0:
            x_BTD = at(model.attention, number // cfg.attention_every)(x_BTD, layout, cfg, kernel)
    last = at(model.layers, cfg.layers - 1)
    return jnp.concatenate(last.gated(*last.states(x_BTD, segments_BT, cfg, cfg.layers - 1)), axis=-1)


def sums(
    model: Reservoir,
    tokens_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    execution: Execution,
) -> Normal:
    f_BTF = features(model, tokens_BT, segments_BT, execution).astype(jnp.float32)
    wanted_BTD = embed(model.unembed_VD, targets_BT, jnp.float32) * model.cfg.width**0.5
    wanted_BTD = wanted_BTD * model.norm.scale_D[None, None]
    weighed_BTF = f_BTF * (weights_BT > 0)[..., None]
    # Exactly: these are squares of what is nearly parallel.
    summed = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return Normal(summed("btf,btg->fg", weighed_BTF, f_BTF), summed("btf,btd->fd", weighed_BTF, wanted_BTD))


def solutions(normal: Normal) -> list[np.ndarray]:
    """The readout, [F, D], in several sizes."""
    gram_FF, cross_FD = (np.asarray(a, np.float64) for a in normal)
    ridge = _STRENGTH * np.trace(gram_FF) / len(gram_FF)
    readout_FD = np.linalg.solve(gram_FF + ridge * np.eye(len(gram_FF)), cross_FD)
    return [(size * readout_FD).astype(np.float32) for size in _SIZES]


def put(model: Reservoir, readout_FD: Float[Array, "F D"]) -> Reservoir:
    halves = jnp.split(readout_FD, 2)
    places = lambda m: (m.layers.read_real_ND, m.layers.read_imaginary_ND)
    return eqx.tree_at(places, model, tuple(w.at[-1].set(half) for w, half in zip(places(model), halves, strict=True)))


def warm_start(cfg: ReservoirConfig) -> WarmStart | None:
    return WarmStart(cfg.ridge_batches, sums, solutions, put) if cfg.ridge_batches else None
