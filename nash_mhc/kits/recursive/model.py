"""A small net applied repeatedly to its own state: depth without more weights (TRM, arXiv 2510.04871).

Each position has an upper state (the answer so far) and a lower state (scratch). One pass is

    outer_cycles times:  inner_cycles times:  lower <- net(lower + upper + x);     then upper <- net(upper + lower)

and only the last outer cycles have a gradient. With `nets 2`, each state has its own net (HRM, arXiv 2506.21734).
A causal model predicts tokens in one pass. A puzzle model has no mask, and `objective.py` carries its states from pass
to pass.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ConfigError
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.kv_cache import KeyValues, TokenAt
from nash_mhc.model.lm import TABLE_SCALE, kernel_for
from nash_mhc.model.mixers.attention import PER_HEAD, Attention, AttentionLayout, attention_layout
from nash_mhc.model.parts import RMSNorm, SwiGLU, embed, init_matrix, logits_of
from nash_mhc.model.protocol import Activations, Architecture, AttentionShape, Execution, RandomWeights
from nash_mhc.model.remat import remat_policy
from nash_mhc.model.traced_memory import LayerBytes, layer_bytes, trace_layer
from nash_mhc.model.weights import project
from nash_mhc.ops.activations import silu_product
from nash_mhc.ops.attend import PLAIN_KERNELS, SHAPES_ONLY
from nash_mhc.ops.norm import rms_norm
from nash_mhc.parallel.params import TABLE, VECTOR, param, stacked
from nash_mhc.parallel.sharding import constrain, for_compute, one_device

_TILE = 16  # cells of a matrix tile


class States(NamedTuple):
    upper_BTD: Float[Array, "B T D"]
    lower_BTD: Float[Array, "B T D"]


class CellMixer(eqx.Module):
    """An MLP over the cells of a grid, shared by all channels."""

    gate_CF: Float[Array, "C F"] = param("cells", "cells")
    up_CF: Float[Array, "C F"] = param("cells", "cells")
    down_FC: Float[Array, "F C"] = param("cells", "cells")

    @staticmethod
    def init(cfg: RecursiveConfig, *, key: PRNGKeyArray) -> CellMixer:
        gate, up, down = jax.random.split(key, 3)
        C, F = cfg.cells or 1, cfg.cells_ffn
        small = (2 * cfg.layers) ** -0.5
        return CellMixer(init_matrix(gate, (C, F), C), init_matrix(up, (C, F), C), init_matrix(down, (F, C), F, small))

    def __call__(self, x_BTD: Array) -> Array:
        C = x_BTD.shape[1]
        # Pad with zero cells to a whole tile: matrix units are several times slower for odd sizes.
        padding = -C % _TILE if C > _TILE else 0
        x_BTD = jnp.pad(constrain(x_BTD, "batch", "time", "width"), ((0, 0), (0, padding), (0, 0)))
        gate_CF, up_CF = (jnp.pad(w_CF, ((0, padding), (0, 0))) for w_CF in (self.gate_CF, self.up_CF))
        gate_BFD, up_BFD = (project(x_BTD, w_CF, "btd,tf->bfd") for w_CF in (gate_CF, up_CF))
        down_FC = jnp.pad(self.down_FC, ((0, 0), (0, padding)))
        mixed_BTD = project(silu_product(gate_BFD, up_BFD), down_FC, "bfd,ft->btd")[:, :C]
        return constrain(mixed_BTD, "batch", "time_split", "width")


class Block(eqx.Module):
    """A mixer and an MLP, with a norm after each residual addition."""

    mixer: Attention | CellMixer
    ffn: SwiGLU
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(cfg: RecursiveConfig, *, key: PRNGKeyArray) -> Block:
        mixer, ffn = jax.random.split(key)
        kind = Attention if cfg.mixer == "attention" else CellMixer
        block = Block(kind.init(cfg, key=mixer), SwiGLU.init(cfg, key=ffn), cfg.norm_eps)
        # Output projections are initialized for the depth of one net. Applied repeatedly, they would drown the input
        # and make gradients explode.
        small = cfg.applications**-0.5
        last = lambda block: (block.mixer.out_NHD if cfg.mixer == "attention" else block.mixer.down_FC, block.ffn.down_FD)
        return eqx.tree_at(last, block, tuple(small * w for w in last(block)))

    def _normalize(self, x_BTD: Array) -> Array:
        return rms_norm(x_BTD, jnp.ones(x_BTD.shape[-1], jnp.float32), self.eps)

    def __call__(self, x_BTD: Array, layout: AttentionLayout, *, kernel: str, causal: bool) -> Array:
        if isinstance(self.mixer, CellMixer):
            mixed_BTD = self.mixer(x_BTD)
        elif causal:
            mixed_BTD = self.mixer(x_BTD, layout, window=None, kernel=kernel)
        else:
            mixed_BTD = _full_attention(self.mixer, x_BTD, layout)
        return self.residual(x_BTD, mixed_BTD)

    def residual(self, x_BTD: Array, mixed_BTD: Array) -> Array:
        x_BTD = self._normalize(x_BTD + mixed_BTD)
        return self._normalize(x_BTD + self.ffn(x_BTD))


class Net(eqx.Module):
    layers: Block = stacked("layers")


def _full_attention(attention: Attention, x_BTD: Array, layout: AttentionLayout) -> Array:
    """Attention without a mask, for a grid."""
    q_BTNH, k_BTNH, v_BTNH = attention.project(constrain(x_BTD, "batch", "time", "width"))
    q_BTNH, k_BTNH = attention.rotate(q_BTNH, k_BTNH, layout.positions_BT)
    heads = [constrain(a, *PER_HEAD) for a in (q_BTNH, k_BTNH, v_BTNH)]
    with jax.named_scope("attention"):
        mixed_BTNH = jax.nn.dot_product_attention(*heads)
    return constrain(attention.output(constrain(mixed_BTNH, *PER_HEAD)), "batch", "time_split", "width")


class Recursive(eqx.Module):
    embed_VD: Float[Array, "V D"] = param("vocab", "embed", role=TABLE)
    net: Net
    upper_net: Net | None
    norm: RMSNorm
    # Predict from the upper state whether a puzzle is solved.
    stop_D: Float[Array, "D"] | None = param("vector", role=VECTOR)
    stop_bias: Float[Array, "1"] | None = param("vector", role=VECTOR)
    cfg: RecursiveConfig = eqx.field(static=True)

    @staticmethod
    def init(cfg: RecursiveConfig, *, key: PRNGKeyArray) -> Recursive:
        table, *nets = jax.random.split(key, 1 + cfg.nets)
        make = lambda key: Net(jax.vmap(lambda k: Block.init(cfg, key=k))(jax.random.split(key, cfg.layers)))
        # As in `LM`: with half of the signs flipped, tied embeddings do not predict the input token.
        signs_D = jnp.where(jnp.arange(cfg.width) % 2 == 0, 1.0, -1.0)
        return Recursive(
            embed_VD=init_matrix(table, (cfg.padded_vocab, cfg.width), cfg.width, TABLE_SCALE),
            net=make(nets[0]),
            upper_net=make(nets[1]) if cfg.nets == 2 else None,
            norm=RMSNorm(signs_D, cfg.norm_eps),
            # Initially no puzzle counts as solved.
            stop_D=None if cfg.causal else jnp.zeros(cfg.width),
            stop_bias=None if cfg.causal else jnp.full(1, -5.0),
            cfg=cfg,
        )

    @property
    def unembed_VD(self) -> Float[Array, "V D"]:
        return self.embed_VD

    def embed_tokens(self, tokens_BT: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Return embeddings at the scale of the states, to which they are added."""
        return embed(self.embed_VD, tokens_BT, dtype) * (self.cfg.width**0.5 / TABLE_SCALE)

    def initial_states(self, x_BTD: Float[Array, "B T D"]) -> States:
        """Return the states before the first pass: embeddings of a text, or fixed vectors for a puzzle."""
        if self.cfg.causal:
            return States(x_BTD, jnp.zeros_like(x_BTD))
        vectors = initial_vectors(self.cfg)
        return States(*(jnp.broadcast_to(v[None, None].astype(x_BTD.dtype), x_BTD.shape) for v in vectors))

    def run_pass(
        self, x_BTD: Float[Array, "B T D"], states: States, layout: AttentionLayout, execution: Execution = Execution()
    ) -> tuple[States, Float[Array, ""]]:
        """Return (the states after one pass, the RMS change of the upper state in the last cycle)."""
        cfg = self.cfg
        # Gather the weights once per pass, not once per application.
        lower_net = for_compute(self.net, x_BTD.dtype)
        upper_net = lower_net if self.upper_net is None else for_compute(self.upper_net, x_BTD.dtype)
        kernel = kernel_for(execution, x_BTD.shape[1], cfg.head_dim)

        @functools.partial(jax.checkpoint, policy=remat_policy(execution.remat))
        def layer(x_BTD: Array, block: Block) -> tuple[Array, None]:
            return block(x_BTD, layout, kernel=kernel, causal=cfg.causal), None

        def apply(net: Net, x_BTD: Array) -> Array:
            return lax.scan(layer, x_BTD, net.layers, unroll=execution.unroll)[0]

        def cycle(nets: tuple[Net, Net], x_BTD: Array, states: States) -> States:
            upper_BTD = states.upper_BTD
            update = lambda lower_BTD, _: (apply(nets[0], lower_BTD + upper_BTD + x_BTD), None)
            lower_BTD, _ = lax.scan(update, states.lower_BTD, length=cfg.inner_cycles, unroll=execution.unroll)
            return States(apply(nets[1], upper_BTD + lower_BTD), lower_BTD)

        def cycles(nets: tuple[Net, Net], x_BTD: Array, states: States, count: int) -> States:
            if count == 0:
                return states
            turn = lambda states, _: (cycle(nets, x_BTD, states), None)
            return lax.scan(turn, states, length=count, unroll=execution.unroll)[0]

        nets = (lower_net, upper_net)
        # These cycles have no gradient, so nothing of them is saved.
        states = cycles(*lax.stop_gradient((nets, x_BTD, states)), cfg.outer_cycles - cfg.gradient_cycles)
        before = cycles(nets, x_BTD, lax.stop_gradient(states), cfg.gradient_cycles - 1)
        states = cycle(nets, x_BTD, before)
        moved = jnp.sqrt(jnp.mean(jnp.square((states.upper_BTD - before.upper_BTD).astype(jnp.float32))))
        return states, lax.stop_gradient(moved)

    def layout(self, tokens_BT: Array, segments_BT: Array | None, execution: Execution) -> AttentionLayout:
        kernel = kernel_for(execution, tokens_BT.shape[1], self.cfg.head_dim)
        return attention_layout(tokens_BT.shape, segments_BT, (1,), kernel, execution.most_documents)

    def hidden(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None, execution: Execution = Execution()
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        x_BTD = self.embed_tokens(tokens_BT, jnp.dtype(execution.dtype))
        layout = self.layout(tokens_BT, segments_BT, execution)
        states, moved = self.run_pass(x_BTD, self.initial_states(x_BTD), layout, execution)
        return self.norm(states.upper_BTD), moved

    def solved_logit(self, upper_BTD: Float[Array, "B T D"]) -> Float[Array, "B"]:
        """Return a logit that is above 0 if the model considers its answer correct."""
        assert self.stop_D is not None and self.stop_bias is not None
        mean_BD = jnp.mean(upper_BTD.astype(jnp.float32), axis=1)
        return jnp.einsum("bd,d->b", mean_BD, self.stop_D) + self.stop_bias

    def health(self, report: Float[Array, ""]) -> dict[str, Array]:
        """Return the change by the last cycle. Near 0, more cycles would change nothing."""
        return {"last_move": report}

    def auxiliary_losses(self, report: Float[Array, ""]) -> dict[str, Array]:
        return {}


def initial_vectors(cfg: RecursiveConfig) -> tuple[Float[Array, "D"], Float[Array, "D"]]:
    """Return the initial states of a puzzle's cells: random from a seed, the same on every mesh, never trained."""
    upper, lower = jax.random.split(jax.random.key(cfg.state_seed))
    return tuple(jax.random.truncated_normal(key, -2.0, 2.0, (cfg.width,), jnp.float32) for key in (upper, lower))  # type: ignore[return-value]


def random_weights(cfg: RecursiveConfig) -> RandomWeights | None:
    if cfg.causal:
        return None
    content = np.stack([np.asarray(vector_D) for vector_D in initial_vectors(cfg)]).tobytes()
    return RandomWeights(2 * cfg.width, cfg.state_seed, hashlib.sha256(content).hexdigest())


class Cache(eqx.Module):
    """Keys and values of every application of every layer. Each attends to those of the same application."""

    position: Int[Array, ""]
    rows: KeyValues  # applications x layers
    seq_len: int = eqx.field(static=True)


def empty_cache(cfg: RecursiveConfig, batch: int, seq_len: int, dtype: Any) -> Cache:
    if not cfg.causal:
        raise ConfigError("a puzzle model (--no-model-causal) cannot generate text; use `generate --puzzle CELLS`")
    shape = (cfg.applications * cfg.layers, batch, cfg.heads, seq_len, cfg.head_dim)
    return Cache(jnp.zeros((), jnp.int32), KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)), seq_len)


