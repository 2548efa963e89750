"""What a sub-layer reads from the residual state and how its result is written back: plain addition, or mixed streams (mHC)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.ops import streams
from nash_mhc.ops.sinkhorn import balance, sinkhorn
from nash_mhc.parallel.sharding import constrain, param

State = Any  # x_BTD, or a tuple of R such arrays


class Maps(NamedTuple):
    """The three maps of one sub-layer, for each token, float32."""

    pre_RBT: Float[Array, "R B T"]
    post_RBT: Float[Array, "R B T"]
    res_RRBT: Float[Array, "R R B T"]
    unbalanced_BT: Float[Array, "B T"]  # how far Sinkhorn's columns were from 1 before `balance`


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
    """Manifold-constrained hyper-connection: y = f(H_pre X), X' = H_res X + H_post^T y, with H_res doubly stochastic."""

    phi_RDM: Float[Array, "R D M"] = param("streams", "embed", "maps")
    bias_M: Float[Array, "M"] = param("maps")
    alpha_3: Float[Array, "3"] = param("maps")  # of pre, post and res
    iterations: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> HyperConnection:
        R = cfg.streams
        # At the start every stream is read alike and written alike, and each keeps to itself.
        bias = [jnp.full(R, -math.log(R - 1.0)), jnp.zeros(R), 6.0 * jnp.eye(R).ravel()]
        phi = 0.02 * jax.random.normal(key, (R, cfg.width, R * R + 2 * R))
        return HyperConnection(phi, jnp.concatenate(bias), jnp.full(3, 0.01), cfg.sinkhorn_iterations, cfg.norm_eps)

    @staticmethod
    def enter(cfg: ModelConfig, x_BTD: Float[Array, "B T D"]) -> State:
        return (x_BTD,) * cfg.streams

    @staticmethod
    def leave(state: State) -> Float[Array, "B T D"]:
        return sum(x.astype(jnp.float32) for x in state).astype(state[0].dtype)

    def maps(self, state: State) -> Maps:
        R = len(state)
        h_MBT = streams.project(state, self.phi_RDM, self.eps)
        alpha_M = jnp.repeat(self.alpha_3, np.array([R, R, R * R]), total_repeat_length=R * R + 2 * R)
        h_MBT = alpha_M[:, None, None] * h_MBT + self.bias_M[:, None, None]
        res_RRBT = sinkhorn(h_MBT[2 * R :].reshape(R, R, *h_MBT.shape[1:]), self.iterations)
        res_RRBT = checkpoint_name(res_RRBT, streams.COEFFICIENTS)
        unbalanced_BT = jax.lax.stop_gradient(jnp.max(jnp.abs(jnp.sum(res_RRBT, axis=0) - 1.0), axis=0))
        pre_RBT, post_RBT = jax.nn.sigmoid(h_MBT[:R]), 2.0 * jax.nn.sigmoid(h_MBT[R : 2 * R])
        # Kept apart from the passes over the width, into whose loops a compiler would otherwise pull the exponentials.
        kept = jax.lax.optimization_barrier((pre_RBT, post_RBT, balance(res_RRBT)))
        pre_RBT, post_RBT, res_RRBT = (checkpoint_name(m, streams.COEFFICIENTS) for m in kept)
        return Maps(pre_RBT, post_RBT, res_RRBT, unbalanced_BT)

    def read(self, state: State) -> tuple[Float[Array, "B T D"], Any]:
        with jax.named_scope("mhc"):
            maps = self.maps(state)
            return constrain(streams.read(state, maps.pre_RBT), "batch", "time_split", "width"), maps

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        with jax.named_scope("mhc"):
            state = streams.write(state, y_BTD, maps.res_RRBT, maps.post_RBT)
        return tuple(constrain(x, "batch", "time_split", "width") for x in state)


def residual_class(cfg: ModelConfig) -> type[PlainResidual] | type[HyperConnection]:
    return HyperConnection if cfg.residual == "mhc" else PlainResidual
