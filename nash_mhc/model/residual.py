"""Residual connections: plain addition, or several mixed streams (mHC).

A sub-layer reads its input from the residual state with `read` and adds its output with `write`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.parts import RMSNorm, init_small
from nash_mhc.ops import residual_streams
from nash_mhc.ops.doubly_stochastic import Matrix, Vector
from nash_mhc.ops.platform import is_gpu
from nash_mhc.ops.residual_streams import Streams
from nash_mhc.parallel.params import GATE, param
from nash_mhc.parallel.sharding import constrain, on_shards

# Logical axes. Tokens are independent, so each device works on its own tokens.
_TOKENS = ("batch", "time_split", "width")
_MAPS, _SQUARES, _NUMBER = ("batch", "time_split", "maps"), ("batch", "time_split", "streams"), ("batch", "time_split")

_WIDTH, _WIDTH_SUMS = ("width",), ("batch", "time_split", "width")
_PHI, _PHI_SUMS = ("streams", "width", "maps"), ("batch", "time_split", "streams", "width", "maps")

READ = "stream_reading"  # checkpoint name of a sub-layer's input: one [B, T, D] array instead of a pass over all streams
COEFFICIENTS = "stream_coefficients"  # checkpoint name of a few values per token that cost a pass over all streams


class StreamState(NamedTuple):
    """The residual state of mHC."""

    xs: Streams
    squares_BTR: Float[Array, "B T R"]  # sums of squares of the streams, computed when they were written


class Maps(NamedTuple):
    """The three maps of one sub-layer per token, in float32, and the streams to which they apply."""

    all_BTM: Float[Array, "B T M"]
    xs: Streams  # for `write_streams` only, which defines an unusual gradient for them

    @property
    def pre(self) -> Vector:
        return residual_streams.coefficients(self.all_BTM)[0]

    @property
    def post(self) -> Vector:
        return residual_streams.coefficients(self.all_BTM)[1]

    @property
    def res(self) -> Matrix:
        return residual_streams.coefficients(self.all_BTM)[2]


class Projection(NamedTuple):
    """The parameters that project a token's streams to the logits of its maps: alpha * (x @ phi) / rms(x) + bias."""

    phi_RDM: Float[Array, "R D M"]
    alpha_M: Float[Array, "M"]
    bias_M: Float[Array, "M"]