def decode(model: Recursive, cache: Cache, tokens_B: Int[Array, "B"]) -> tuple[Float[Array, "B V"], Cache]:
    """Return (logits of the next tokens, the cache with these tokens). A full cache gives NaN."""
    cfg, dtype = model.cfg, cache.rows.k_LBKSH.dtype
    x_B1D = model.embed_tokens(tokens_B[:, None], dtype)
    lower_net = for_compute(model.net, dtype)
    upper_net = lower_net if model.upper_net is None else for_compute(model.upper_net, dtype)
    t = cache.position

    def layer(carry: tuple[Array, KeyValues], at: tuple[Block, Array]) -> tuple[tuple[Array, KeyValues], None]:
        (x_B1D, rows), (block, index) = carry, at
        assert isinstance(block.mixer, Attention)
        mixed_B1D, rows = block.mixer.step(x_B1D, rows, TokenAt(index, t))
        return (block.residual(x_B1D, mixed_B1D), rows), None

    def apply(net: Net, x_B1D: Array, rows: KeyValues, number: Array) -> tuple[Array, KeyValues]:
        return lax.scan(layer, (x_B1D, rows), (net.layers, number * cfg.layers + jnp.arange(cfg.layers)))[0]

    def cycle(carry: tuple[States, KeyValues], number: Array) -> tuple[tuple[States, KeyValues], None]:
        (upper_B1D, lower_B1D), rows = carry
        first = number * (cfg.inner_cycles + 1)

        def update(carry: tuple[Array, KeyValues], i: Array) -> tuple[tuple[Array, KeyValues], None]:
            return apply(lower_net, carry[0] + upper_B1D + x_B1D, carry[1], first + i), None

        (lower_B1D, rows), _ = lax.scan(update, (lower_B1D, rows), jnp.arange(cfg.inner_cycles))
        upper_B1D, rows = apply(upper_net, upper_B1D + lower_B1D, rows, first + cfg.inner_cycles)
        return (States(upper_B1D, lower_B1D), rows), None

    (states, rows), _ = lax.scan(cycle, (model.initial_states(x_B1D), cache.rows), jnp.arange(cfg.outer_cycles))
    x_BD = model.norm(states.upper_BTD)[:, 0]
    logits_BV = logits_of(x_BD, model.unembed_VD, cfg.vocab_size)
    return jnp.where(t < cache.seq_len, logits_BV, jnp.nan), Cache(t + 1, rows, cache.seq_len)


