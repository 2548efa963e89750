"""A language model of reservoirs: recurrences that nobody trains, and gates, readouts and feed-forward layers that are.

A layer's reservoir is a ring of N complex units, each of which turns and shrinks its state by a number of its own:

    h_t = m h_{t-1} + sqrt(1 - |m|^2) W_in u_t,     m = 1 - leak + leak * radius * e^(i angle)

The ring's eigenvalues are radius * e^(2 pi i (n + 1/2) / N), so that its spectral radius is what was asked for, and
nothing has to be measured. The root keeps a state of any time scale at the size of its input. What is read of it: both
parts of every unit, each times a gate that the token sets, through a trained readout.

With `--model-unit tanh`, the two parts are real units in rings (`tanh_scan.py`) with the same leaks and radius.

With `--model-attention-every`, every so many layers are followed by one of attention, whose weights are trained.

Neither W_in nor the angles are parameters. They follow from a seed in the configuration, the same numbers on every mesh
and after every restart, are drawn where they are used, and stand in no checkpoint and no optimizer.
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

from nash_mhc.kits.reservoir.linear_scan import linear_scan, times
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.kits.reservoir.tanh_scan import tanh_scan, tanh_step
from nash_mhc.model.attention import Attention, AttentionLayout, attention_layout
from nash_mhc.model.kv_cache import KeyValues, TokenAt
from nash_mhc.model.lm import TABLE_SCALE, by_place, kernel_for
from nash_mhc.model.parts import RMSNorm, SwiGLU, embed, init_matrix, logits_of
from nash_mhc.model.protocol import Drawn, Execution
from nash_mhc.model.remat import remat_policy
from nash_mhc.model.weights import project
from nash_mhc.parallel.params import TABLE, param, stacked
from nash_mhc.parallel.sharding import constrain, for_compute, on_shards


def leaks(cfg: ReservoirConfig) -> np.ndarray:
    """Of every unit, [N]: by factors from the quickest to the slowest.

    Neighbours on the ring differ in their leak, so that every time scale has all angles: leaks go along the golden
    ratio, which never comes back to where it was.
    """
    return cfg.leak * (cfg.slowest_leak / cfg.leak) ** (np.arange(cfg.units) * (math.sqrt(5) - 1) / 2 % 1.0)


def multipliers(cfg: ReservoirConfig) -> np.ndarray:
    """m of every unit, [N] complex: angles all around the ring."""
    eigenvalue = cfg.radius * np.exp(2j * math.pi * (np.arange(cfg.units) + 0.5) / cfg.units)
    return 1 - leaks(cfg) + leaks(cfg) * eigenvalue


def ring_weights(cfg: ReservoirConfig) -> Float[Array, "2 N"]:
    """Of rings of tanh units: the radius, with signs that make the second of a pair another ring than the first."""
    signs = np.stack([np.ones(cfg.units), np.where(np.arange(cfg.units) % cfg.ring == 0, -1.0, 1.0)])
    return jnp.asarray(cfg.radius * signs, jnp.float32)


def states(cfg: ReservoirConfig, driven_2BTN: Float[Array, "2 B T N"], segments_BT: Int[Array, "B T"]) -> Array:
    """What a reservoir comes to, [2, B, T, N], driven like that."""
    if cfg.unit == "linear":
        of_units, of_all = ("vector", "reservoir"), ("vector", "batch", "time", "reservoir")
        run = on_shards(linear_scan, [of_units, of_all, ("batch", "time")], of_all)  # a kernel, on a GPU
        return run(pairs(multipliers(cfg)), driven_2BTN, segments_BT)
    return tanh_scan(ring_weights(cfg), jnp.asarray(leaks(cfg), jnp.float32), driven_2BTN, segments_BT, cfg.ring)


def next_state(cfg: ReservoirConfig, h_2BN: Float[Array, "2 B N"], driven_2BN: Float[Array, "2 B N"]) -> Array:
    """The same for one token more."""
    if cfg.unit == "linear":
        return times(pairs(multipliers(cfg))[:, None], h_2BN) + driven_2BN
    return tanh_step(ring_weights(cfg), jnp.asarray(leaks(cfg), jnp.float32), h_2BN, driven_2BN, cfg.ring)


def pairs(numbers: np.ndarray) -> Float[Array, "2 N"]:
    """As the scan takes them."""
    return jnp.asarray(np.stack([numbers.real, numbers.imag]), jnp.float32)


def input_matrix(cfg: ReservoirConfig, layer: Int[Array, ""] | int) -> Float[Array, "D 2 N"]:
    """W_in of a layer, real and imaginary parts: uniform, which is the same bits on every device, of such a size that
    what goes in is as large as what it is made of."""
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
        """What the tokens put into the reservoir, in float32: it adds up over many of them."""
        parts_2BTN = jnp.einsum("btd,dcn->cbtn", u_BTD.astype(jnp.float32), input_D2N)
        parts_2BTN = constrain(parts_2BTN, "vector", "batch", "time", "reservoir")
        if cfg.unit == "tanh":  # which keeps its states small by itself
            return parts_2BTN
        strength_N = np.sqrt(np.maximum(1 - np.abs(multipliers(cfg)) ** 2, 1e-6)).astype(np.float32)
        return parts_2BTN * jnp.asarray(strength_N)[None, None, None]

    def gated(self, u_BTD: Array, h_2BTN: Float[Array, "2 B T N"]) -> tuple[Array, Array]:
        """Both parts of the states, as far as the token lets them through."""
        gate_BTN = jax.nn.sigmoid(constrain(project(u_BTD, self.gate_DN), "batch", "time", "reservoir"))
        real, imaginary = (gate_BTN * part.astype(u_BTD.dtype) for part in h_2BTN)
        return real, imaginary

    def read(self, u_BTD: Array, h_2BTN: Float[Array, "2 B T N"]) -> Array:
        real, imaginary = self.gated(u_BTD, h_2BTN)
        sum_BTD = project(real, self.read_real_ND, "btn,nd->btd") + project(imaginary, self.read_imaginary_ND, "btn,nd->btd")
        return constrain(sum_BTD, "batch", "time_split", "width")

    def states(self, x_BTD: Array, segments_BT: Array, cfg: ReservoirConfig, layer: Array | int) -> tuple[Array, Array]:
        """(the tokens as the layer sees them, [B, T, D]; the states that they lead to, [2, B, T, N])."""
        u_BTD = constrain(self.norm(x_BTD), "batch", "time", "width")
        return u_BTD, states(cfg, self.driven(u_BTD, cfg, input_matrix(cfg, layer)), segments_BT)

    def __call__(self, x_BTD: Array, segments_BT: Array, cfg: ReservoirConfig, layer: Array | int) -> Array:
        u_BTD, h_2BTN = self.states(x_BTD, segments_BT, cfg, layer)
        x_BTD = x_BTD + self.read(u_BTD, h_2BTN)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class AttentionLayer(eqx.Module):
    """Between reservoirs: what they let fade can be looked up here."""

    norm: RMSNorm
    attention: Attention

    @staticmethod
    def init(cfg: ReservoirConfig, *, key: PRNGKeyArray) -> AttentionLayer:
        return AttentionLayer(RMSNorm.init(cfg.width, cfg.norm_eps), Attention.init(cfg, key=key))

    def __call__(self, x_BTD: Array, layout: AttentionLayout, cfg: ReservoirConfig, kernel: str) -> Array:
        return x_BTD + self.attention(self.norm(x_BTD), layout, window=cfg.window, kernel=kernel)


class Group(NamedTuple):
    """Layers one after the other, and the attention after them."""

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
        # As in `LM`: with half of the channels turned round, the table that tokens enter by says nothing at the end.
        signs_D = jnp.where(jnp.arange(cfg.width) % 2 == 0, 1.0, -1.0)
        drawn = init_matrix(table, (cfg.padded_vocab, cfg.width), cfg.width, TABLE_SCALE)
        return Reservoir(drawn, stack, attention, RMSNorm(signs_D, cfg.norm_eps), cfg)

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        return self.embed_VD

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "B T D"], None]:
        segments_BT = jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
        x_BTD = embed(self.embed_VD, tokens_BT, jnp.dtype(execution.dtype)) * self.cfg.width**0.5

        kernel = kernel_for(execution, tokens_BT.shape[1], self.cfg.head_dim, self.cfg.window)
        layout = attention_layout(tokens_BT.shape, segments_BT, (1,), kernel, execution.most_documents)

        # Each by itself: what is computed again of a group is one layer's at a time.
        again = functools.partial(jax.checkpoint, policy=remat_policy(execution.remat))

        @again
        def one(x_BTD: Array, layer: ReservoirLayer, number: Array) -> Array:
            return for_compute(layer, x_BTD.dtype)(x_BTD, segments_BT, self.cfg, number)

        @again
        def attend(x_BTD: Array, layer: AttentionLayer) -> Array:
            return for_compute(layer, x_BTD.dtype)(x_BTD, layout, self.cfg, kernel)

        def body(x_BTD: Array, group: Group) -> tuple[Array, None]:
            for number, layer in zip(group.numbers, group.layers, strict=True):
                x_BTD = one(x_BTD, layer, number)
            return x_BTD if group.attention is None else attend(x_BTD, group.attention), None

        x_BTD, _ = jax.lax.scan(body, x_BTD, self.groups(), unroll=execution.unroll)
        return self.norm(x_BTD), None

    def groups(self) -> Group:
        """As a scan over them takes them apart."""
        size = self.cfg.attention_every or 1
        return Group(by_place(jnp.arange(self.cfg.layers), size), by_place(self.layers, size), self.attention)

    def health(self, report: None) -> dict[str, Array]:
        return {}

    def penalties(self, report: None) -> dict[str, Array]:
        return {}


class ReservoirState(eqx.Module):
    """All that is remembered of a text, however long it is; and W_in, which would take longer to draw for every token
    than all else that one needs. Attention without a window remembers every token: `rows` have room for `seq_len`."""

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
    """(logits of the next tokens, the state after these). Where attention has no room for one, NaN, not nonsense."""
    cfg, t, size = model.cfg, state.position, model.cfg.attention_every or 1
    x_B1D = embed(model.embed_VD, tokens_B[:, None], state.dtype) * cfg.width**0.5

    def one(x_B1D: Array, layer: ReservoirLayer, input_D2N: Array, h_2BN: Array) -> tuple[Array, Array]:
        layer = for_compute(layer, x_B1D.dtype)
        u_B1D = layer.norm(x_B1D)
        h_2BN = next_state(cfg, h_2BN, layer.driven(u_B1D, cfg, input_D2N)[:, :, 0])
        x_B1D = x_B1D + layer.read(u_B1D, h_2BN[:, :, None])
        return x_B1D + layer.ffn(layer.ffn_norm(x_B1D)), h_2BN

    def body(carry: tuple[Array, KeyValues | None], inputs: Any) -> tuple[tuple[Array, KeyValues | None], Any]:
        (x_B1D, rows), (group, index, inputs_D2N, before_2BN) = carry, inputs
        after_2BN = []
        for layer, input_D2N, h_2BN in zip(group.layers, inputs_D2N, before_2BN, strict=True):
            x_B1D, next_2BN = one(x_B1D, layer, input_D2N, h_2BN)
            after_2BN.append(next_2BN)
        if group.attention is not None and rows is not None:
            layer = for_compute(group.attention, x_B1D.dtype)
            mixed_B1D, rows = layer.attention.step(layer.norm(x_B1D), rows, TokenAt(index, t))
            x_B1D = x_B1D + mixed_B1D
        return (x_B1D, rows), tuple(after_2BN)

    along = (model.groups(), jnp.arange(cfg.layers // size), by_place(state.input_LD2N, size), by_place(state.h_L2BN, size))
    (x_B1D, rows), after = jax.lax.scan(body, (x_B1D, state.rows), along)
    h_L2BN = jnp.stack(after, axis=1).reshape(state.h_L2BN.shape)
    logits_BV = logits_of(model.norm(x_B1D)[:, 0], model.unembed_VD, cfg.vocab_size)
    if rows is not None and (cfg.window is None or cfg.window > state.seq_len):  # else what it drops is out of sight
        logits_BV = jnp.where(t < state.seq_len, logits_BV, jnp.nan)
    return logits_BV, ReservoirState(h_L2BN, state.input_LD2N, t + 1, rows, state.seq_len, state.dtype)


def drawn(cfg: ReservoirConfig) -> Drawn:
    """W_in of all layers, and a number of every unit."""
    some_LDN = jax.jit(jax.vmap(lambda layer: input_matrix(cfg, layer)[:4, 0]))(jnp.arange(cfg.layers))
    content = np.asarray(some_LDN, np.float32).tobytes() + np.asarray(pairs(multipliers(cfg))).tobytes()
    return Drawn(2 * cfg.units * (cfg.layers * cfg.width + 1), cfg.reservoir_seed, hashlib.sha256(content).hexdigest())


def flops_per_token(cfg: ReservoirConfig, seq_len: int) -> float:
    """Of one training token: 6 a trained weight, 4 one of W_in, which has no gradient. The scan is left out."""
    trained = 3 * cfg.width * cfg.units + 3 * cfg.width * cfg.ffn
    each = cfg.layers * (6.0 * trained + 4.0 * 2 * cfg.width * cfg.units) + 6.0 * cfg.vocab_size * cfg.width
    if not cfg.attention_every:
        return each
    heads, seen = cfg.heads * cfg.head_dim, min(cfg.window or seq_len, seq_len)
    keys = seen * (1 - seen / (2 * seq_len))  # on average over the row
    return each + cfg.layers // cfg.attention_every * (24.0 * cfg.width * heads + 12.0 * heads * keys)