def _named(x: Any) -> Any:
    return jax.tree.map(functools.partial(checkpoint_name, name=COEFFICIENTS), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def read_streams(
    eps: float, xs: Streams, squares_BTR: Float[Array, "B T R"], projection: Projection
) -> tuple[Float[Array, "B T D"], Maps]:
    """Return (the input of a sub-layer, its maps).

    `squares_BTR` are the sums of squares of the streams, known since they were written. The backward pass computes the
    whole gradient of the streams in one pass: from reading, from the projection (through the rms, too), and from
    writing, whose gradient `write_streams` passes on before the mixing.
    """
    return _read_forward(eps, xs, squares_BTR, projection)[0]


def _maps_of(eps: float, xs: Streams, squares_BTR: Array, projection: Projection) -> tuple[Maps, tuple[Array, Array]]:
    """Return (the maps, the residuals of their gradient)."""
    size, streams = len(xs) * xs[0].shape[-1], (_TOKENS,) * len(xs)
    products_BTM = _named(on_shards(residual_streams.products, [streams, _PHI], _MAPS)(xs, projection.phi_RDM))
    scale_BT = _named(jax.lax.rsqrt(jnp.sum(squares_BTR, axis=-1) / size + eps))
    to_maps = on_shards(residual_streams.maps, [_MAPS], _MAPS)
    # Dividing after the product saves a pass over the streams. The barrier keeps XLA from moving the exponentials of
    # the maps into loops over the width.
    logits_BTM = projection.alpha_M[None, None] * (products_BTM * scale_BT[..., None]) + projection.bias_M[None, None]
    maps_BTM = _named(jax.lax.optimization_barrier(to_maps(logits_BTM)))
    return Maps(maps_BTM, xs), (products_BTM, scale_BT)


def _read_forward(eps, xs, squares_BTR, projection):  # type: ignore[no-untyped-def]
    maps, residuals = _maps_of(eps, xs, squares_BTR, projection)
    x_BTD = checkpoint_name(constrain(residual_streams.read(xs, maps.all_BTM), *_TOKENS), READ)
    return (x_BTD, maps), (xs, projection, residuals, maps.all_BTM)


def _read_backward(eps, saved, cotangents):  # type: ignore[no-untyped-def]
    dx_BTD, dmaps = cotangents
    return _gradients(saved, dx_BTD, residual_streams.read_sums(saved[0], dx_BTD), dmaps)


def _gradients(saved: tuple[Any, ...], dx_BTD: Array, dpre_BTR: Array, dmaps: Maps) -> tuple[Streams, Array, Projection]:
    """Return the gradients of the arguments of `read_streams`, from those of its input, of pre, and of the maps."""
    xs, projection, (products_BTM, scale_BT), maps_BTM = saved
    R, size, streams = len(xs), len(xs) * xs[0].shape[-1], (_TOKENS,) * len(xs)
    dmaps_BTM = dmaps.all_BTM + jnp.pad(dpre_BTR, ((0, 0), (0, 0), (0, maps_BTM.shape[-1] - R)))
    to_logits = on_shards(residual_streams.maps_backward, [_MAPS, _MAPS], _MAPS)
    dlogits_BTM = jax.lax.optimization_barrier(to_logits(maps_BTM, dmaps_BTM))
    dh_BTM = dlogits_BTM * projection.alpha_M[None, None]
    along_BT = -jnp.sum(dh_BTM * products_BTM, axis=-1) * scale_BT**3 / size
    dproducts_BTM = (dh_BTM * scale_BT[..., None]).astype(xs[0].dtype)
    gradient = on_shards(
        residual_streams.gradient, [streams, streams, _TOKENS, _MAPS, _MAPS, _NUMBER, _PHI], (streams, _PHI_SUMS)
    )
    dxs, dphi = gradient(xs, dmaps.xs, dx_BTD, maps_BTM, dproducts_BTM, along_BT, projection.phi_RDM)
    over_tokens = lambda x_BTM: jnp.sum(x_BTM, axis=(0, 1))
    sums = over_tokens(dphi), over_tokens(dlogits_BTM * products_BTM * scale_BT[..., None]), over_tokens(dlogits_BTM)
    dprojection = Projection(*(d.astype(w.dtype) for d, w in zip(sums, projection, strict=True)))
    return dxs, jnp.zeros((*scale_BT.shape, R), scale_BT.dtype), dprojection


read_streams.defvjp(_read_forward, _read_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def read_and_norm_streams(
    eps: float, xs: Streams, squares_BTR: Float[Array, "B T R"], projection: Projection, scale_D: Float[Array, "D"]
) -> tuple[Float[Array, "B T D"], Maps]:
    """Compute `read_streams` and its RMSNorm with GPU kernels.

    Forward and backward each read the streams once and never store the unnormalized input. The result is saved, so
    remat recomputes nothing of it.
    """
    return _read_and_norm_forward(eps, xs, squares_BTR, projection, scale_D)[0]


def _read_and_norm_forward(eps, xs, squares_BTR, projection, scale_D):  # type: ignore[no-untyped-def]
    maps, residuals = _maps_of(eps, xs, squares_BTR, projection)
    streams = (_TOKENS,) * len(xs)
    read = functools.partial(residual_streams.read_and_norm, eps=eps)
    normed_BTD, inverse_BT = on_shards(read, [streams, _MAPS, _WIDTH], (_TOKENS, _NUMBER))(xs, maps.all_BTM, scale_D)
    normed_BTD = checkpoint_name(constrain(normed_BTD, *_TOKENS), READ)
    return (normed_BTD, maps), ((xs, projection, residuals, maps.all_BTM), scale_D, _named(inverse_BT))


def _read_and_norm_backward(eps, saved, cotangents):  # type: ignore[no-untyped-def]
    read, scale_D, inverse_BT = saved
    xs, maps_BTM = read[0], read[-1]
    streams = (_TOKENS,) * len(xs)
    backward = on_shards(
        residual_streams.read_and_norm_backward, [streams, _MAPS, _WIDTH, _NUMBER, _TOKENS], (_TOKENS, _SQUARES, _WIDTH_SUMS)
    )
    dnormed_BTD, dmaps = cotangents
    dx_BTD, dpre_BTR, dscale = backward(xs, maps_BTM, scale_D, inverse_BT, dnormed_BTD)
    return *_gradients(read, dx_BTD, dpre_BTR, dmaps), jnp.sum(dscale, axis=(0, 1)).astype(scale_D.dtype)


read_and_norm_streams.defvjp(_read_and_norm_forward, _read_and_norm_backward)


@jax.custom_vjp
def write_streams(
    xs: Streams, y_BTD: Float[Array, "B T D"], maps_BTM: Float[Array, "B T M"]
) -> tuple[Streams, Float[Array, "B T R"]]:
    """Return (new streams, their sums of squares without gradient). Stream i is sum_j res[i][j] stream j + post[i] y.

    `xs` must be `Maps.xs`. Their "gradient" here is that of the new streams, unmixed: the backward pass of
    `read_streams` mixes it, which saves storing and reading it once more.
    """
    streams = (_TOKENS,) * len(xs)
    return on_shards(residual_streams.write, [streams, _TOKENS, _MAPS], (streams, _SQUARES))(xs, y_BTD, maps_BTM)


def _write_forward(xs, y_BTD, maps_BTM):  # type: ignore[no-untyped-def]
    return write_streams(xs, y_BTD, maps_BTM), (xs, y_BTD, maps_BTM)


def _write_backward(saved, cotangents):  # type: ignore[no-untyped-def]
    douts, _ = cotangents
    streams = (_TOKENS,) * len(douts)
    sums = on_shards(residual_streams.write_sums, [streams, _TOKENS, _MAPS, streams], (_TOKENS, _MAPS))
    return douts, *sums(*saved, douts)


write_streams.defvjp(_write_forward, _write_backward)


State = Any  # x_BTD, or StreamState


class PlainResidual(eqx.Module):
    """x + f(x)."""

    @staticmethod
    def flops_per_token(cfg: ModelConfig) -> float:
        """Return matmul FLOPs of one training token in one sub-layer."""
        return 0.0

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> PlainResidual:
        return PlainResidual()

    @staticmethod
    def enter(cfg: ModelConfig, x_BTD: Float[Array, "B T D"]) -> State:
        return x_BTD

    @staticmethod
    def leave(state: State) -> Float[Array, "B T D"]:
        return state

    def read(self, state: State, norm: RMSNorm) -> tuple[Float[Array, "B T D"], Any]:
        """Return (the normalized input of a sub-layer, the maps for `write`)."""
        return norm(state), None

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        return state + y_BTD


class HyperConnection(eqx.Module):
    """Manifold-constrained hyper-connection: y = f(H_pre X), X' = H_res X + H_post^T y, H_res doubly stochastic."""

    phi_RDM: Float[Array, "R D M"] = param("streams", "embed", "maps", role=GATE)
    bias_M: Float[Array, "M"] = param("maps", role=GATE)
    alpha_3: Float[Array, "3"] = param("maps", role=GATE)  # for pre, post and res
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> HyperConnection:
        R = cfg.streams
        # Initially all streams are read and written equally, and are not mixed.
        bias = [jnp.full(R, -math.log(R - 1.0)), jnp.zeros(R), 6.0 * jnp.eye(R).ravel()]
        # phi maps a normalized token to values of size 1 at every width.
        phi = init_small(key, (R, cfg.width, R * R + 2 * R), (R * cfg.width) ** -0.5)
        return HyperConnection(phi, jnp.concatenate(bias), jnp.full(3, 0.01), cfg.norm_eps)

    @staticmethod
    def flops_per_token(cfg: ModelConfig) -> float:
        return 6.0 * cfg.streams * cfg.width * (cfg.streams**2 + 2 * cfg.streams)

    @staticmethod
    def enter(cfg: ModelConfig, x_BTD: Float[Array, "B T D"]) -> State:
        xs = (x_BTD,) * cfg.streams
        return StreamState(xs, constrain(jax.lax.stop_gradient(residual_streams.squares(xs)), *_SQUARES))

    @staticmethod
    def leave(state: State) -> Float[Array, "B T D"]:
        return sum(x.astype(jnp.float32) for x in state.xs).astype(state.xs[0].dtype)

    def read(self, state: State, norm: RMSNorm) -> tuple[Float[Array, "B T D"], Any]:
        R = len(state.xs)
        alpha_M = jnp.repeat(self.alpha_3, np.array([R, R, R * R]), total_repeat_length=R * R + 2 * R)
        with jax.named_scope("mhc"):
            args = self.eps, *state, Projection(self.phi_RDM, alpha_M, self.bias_M)
            devices = max(jax.sharding.get_abstract_mesh().size, 1)
            if is_gpu() and residual_streams.fits_norm(state.xs[0], devices) and norm.eps == self.eps:
                return read_and_norm_streams(*args, norm.scale_D)
            x_BTD, maps = read_streams(*args)
        return norm(x_BTD), maps

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        with jax.named_scope("mhc"):
            return StreamState(*write_streams(maps.xs, y_BTD, maps.all_BTM))