def flops_per_token(cfg: RecursiveConfig, seq_len: int) -> float:
    """Return FLOPs of a training token: 2 per weight and application, 4 more for applications with a gradient."""
    mixing = 4 * cfg.width * cfg.heads * cfg.head_dim + (1 if cfg.causal else 2) * cfg.heads * cfg.head_dim * seq_len
    if cfg.mixer == "cells":
        mixing = 3 * cfg.cells_ffn * cfg.width
    forward = cfg.layers * (mixing + 3 * cfg.width * cfg.ffn)
    backward = cfg.gradient_cycles * (cfg.inner_cycles + 1)
    return 2.0 * forward * cfg.applications + 4.0 * forward * backward + 6.0 * cfg.vocab_size * cfg.width


_PASSES = 4  # over the values of a layer: forward, recomputed forward, and backward, which counts twice


@functools.lru_cache(64)
def _layer_bytes(cfg: RecursiveConfig, dtype: str, remat: str, kernel: str, seq_len: int, tp: int) -> LayerBytes:
    """Trace a layer. tp splits heads, MLP width and, between layers, time; no axis splits the MLP over cells."""
    key = jax.random.key(0)
    local = dataclasses.replace(cfg, heads=cfg.heads // tp, ffn=cfg.ffn // tp)

    def init() -> Block:
        block = Block.init(local, key=key)
        return dataclasses.replace(block, mixer=CellMixer.init(cfg, key=key)) if cfg.mixer == "cells" else block

    def run(x_BTD: Array, block: Block) -> tuple[Array, None]:
        return for_compute(block, jnp.dtype(dtype))(x_BTD, layout, kernel=kernel, causal=cfg.causal), None

    layout = attention_layout((1, seq_len), jnp.ones((1, seq_len), jnp.int32), (1,), "xla")
    with one_device(seq_len, tp):
        state = jax.ShapeDtypeStruct((1, seq_len // tp, cfg.width), jnp.dtype(dtype))
        return layer_bytes(trace_layer(run, state, jax.eval_shape(init)), remat)


def activations(cfg: RecursiveConfig, execution: Execution, rows: int, seq_len: int, tp: int) -> Activations:
    """Return one device's bytes for `rows` sequences. Applications of the net without a gradient save nothing."""
    kernel = execution.attention if execution.attention in PLAIN_KERNELS else SHAPES_ONLY
    layer = _layer_bytes(cfg, execution.dtype, execution.remat, kernel, seq_len, tp)
    with_gradient = cfg.gradient_cycles * (cfg.inner_cycles + 1) * cfg.layers
    nested = execution.remat == "none" and cfg.inner_cycles > 1  # the inner loop's stack is copied to the outer's
    mixing = 3 * cfg.cells_ffn * cfg.width / (cfg.cells or 1) if cfg.mixer == "cells" else 4 * cfg.heads * cfg.head_dim / tp
    moved = ((12 * cfg.width + 3 * cfg.ffn) / tp + mixing) * jnp.dtype(execution.dtype).itemsize
    return Activations(
        streams=with_gradient * rows * layer.streams,
        saved=with_gradient * rows * layer.saved,
        # The cycles hold x, both states and, in the backward pass, their gradients.
        forward=rows * (layer.forward + 3 * layer.streams),
        backward=rows * (layer.backward + 6 * layer.streams + nested * cfg.layers * (layer.saved + layer.streams)),
        gathered=0.0,
        moved=((_PASSES - 1) * with_gradient + cfg.depth) * rows * seq_len * moved,
    )


ARCHITECTURE = Architecture(
    init=Recursive.init,
    flops_per_token=flops_per_token,
    empty_cache=empty_cache,
    decode=decode,
    attention=lambda cfg: AttentionShape(cfg.head_dim, None) if cfg.mixer == "attention" and cfg.causal else None,
    activations=activations,
    gathers_once=True,
    random_weights=random_weights,
)
