"""What a sub-layer reads from the residual state and how its result is written back:
plain addition, or mixed streams (mHC)."""

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
from nash_mhc.model.parts import init_small
from nash_mhc.ops import residual_streams
from nash_mhc.ops.residual_streams import Streams
from nash_mhc.ops.sinkhorn import Matrix, Vector
from nash_mhc.parallel.params import GATE, param
from nash_mhc.parallel.sharding import constrain, on_shards

# Logical axes: every token's streams and coefficients are its own, so each device works on its tokens alone.
_TOKENS = ("batch", "time_split", "width")
_MAPS, _SQUARES, _NUMBER = ("batch", "time_split", "maps"), ("batch", "time_split", "streams"), ("batch", "time_split")

READ = "stream_reading"  # checkpoint name of what a sub-layer reads: one [B, T, D] array instead of a pass over all streams


class StreamState(NamedTuple):
    """The residual state of mHC."""

    xs: Streams
    squares_BTR: Float[Array, "B T R"]  # of the streams, known since they were written


class Maps(NamedTuple):
    """The three maps of one sub-layer, for each token, float32."""

    all_BTM: Float[Array, "B T M"]
    unbalanced_BT: Float[Array, "B T"]  # how far Sinkhorn's columns were from 1 before they were balanced

    @property
    def pre(self) -> Vector:
        return residual_streams.coefficients(self.all_BTM)[0]

    @property
    def post(self) -> Vector:
        return residual_streams.coefficients(self.all_BTM)[1]

    @property
    def res(self) -> Matrix:
        return residual_streams.coefficients(self.all_BTM)[2]


State = Any  # x_BTD, or StreamState


class PlainResidual(eqx.Module):
    """x + f(x)."""

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> PlainResidual:
        return PlainResidual()

    @staticmethod
    def enter(cfg: ModelConfig, x_BTD: Float[Array, "B T D"]) -> State:
        return x_BTD

    @staticmethod
    def leave(state: State) -> Float[Array, "B T D"]:
        return state

    def read(self, state: State) -> tuple[Float[Array, "B T D"], Any]:
        return state, None

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        return state + y_BTD


class HyperConnection(eqx.Module):
    """Manifold-constrained hyper-connection:
    y = f(H_pre X), X' = H_res X + H_post^T y, with H_res doubly stochastic."""

    phi_RDM: Float[Array, "R D M"] = param("streams", "embed", "maps", role=GATE)
    bias_M: Float[Array, "M"] = param("maps", role=GATE)
    alpha_3: Float[Array, "3"] = param("maps", role=GATE)  # of pre, post and res
    iterations: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> HyperConnection:
        R = cfg.streams
        # At the start every stream is read alike and written alike, and each keeps to itself.
        bias = [jnp.full(R, -math.log(R - 1.0)), jnp.zeros(R), 6.0 * jnp.eye(R).ravel()]
        # What it makes of a normalised token is of size 1 at every width, and so is what alpha, as it learns,
        # makes of that.
        phi = init_small(key, (R, cfg.width, R * R + 2 * R), (R * cfg.width) ** -0.5)
        return HyperConnection(phi, jnp.concatenate(bias), jnp.full(3, 0.01), cfg.sinkhorn_iterations, cfg.norm_eps)

    @staticmethod
    def enter(cfg: ModelConfig, x_BTD: Float[Array, "B T D"]) -> State:
        xs = (x_BTD,) * cfg.streams
        return StreamState(xs, constrain(jax.lax.stop_gradient(residual_streams.squares(xs)), *_SQUARES))

    @staticmethod
    def leave(state: State) -> Float[Array, "B T D"]:
        return sum(x.astype(jnp.float32) for x in state.xs).astype(state.xs[0].dtype)

    def maps(self, state: State) -> Maps:
        R = len(state.xs)
        h_BTM = residual_streams.project(state.xs, state.squares_BTR, self.phi_RDM, self.eps)
        alpha_M = jnp.repeat(self.alpha_3, np.array([R, R, R * R]), total_repeat_length=R * R + 2 * R)
        logits_BTM = alpha_M[None, None] * h_BTM + self.bias_M[None, None]
        to_maps = on_shards(functools.partial(residual_streams.maps, iterations=self.iterations), [_MAPS], (_MAPS, _NUMBER))
        # Kept apart from the passes over the width, into whose loops a compiler would otherwise pull the exponentials;
        # and kept for the backward pass.
        name = functools.partial(checkpoint_name, name=residual_streams.COEFFICIENTS)
        return Maps(*jax.tree.map(name, jax.lax.optimization_barrier(to_maps(logits_BTM))))

    def read(self, state: State) -> tuple[Float[Array, "B T D"], Any]:
        with jax.named_scope("mhc"):
            maps = self.maps(state)
            return checkpoint_name(constrain(residual_streams.read(state.xs, maps.all_BTM), *_TOKENS), READ), maps

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        with jax.named_scope("mhc"):
            all_streams = (_TOKENS,) * len(state.xs)
            write = on_shards(residual_streams.write, [all_streams, _TOKENS, _MAPS], (all_streams, _SQUARES))
            return StreamState(*write(state.xs, y_BTD, maps.all_BTM))


def residual_class(cfg: ModelConfig) -> type[PlainResidual] | type[HyperConnection]:
    return HyperConnection if cfg.residual == "mhc" else PlainResidual
