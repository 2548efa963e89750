"""One token after another, each at the price of one: what earlier tokens left behind lies in a cache, one part a scale.

Tokens are fed one by one; `step` gives the same logits as a pass of the whole model over all of them (a test holds it to
that). The residual streams belong to a token alone and leave nothing behind, so the cache is attention's:

- the finest scale keeps keys and values of as many tokens as its window sees;
- a coarser one keeps those of all its rows, the last two blocks of the scale below, from which its next row is pooled, and
  the output of its last finished row, which every token uses until the next one ends. A row is computed by the token that
  ends its block; the others do not pay for it.

All rows of a batch are at the same position, and everything runs on one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import Attention
from nash_mhc.model.lm import LM, Layer
from nash_mhc.model.multiscale import Multiscale, Projected
from nash_mhc.model.parts import embed
from nash_mhc.model.residual import State, residual_class
from nash_mhc.parallel.sharding import for_compute


class KeyValues(eqx.Module):
    """What queries of one scale look at: keys, normed and rotated, and values. Row i lies at place i % S."""

    k_LBKSH: Float[Array, "L B K S H"]
    v_LBKSH: Float[Array, "L B K S H"]


class Coarse(eqx.Module):
    """A scale above the finest."""

    q_LBJNH: Float[Array, "L B J N H"]  # the last J = 2r rows of the scale below as projected; row j lies at place j % J
    k_LBJKH: Float[Array, "L B J K H"]
    v_LBJKH: Float[Array, "L B J K H"]
    rows: KeyValues
    out_LBNH: Float[Array, "L B N H"]  # of the last row that has ended


class Cache(eqx.Module):
    position: Int[Array, ""]  # of the token that comes next: how many have been read
    fine: KeyValues
    coarse: tuple[Coarse, ...]
    seq_len: int = eqx.field(static=True)  # tokens that it has room for

    @property
    def dtype(self) -> Any:
        return self.fine.k_LBKSH.dtype


def empty_cache(cfg: ModelConfig, batch: int, seq_len: int, dtype: Any = "float32") -> Cache:
    """Room for `seq_len` tokens, none of them read; `dtype` is the one that `step` computes in."""
    L, B, N, K, H = cfg.layers, batch, cfg.heads, cfg.kv_heads, cfg.head_dim
    zeros = lambda *shape: jnp.zeros((L, B, *shape), dtype)
    rows = lambda count: KeyValues(zeros(K, count, H), zeros(K, count, H))
    J = 2 * cfg.ratio
    coarse = [
        # Rounded up: also the row that cannot end any more has a place.
        Coarse(zeros(J, N, H), zeros(J, K, H), zeros(J, K, H), rows(-(-seq_len // stride)), zeros(N, H))
        for stride in cfg.strides[1:]
    ]
    return Cache(jnp.zeros((), jnp.int32), rows(min(cfg.window or seq_len, seq_len)), tuple(coarse), seq_len)


def step(model: LM, cache: Cache, tokens_B: Int[Array, "B"]) -> tuple[Float[Array, "B V"], Cache]:
    """(logits of the token after this one, the cache with this one in it). A cache that is full answers NaN, not nonsense."""
    x_BTD = embed(model.embed_VD, tokens_B[:, None], cache.dtype) * model.cfg.width**0.5
    residual = residual_class(model.cfg)

    # The cache is carried, not mapped over: each layer then writes its one row in place. As scanned inputs and outputs, all of
    # it would be copied for every token.
    def body(carry: tuple[State, Cache], at: tuple[Layer, Array]) -> tuple[tuple[State, Cache], None]:
        (state, cache), (layer, index) = carry, at
        layer = for_compute(layer, cache.dtype)
        x_BTD, maps = layer.attention_residual.read(state)
        y_BTD, cache = _attend(layer.attention, layer.attention_norm(x_BTD), cache, index)
        state = layer.attention_residual.write(state, y_BTD, maps)
        x_BTD, maps = layer.ffn_residual.read(state)
        state = layer.ffn_residual.write(state, layer.ffn(layer.ffn_norm(x_BTD)), maps)
        return (state, cache), None

    start = (residual.enter(model.cfg, x_BTD), cache)
    (state, cache), _ = lax.scan(body, start, (model.layers, jnp.arange(model.cfg.layers)))
    x_BD = model.norm(residual.leave(state))[:, 0]
    w_VD = model.unembed_VD[: model.cfg.vocab_size].astype(x_BD.dtype)
    logits_BV = jnp.einsum("bd,vd->bv", x_BD, w_VD, preferred_element_type=jnp.float32)
    logits_BV = jnp.where(cache.position < cache.seq_len, logits_BV, jnp.nan)
    return logits_BV, dataclasses.replace(cache, position=cache.position + 1)


def read(model: LM, cache: Cache, tokens_BT: Int[Array, "B T"], count: Int[Array, ""]) -> tuple[Float[Array, "B V"], Cache]:
    """`step` over the first `count` tokens, at least one: (logits of the token after them, cache). The rest is padding.

    The count is not part of the program: compiled once, this reads a chunk of a prompt and a single token alike.
    """

    def body(t: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        return step(model, carry[1], lax.dynamic_index_in_dim(tokens_BT, t, axis=1, keepdims=False))

    nothing_BV = jnp.zeros((tokens_BT.shape[0], model.cfg.vocab_size), jnp.float32)
    return lax.fori_loop(0, count, body, (nothing_BV, cache))


def _layer(stack: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, index, axis=0, keepdims=False)


def _place(stack: Array, index: Array, row: Array, axis: int, place: Array) -> Array:
    """The stack with one row of one layer replaced."""
    starts = [index] + [place if a == axis else jnp.zeros_like(place) for a in range(1, stack.ndim)]
    return lax.dynamic_update_slice(stack, row[None], starts)


def _kept(rows: KeyValues, index: Array, i: Array, k_BTKH: Array, v_BTKH: Array) -> KeyValues:
    """With row i of one layer in its place. The rows of one head lie together, which is how they are read."""
    place = i % rows.k_LBKSH.shape[3]
    put = lambda stack, row_BTKH: _place(stack, index, jnp.swapaxes(row_BTKH, 1, 2), 3, place)
    return KeyValues(put(rows.k_LBKSH, k_BTKH), put(rows.v_LBKSH, v_BTKH))


def _look(q_BTNH: Float[Array, "B 1 N H"], rows: KeyValues, index: Array, i: Array) -> Float[Array, "B 1 N H"]:
    """What row i finds among the rows up to itself, which must be in its place: `attend` for one query."""
    k_BKSH, v_BKSH = _layer(rows.k_LBKSH, index), _layer(rows.v_LBKSH, index)
    (B, _, N, H), (_, K, S, _) = q_BTNH.shape, k_BKSH.shape
    q_BKGH = (q_BTNH * jnp.asarray(H**-0.5, q_BTNH.dtype)).reshape(B, K, N // K, H)
    scores_BKGS = jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32)
    # Once every place is taken, all are seen: a ring of the window's size has room for nothing outside it.
    scores_BKGS = jnp.where((jnp.arange(S) <= i)[None, None, None], scores_BKGS, -jnp.inf)
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1).astype(v_BKSH.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights_BKGS, v_BKSH).reshape(B, 1, N, H)


def _attend(
    mixer: Attention | Multiscale, x_BTD: Float[Array, "B 1 D"], cache: Cache, index: Array
) -> tuple[Float[Array, "B 1 D"], Cache]:
    """The attention of one layer for one token: (its result, the cache with what this token adds to that layer)."""
    base = mixer.base if isinstance(mixer, Multiscale) else mixer
    t = cache.position
    positions_BT = jnp.broadcast_to(t, x_BTD.shape[:2])
    q_BTNH, k_BTKH, v_BTKH = base.project(x_BTD)
    turned_BTNH, key_BTKH = base.placed(q_BTNH, k_BTKH, positions_BT)
    fine = _kept(cache.fine, index, t, key_BTKH, v_BTKH)
    outs, coarse = [_look(turned_BTNH, fine, index, t)], []
    if not isinstance(mixer, Multiscale):
        return base.output(outs[0]), dataclasses.replace(cache, fine=fine)
    row = q_BTNH, k_BTKH, v_BTKH
    for c, before in enumerate(cache.coarse, 1):
        scale, row = _grow(mixer, c, before, row, index, t)
        coarse.append(scale)
        outs.append(_layer(scale.out_LBNH, index)[:, None])
    mixed_BTNH, _, _ = mixer.settle(mixer.prior(x_BTD), tuple(outs), positions_BT)
    return base.output(mixed_BTNH), dataclasses.replace(cache, fine=fine, coarse=tuple(coarse))


def _grow(mixer: Multiscale, c: int, scale: Coarse, finer: Projected, index: Array, t: Array) -> tuple[Coarse, Projected]:
    """Scale c after token t, whose row of the scale below is `finer`; and its own row, if t ends one, for the scale above.

    Row t // stride is under way until its last token comes. Until then zeros stand in its place, where nobody looks: writing
    them costs one row, and what leaves a `cond` is copied, so that all rows must not.
    """
    stride, below = mixer.strides[c], mixer.strides[c - 1]
    i, ended = t // stride, (t + 1) % stride == 0
    J = scale.q_LBJNH.shape[2]
    put = lambda stack, row: _place(stack, index, row, 2, (t // below) % J)
    recent = put(scale.q_LBJNH, finer[0]), put(scale.k_LBJKH, finer[1]), put(scale.v_LBJKH, finer[2])

    def pooled() -> tuple[Projected, tuple[Array, Array]]:
        # The block before comes first: an odd row's lies in the first half, an even row's in the second.
        q, k, v = (jnp.roll(_layer(stack, index), jnp.where(i % 2 == 0, J // 2, 0), axis=1) for stack in recent)
        goes_on_BI = jnp.broadcast_to(jnp.stack([jnp.zeros_like(i, bool), i > 0]), (q.shape[0], 2))
        q, k, v = (pair[:, 1:] for pair in mixer.coarser(c, q, k, v, goes_on_BI)[1])
        return (q, k, v), mixer.base.placed(q, k, jnp.broadcast_to(i * stride, q.shape[:2]))

    nothing = jax.tree.map(jnp.zeros_like, finer)
    row, (turned_BTNH, key_BTKH) = lax.cond(ended, pooled, lambda: (nothing, nothing[:2]))
    rows = _kept(scale.rows, index, i, key_BTKH, row[2])
    look = lambda: _look(turned_BTNH, rows, index, i)[:, 0]
    out_BNH = lax.cond(ended, look, lambda: _layer(scale.out_LBNH, index))
    out_LBNH = lax.dynamic_update_index_in_dim(scale.out_LBNH, out_BNH, index, axis=0)
    return Coarse(*recent, rows, out_LBNH), row
