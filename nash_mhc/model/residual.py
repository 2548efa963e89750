"""What a sub-layer reads from the residual state and how its result is written back: plain addition, or mixed streams (mHC)."""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.ops import streams
from nash_mhc.ops.streams import Maps
from nash_mhc.parallel.sharding import constrain, on_shards, param

# Logical axes: every token's streams and coefficients are its own, so each device works on its tokens alone.
_TOKENS, _COEFFICIENT = ("batch", "time_split", "width"), ("batch", "time_split")

State = Any  # x_BTD, or a tuple of R such arrays


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
        h_BTM = streams.project(state, self.phi_RDM, self.eps)
        alpha_M = jnp.repeat(self.alpha_3, np.array([R, R, R * R]), total_repeat_length=R * R + 2 * R)
        logits_BTM = alpha_M[None, None] * h_BTM + self.bias_M[None, None]
        out_axes: Any = Maps._make([(_COEFFICIENT,) * R, (_COEFFICIENT,) * R, ((_COEFFICIENT,) * R,) * R, _COEFFICIENT])
        to_maps = on_shards(functools.partial(streams.maps, iterations=self.iterations), [(*_COEFFICIENT, "maps")], out_axes)
        # Kept apart from the passes over the width, into whose loops a compiler would otherwise pull the exponentials; and
        # kept for the backward pass.
        name = functools.partial(checkpoint_name, name=streams.COEFFICIENTS)
        return jax.tree.map(name, jax.lax.optimization_barrier(to_maps(logits_BTM)))

    def read(self, state: State) -> tuple[Float[Array, "B T D"], Any]:
        with jax.named_scope("mhc"):
            maps = self.maps(state)
            return constrain(streams.read(state, maps.pre), *_TOKENS), maps

    def write(self, state: State, y_BTD: Float[Array, "B T D"], maps: Any) -> State:
        with jax.named_scope("mhc"):
            R = len(state)
            axes = [(_TOKENS,) * R, _TOKENS, ((_COEFFICIENT,) * R,) * R, (_COEFFICIENT,) * R]
            write = on_shards(streams.write, axes, (_TOKENS,) * R)
            return write(state, y_BTD, maps.res, maps.post)


def residual_class(cfg: ModelConfig) -> type[PlainResidual] | type[HyperConnection]:
    return HyperConnection if cfg.residual == "mhc" else PlainResidual
