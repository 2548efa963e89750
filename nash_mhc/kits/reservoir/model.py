"""A language model of reservoirs: frozen random recurrences with trained gates, readouts and MLPs.

A layer's reservoir has N complex units, the eigenmodes of a ring with spectral radius `radius`:

    h_t = m h_{t-1} + sqrt(1 - |m|^2) W_in u_t,     m = 1 - leak + leak * radius * e^(2 pi i (n + 1/2) / N)

The root keeps states of every time scale at the size of the input. A trained readout reads both parts of every unit,
gated by the token. With `unit tanh`, the two parts are real units in rings, with the same leaks and radius.

W_in is not a parameter. It is generated from a seed where it is used: the same on every mesh and after a restart, and
in no checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.kits.reservoir.scans import complex_product, linear_scan, tanh_scan, tanh_step
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.kv_cache import KeyValues, TokenAt
from nash_mhc.model.lm import TABLE_SCALE, kernel_for, stacks_of_group
from nash_mhc.model.mixers.attention import Attention, AttentionLayout, attention_layout
from nash_mhc.model.parts import RMSNorm, SwiGLU, embed, init_matrix, logits_of
from nash_mhc.model.protocol import Execution, RandomWeights
from nash_mhc.model.remat import remat_policy
from nash_mhc.model.weights import project
from nash_mhc.parallel.params import TABLE, param, stacked
from nash_mhc.parallel.sharding import constrain, for_compute, on_shards


def leaks(cfg: ReservoirConfig) -> np.ndarray:
    """Return the leak of every unit [N], geometrically spaced.

    Multiples of the golden ratio distribute the leaks over the ring, so that every time scale has all angles.
    """
    return cfg.leak * (cfg.slowest_leak / cfg.leak) ** (np.arange(cfg.units) * (math.sqrt(5) - 1) / 2 % 1.0)


def multipliers(cfg: ReservoirConfig) -> np.ndarray:
    """Return m of every unit, complex [N]."""
    eigenvalue = cfg.radius * np.exp(2j * math.pi * (np.arange(cfg.units) + 0.5) / cfg.units)
    return 1 - leaks(cfg) + leaks(cfg) * eigenvalue


def ring_weights(cfg: ReservoirConfig) -> Float[Array, "2 N"]:
    """Return the weights of rings of tanh units: the radius, with signs that make the two rings of a pair differ."""
    signs = np.stack([np.ones(cfg.units), np.where(np.arange(cfg.units) % cfg.ring == 0, -1.0, 1.0)])
    return jnp.asarray(cfg.radius * signs, jnp.float32)


def states(cfg: ReservoirConfig, driven_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]) -> Array:
    """Return the states [2, B, T, N] of a reservoir driven by these inputs."""
    if cfg.unit == "linear":
        unit_axes, state_axes = ("vector", "reservoir"), ("vector", "batch", "time", "reservoir")
        # On a GPU this is a kernel, which XLA cannot shard.
        run = on_shards(linear_scan, [unit_axes, state_axes, ("batch", "time")], state_axes)
        return run(pairs(multipliers(cfg)), driven_2BTN, segments_BT)
    return tanh_scan(ring_weights(cfg), jnp.asarray(leaks(cfg), jnp.float32), driven_2BTN, segments_BT, cfg.ring)


def next_state(cfg: ReservoirConfig, h_2BN: Float[Array, "2 B N"], driven_2BN: Float[Array, "2 B N"]) -> Array:
    """Return the state after one more token."""
    if cfg.unit == "linear":
        return complex_product(pairs(multipliers(cfg))[:, None], h_2BN) + driven_2BN
    return tanh_step(ring_weights(cfg), jnp.asarray(leaks(cfg), jnp.float32), h_2BN, driven_2BN, cfg.ring)


def pairs(numbers: np.ndarray) -> Float[Array, "2 N"]:
    """Return complex numbers as pairs of real and imaginary parts."""
    return jnp.asarray(np.stack([numbers.real, numbers.imag]), jnp.float32)


def input_matrix(cfg: ReservoirConfig, layer: Int[Array, ""] | int) -> Float[Array, "D 2 N"]:
    """Return W_in of a layer, real and imaginary parts, scaled to preserve the size of the input.

    The distribution is uniform because its bits are the same on every device.
    """
    key = jax.random.fold_in(jax.random.key(cfg.reservoir_seed), layer)
    drawn_DCN = jax.random.uniform(key, (cfg.width, 2, cfg.units), jnp.float32, -1.0, 1.0)
    return constrain(drawn_DCN * math.sqrt(1.5 / cfg.width), "width", "vector", "reservoir")


class ReservoirLayer(eqx.Module):
    norm: RMSNorm
    gate_DN: Float[Array, "D N"] = param("embed", "reservoir")
    read_real_ND: Float[Array, "N D"] = param("reservoir", "embed")
    read_imaginary_ND: Float[Array, "N D"] = param("reservoir", "embed")
    ffn_norm: RMSNorm
    ffn: SwiGLU

    @staticmethod
    def init(cfg: ReservoirConfig, *, key: PRNGKeyArray) -> ReservoirLayer:
        gate, real, imaginary, ffn = jax.random.split(key, 4)
        D, N = cfg.width, cfg.units
        norm = functools.partial(RMSNorm.init, D, cfg.norm_eps)
        small = (2 * cfg.layers) ** -0.5
        return ReservoirLayer(
            norm(), init_matrix(gate, (D, N), D), init_matrix(real, (N, D), 2 * N, small),
            init_matrix(imaginary, (N, D), 2 * N, small), norm(), SwiGLU.init(cfg, key=ffn),
        )  # fmt: skip

    def driven(self, u_BTD: Array, cfg: ReservoirConfig, input_D2N: Float[Array, "D 2 N"]) -> Float[Array, "2 B T N"]:
        """Return the inputs of the units, in float32 because they accumulate over many tokens."""
        parts_2BTN = jnp.einsum("btd,dcn->cbtn", u_BTD.astype(jnp.float32), input_D2N)
        parts_2BTN = constrain(parts_2BTN, "vector", "batch", "time", "reservoir")
        if cfg.unit == "tanh":  # tanh bounds the states
            return parts_2BTN
        strength_N = np.sqrt(np.maximum(1 - np.abs(multipliers(cfg)) ** 2, 1e-6)).astype(np.float32)
        return parts_2BTN * jnp.asarray(strength_N)[None, None, None]

    def gated(self, u_BTD: Array, h_2BTN: Float[Array, "2 B T N"]) -> tuple[Array, Array]:
        """Return both parts of the states, gated by the tokens."""
        gate_BTN = jax.nn.sigmoid(constrain(project(u_BTD, self.gate_DN), "batch", "time", "reservoir"))
        real, imaginary = (gate_BTN * part.astype(u_BTD.dtype) for part in h_2BTN)
        return real, imaginary

    def read(self, u_BTD: Array, h_2BTN: Float[Array, "2 B T N"]) -> Array:
        real, imaginary = self.gated(u_BTD, h_2BTN)
        sum_BTD = project(real, self.read_real_ND, "btn,nd->btd") + project(imaginary, self.read_imaginary_ND, "btn,nd->btd")
        return constrain(sum_BTD, "batch", "time_split", "width")

    def states(self, x_BTD: Array, segments_BT: Array, cfg: ReservoirConfig, layer: Array | int) -> tuple[Array, Array]:
        """Return (normed input [B, T, D], states [2, B, T, N])."""
        u_BTD = constrain(self.norm(x_BTD), "batch", "time", "width")
        return u_BTD, states(cfg, self.driven(u_BTD, cfg, input_matrix(cfg, layer)), segments_BT)

    def __call__(self, x_BTD: Array, segments_BT: Array, cfg: ReservoirConfig, layer: Array | int) -> Array:
        u_BTD, h_2BTN = self.states(x_BTD, segments_BT, cfg, layer)
        x_BTD = x_BTD + self.read(u_BTD, h_2BTN)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class AttentionLayer(eqx.Module):
    """Attention between reservoirs, to look up what they have forgotten."""

    norm: RMSNorm
    attention: Attention

    @staticmethod
    def init(cfg: ReservoirConfig, *, key: PRNGKeyArray) -> AttentionLayer:
        return AttentionLayer(RMSNorm.init(cfg.width, cfg.norm_eps), Attention.init(cfg, key=key))

    def __call__(self, x_BTD: Array, layout: AttentionLayout, cfg: ReservoirConfig, kernel: str) -> Array:
        return x_BTD + self.attention(self.norm(x_BTD), layout, window=cfg.window, kernel=kernel)


class Group(NamedTuple):
    """Consecutive layers, and the attention after them."""

    numbers: tuple[Int[Array, "..."], ...]
    layers: tuple[ReservoirLayer, ...]
    attention: AttentionLayer | None


class Reservoir(eqx.Module):
    embed_VD: Float[Array, "V D"] = param("vocab", "embed", role=TABLE)
    layers: ReservoirLayer = stacked("layers")
    attention: AttentionLayer | None = stacked("layers")
    norm: RMSNorm
    cfg: ReservoirConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg: ReservoirConfig, *, key: PRNGKeyArray) -> Reservoir:
        table, layers = jax.random.split(key)
        stack = jax.vmap(lambda k: ReservoirLayer.init(cfg, key=k))(jax.random.split(layers, cfg.layers))
        attention = None
        if cfg.attention_every:
            keys = jax.random.split(jax.random.fold_in(layers, 1), cfg.layers // cfg.attention_every)
            attention = jax.vmap(lambda k: AttentionLayer.init(cfg, key=k))(keys)
        # As in `LM`: with half of the signs flipped, tied embeddings do not predict the input token.
        signs_D = jnp.where(jnp.arange(cfg.width) % 2 == 0, 1.0, -1.0)
        embed_VD = init_matrix(table, (cfg.padded_vocab, cfg.width), cfg.width, TABLE_SCALE)
        return Reservoir(embed_VD, stack, attention, RMSNorm(signs_D, cfg.norm_eps), cfg)

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        return self.embed_VD

    def hidden(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None, execution: Execution = Execution()
    ) -> tuple[Float[Array, "B T D"], None]:
        segments_BT = jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
        x_BTD = embed(self.embed_VD, tokens_BT, jnp.dtype(execution.dtype)) * self.cfg.width**0.5

        kernel = kernel_for(execution, tokens_BT.shape[1], self.cfg.head_dim, self.cfg.window)
        layout = attention_layout(tokens_BT.shape, segments_BT, (1,), kernel, execution.most_documents)

        # Layer by layer, so that the backward pass recomputes one layer at a time.
        remat = functools.partial(jax.checkpoint, policy=remat_policy(execution.remat))

        @remat
        def apply(x_BTD: Array, layer: ReservoirLayer, number: Array) -> Array:
            return for_compute(layer, x_BTD.dtype)(x_BTD, segments_BT, self.cfg, number)

        @remat
        def attend(x_BTD: Array, layer: AttentionLayer) -> Array:
            return for_compute(layer, x_BTD.dtype)(x_BTD, layout, self.cfg, kernel)

        def body(x_BTD: Array, group: Group) -> tuple[Array, None]:
            for number, layer in zip(group.numbers, group.layers, strict=True):
                x_BTD = apply(x_BTD, layer, number)
            return x_BTD if group.attention is None else attend(x_BTD, group.attention), None

        x_BTD, _ = jax.lax.scan(body, x_BTD, self.groups(), unroll=execution.unroll)
        return self.norm(x_BTD), None

    def groups(self) -> Group:
        """Return the layers by group, for a scan."""
        size = self.cfg.attention_every or 1
        return Group(stacks_of_group(jnp.arange(self.cfg.layers), size), stacks_of_group(self.layers, size), self.attention)

    def health(self, report: None) -> dict[str, Array]:
        return {}

    def auxiliary_losses(self, report: None) -> dict[str, Array]:
        return {}


class ReservoirState(eqx.Module):
    """The decoding state. It caches W_in, whose generation would dominate the time per token.

    Its size is constant, except for attention without a window, whose cache holds `seq_len` tokens.
    """

    h_L2BN: Float[Array, "L 2 B N"]
    input_LD2N: Float[Array, "L D 2 N"]
    position: Int[Array, ""]
    rows: KeyValues | None
    seq_len: int = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)


def empty_state(cfg: ReservoirConfig, batch: int, seq_len: int, dtype: Any) -> ReservoirState:
    input_LD2N = jax.vmap(lambda layer: input_matrix(cfg, layer))(jnp.arange(cfg.layers))
    rows = None
    if cfg.attention_every:
        shape = (cfg.layers // cfg.attention_every, batch, cfg.heads, min(cfg.window or seq_len, seq_len), cfg.head_dim)
        rows = KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    h_L2BN = jnp.zeros((cfg.layers, 2, batch, cfg.units))
    return ReservoirState(h_L2BN, input_LD2N, jnp.zeros((), jnp.int32), rows, seq_len, jnp.dtype(dtype))


def decode(model: Reservoir, state: ReservoirState, tokens_B: Int[Array, "B"]) -> tuple[Array, ReservoirState]:
    """Return (logits of the next tokens, the state after these tokens). A full attention cache gives NaN."""
    cfg, t, size = model.cfg, state.position, model.cfg.attention_every or 1
    x_B1D = embed(model.embed_VD, tokens_B[:, None], state.dtype) * cfg.width**0.5

    def apply(x_B1D: Array, layer: ReservoirLayer, input_D2N: Array, h_2BN: Array) -> tuple[Array, Array]:
        layer = for_compute(layer, x_B1D.dtype)
        u_B1D = layer.norm(x_B1D)
        h_2BN = next_state(cfg, h_2BN, layer.driven(u_B1D, cfg, input_D2N)[:, :, 0])
        x_B1D = x_B1D + layer.read(u_B1D, h_2BN[:, :, None])
        return x_B1D + layer.ffn(layer.ffn_norm(x_B1D)), h_2BN

    def body(carry: tuple[Array, KeyValues | None], inputs: Any) -> tuple[tuple[Array, KeyValues | None], Any]:
        (x_B1D, rows), (group, index, inputs_D2N, before_2BN) = carry, inputs
        after_2BN = []
        for layer, input_D2N, h_2BN in zip(group.layers, inputs_D2N, before_2BN, strict=True):
            x_B1D, next_2BN = apply(x_B1D, layer, input_D2N, h_2BN)
            after_2BN.append(next_2BN)
        if group.attention is not None and rows is not None:
            layer = for_compute(group.attention, x_B1D.dtype)
            mixed_B1D, rows = layer.attention.step(layer.norm(x_B1D), rows, TokenAt(index, t))
            x_B1D = x_B1D + mixed_B1D
        return (x_B1D, rows), tuple(after_2BN)

    inputs = (
        model.groups(),
        jnp.arange(cfg.layers // size),
        stacks_of_group(state.input_LD2N, size),
        stacks_of_group(state.h_L2BN, size),
    )
    (x_B1D, rows), after = jax.lax.scan(body, (x_B1D, state.rows), inputs)
    h_L2BN = jnp.stack(after, axis=1).reshape(state.h_L2BN.shape)
    logits_BV = logits_of(model.norm(x_B1D)[:, 0], model.unembed_VD, cfg.vocab_size)
    if rows is not None and (
        cfg.window is None or cfg.window > state.seq_len
    ):  # otherwise the dropped tokens are outside the window
        logits_BV = jnp.where(t < state.seq_len, logits_BV, jnp.nan)
    return logits_BV, ReservoirState(h_L2BN, state.input_LD2N, t + 1, rows, state.seq_len, state.dtype)


def random_weights(cfg: ReservoirConfig) -> RandomWeights:
    """Describe the frozen random numbers: W_in of all layers, and m of every unit."""
    some_LDN = jax.jit(jax.vmap(lambda layer: input_matrix(cfg, layer)[:4, 0]))(jnp.arange(cfg.layers))
    content = np.asarray(some_LDN, np.float32).tobytes() + np.asarray(pairs(multipliers(cfg))).tobytes()
    return RandomWeights(2 * cfg.units * (cfg.layers * cfg.width + 1), cfg.reservoir_seed, hashlib.sha256(content).hexdigest())


def flops_per_token(cfg: ReservoirConfig, seq_len: int) -> float:
    """Return FLOPs of a training token: 6 per trained weight, 4 per weight of W_in. The scan is not counted."""
    trained = 3 * cfg.width * cfg.units + 3 * cfg.width * cfg.ffn
    flops = cfg.layers * (6.0 * trained + 4.0 * 2 * cfg.width * cfg.units) + 6.0 * cfg.vocab_size * cfg.width
    if not cfg.attention_every:
        return flops
    heads, seen = cfg.heads * cfg.head_dim, min(cfg.window or seq_len, seq_len)
    keys = seen * (1 - seen / (2 * seq_len))  # mean over the positions
    return flops + cfg.layers // cfg.attention_every * (24.0 * cfg.width * heads + 12.0 * heads * keys)
