"""One token after another, each at the price of one: what earlier tokens left behind lies in a cache, one part a scale.

Tokens are fed one by one; `step` gives the same logits as a pass of the whole model over all of them (a test holds it
to that). The residual streams belong to a token alone and leave nothing behind, so the cache is attention's:

- the convolution in front of it keeps the few tokens that it mixes with the next one;
- the finest scale keeps keys and values of as many tokens as its window sees;
- a coarser one keeps those of all its rows and the last two blocks of the scale below,
  from which its next row is pooled.
  A row is computed by the token that ends its block; the others do not pay for it.

All rows of a batch are at the same position, and everything runs on one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.attention import Attention
from nash_mhc.model.lm import LM, Layer, by_place
from nash_mhc.model.multiscale import Multiscale
from nash_mhc.model.parts import ShortConv, embed, logits_of
from nash_mhc.model.residual import State, residual_class
from nash_mhc.model.weights import array_of
from nash_mhc.ops.attend_rows import Found
from nash_mhc.parallel.sharding import for_compute


class KeyValues(eqx.Module):
    """What queries of one scale look at: keys, normed and rotated, and values. Row i lies at place i % S."""

    k_LBKSH: Float[Array, "L B K S H"]
    v_LBKSH: Float[Array, "L B K S H"]


class Coarse(eqx.Module):
    """A scale above the finest."""

    k_LBJKH: Float[Array, "L B J K H"]  # the last J = 2r rows of the scale below as projected; row j lies at place j % J
    v_LBJKH: Float[Array, "L B J K H"]
    rows: KeyValues


class Cache(eqx.Module):
    position: Int[Array, ""]  # of the token that comes next: how many have been read
    conv_LBJD: Float[Array, "L B J D"] | None  # what the convolution mixes with the next token, the latest last
    fine: tuple[KeyValues, ...]  # of each layer of a group, since their windows differ
    coarse: tuple[Coarse, ...]
    seq_len: int = eqx.field(static=True)  # tokens that it has room for

    @property
    def dtype(self) -> Any:
        return self.fine[0].k_LBKSH.dtype


def empty_cache(cfg: ModelConfig, batch: int, seq_len: int, dtype: Any = "float32") -> Cache:
    """Room for `seq_len` tokens, none of them read; `dtype` is the one that `step` computes in."""
    L, B, K, H = cfg.layers, batch, cfg.kv_heads, cfg.head_dim
    zeros = lambda *shape: jnp.zeros((L, B, *shape), dtype)
    rows = lambda count, layers=L: KeyValues(*(jnp.zeros((layers, B, K, count, H), dtype) for _ in "kv"))
    J = 2 * cfg.ratio
    coarse = [
        # Rounded up: also the row that cannot end any more has a place.
        Coarse(zeros(J, K, H), zeros(J, K, H), rows(-(-seq_len // stride)))
        for stride in cfg.strides[1:]
    ]
    conv = zeros(cfg.conv_taps - 1, cfg.width) if cfg.conv_taps else None
    fine = tuple(rows(min(window or seq_len, seq_len), L // len(cfg.windows)) for window in cfg.windows)
    return Cache(jnp.zeros((), jnp.int32), conv, fine, tuple(coarse), seq_len)


class _Where(NamedTuple):
    """Of a layer: in the stack; its group, and its place there."""

    layer: Int[Array, ""]
    group: Int[Array, ""]
    i: int


def step(model: LM, cache: Cache, tokens_B: Int[Array, "B"]) -> tuple[Float[Array, "B V"], Cache]:
    """(logits of the token after this one, the cache with this one in it).
    A cache that is full answers NaN, not nonsense."""
    x_BTD = embed(array_of(model.embed_VD), tokens_B[:, None], cache.dtype) * model.cfg.embed_multiplier
    residual = residual_class(model.cfg)

    # The cache is carried, not mapped over: each layer then writes its one row in place. As scanned inputs and outputs,
    # all of it would be copied for every token.
    def one(carry: tuple[State, Cache], layer: Layer, at: _Where) -> tuple[State, Cache]:
        state, cache = carry
        layer = for_compute(layer, cache.dtype)

        def mixed(x_BTD: Array) -> tuple[Array, Cache]:
            kept = cache
            if layer.attention_conv is not None:
                x_BTD, kept = _convolve(layer.attention_conv, x_BTD, kept, at.layer)
            return _attend(layer.attention, x_BTD, kept, at)

        state, cache, _ = layer.through(state, mixed)
        return state, cache

    size = len(cache.fine)

    def body(carry: tuple[State, Cache], at: tuple[tuple[Layer, ...], Array]) -> tuple[tuple[State, Cache], None]:
        group, number = at
        for i, layer in enumerate(group):
            carry = one(carry, layer, _Where(number * size + i, number, i))
        return carry, None

    start = (residual.enter(model.cfg, x_BTD), cache)
    (state, cache), _ = lax.scan(body, start, (by_place(model.layers, size), jnp.arange(model.cfg.layers // size)))
    x_BD = model.norm(residual.leave(state))[:, 0]
    logits_BV = logits_of(x_BD, model.unembed_VD, model.cfg.vocab_size)
    logits_BV = jnp.where(cache.position < cache.seq_len, logits_BV, jnp.nan)
    return logits_BV, dataclasses.replace(cache, position=cache.position + 1)


def _layer(stack: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, index, axis=0, keepdims=False)


def _place(stack: Array, index: Array, row: Array, axis: int, place: Array) -> Array:
    """The stack with one row of one layer replaced."""
    starts = [index] + [place if a == axis else jnp.zeros_like(place) for a in range(1, stack.ndim)]
    return lax.dynamic_update_slice(stack, row[None], starts)


def kept(rows: KeyValues, index: Array, i: Array, k_BTKH: Array, v_BTKH: Array) -> KeyValues:
    """With row i of one layer in its place. The rows of one head lie together, which is how they are read."""
    place = i % rows.k_LBKSH.shape[3]
    put = lambda stack, row_BTKH: _place(stack, index, jnp.swapaxes(row_BTKH, 1, 2), 3, place)
    return KeyValues(put(rows.k_LBKSH, k_BTKH), put(rows.v_LBKSH, v_BTKH))


def look(q_BTNH: Float[Array, "B 1 N H"], rows: KeyValues, index: Array, i: Array, *, null: bool = False) -> Found:
    """What row i finds among the rows up to itself, which must be in its place: `attend` for one query.

    `null`: and beside them a key of zeros, which has nothing to say.
    """
    k_BKSH, v_BKSH = _layer(rows.k_LBKSH, index), _layer(rows.v_LBKSH, index)
    (B, _, N, H), (_, K, S, _) = q_BTNH.shape, k_BKSH.shape
    q_BKGH = (q_BTNH * jnp.asarray(H**-0.5, q_BTNH.dtype)).reshape(B, K, N // K, H)
    scores_BKGS = jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32)
    # Once every place is taken, all are seen: a ring of the window's size has room for nothing outside it.
    scores_BKGS = jnp.where((jnp.arange(S) <= i)[None, None, None], scores_BKGS, -jnp.inf)
    evidence_BKG = jax.nn.logsumexp(scores_BKGS, axis=-1)
    evidence_BKG = jnp.logaddexp(evidence_BKG, 0.0) if null else evidence_BKG
    weights_BKGS = jnp.exp(scores_BKGS - evidence_BKG[..., None]).astype(v_BKSH.dtype)
    out_BKGH = jnp.einsum("bkgs,bksh->bkgh", weights_BKGS, v_BKSH)
    return Found(out_BKGH.reshape(B, 1, N, H), evidence_BKG.reshape(B, 1, N))


def _convolve(conv: ShortConv, x_BTD: Float[Array, "B 1 D"], cache: Cache, index: Array) -> tuple[Float[Array, "B 1 D"], Cache]:
    """The convolution of one layer at one token. Before the first one there are zeros, as before a document."""
    assert cache.conv_LBJD is not None
    recent_BTD = jnp.concatenate([_layer(cache.conv_LBJD, index), x_BTD], axis=1)
    kept = lax.dynamic_update_index_in_dim(cache.conv_LBJD, recent_BTD[:, 1:], index, axis=0)
    return conv(recent_BTD, None)[:, -1:], dataclasses.replace(cache, conv_LBJD=kept)


def _attend(
    mixer: Attention | Multiscale, x_BTD: Float[Array, "B 1 D"], cache: Cache, at: _Where
) -> tuple[Float[Array, "B 1 D"], Cache]:
    """The attention of one layer for one token: (its result, the cache with what this token adds to that layer)."""
    base = mixer if isinstance(mixer, Attention) else mixer.base
    t = cache.position
    positions_BT = jnp.broadcast_to(t, x_BTD.shape[:2])
    q_BTNH, k_BTKH, v_BTKH = base.project(x_BTD)
    turned_BTNH, key_BTKH = base.placed(q_BTNH, k_BTKH, positions_BT)
    rows, index = kept(cache.fine[at.i], at.group, t, key_BTKH, v_BTKH), at.layer
    fine = (*cache.fine[: at.i], rows, *cache.fine[at.i + 1 :])
    found, coarse = [look(turned_BTNH, rows, at.group, t)], []
    if isinstance(mixer, Attention):
        return base.output(found[0].out_BTNH), dataclasses.replace(cache, fine=fine)
    summary = k_BTKH, v_BTKH
    for c, before in enumerate(cache.coarse, 1):
        scale, summary = _summarize(mixer, c, before, summary, index, t)
        coarse.append(scale)
        # Of the blocks before its own one; before the first of them it finds nothing, and `settle` knows that.
        found.append(look(turned_BTNH, scale.rows, index, t // mixer.strides[c] - 1, null=True))
    mixed_BTNH, _, _ = mixer.settle(tuple(found), positions_BT)
    return base.output(mixed_BTNH), dataclasses.replace(cache, fine=fine, coarse=tuple(coarse))


def _put_recent(stack: Array, row: Array, index: Array, t: Array, below: int) -> Array:
    """The ring of recent rows of the scale below, with token t's in its place."""
    return _place(stack, index, row, 2, (t // below) % stack.shape[2])


def _last_two_blocks(stack: Array, index: Array, i: Array) -> Array:
    """Of one layer, the block before row i's own one first: of an even row it lies in the second half of the ring."""
    J = stack.shape[2]
    return jnp.roll(_layer(stack, index), jnp.where(i % 2 == 0, J // 2, 0), axis=1)


def _goes_on(i: Array, batch: int) -> Array:
    """Of the two blocks that a row is pooled from:
    nothing comes before the first, and before the second whatever is there."""
    return jnp.broadcast_to(jnp.stack([jnp.zeros_like(i, bool), i > 0]), (batch, 2))


def _summarize(
    mixer: Multiscale, c: int, scale: Coarse, finer: tuple[Array, Array], index: Array, t: Array
) -> tuple[Coarse, tuple[Array, Array]]:
    """Scale c after token t, whose row of the scale below is `finer`;
    and its own row, if t ends one, for the scale above.

    Row t // stride is under way until its last token comes. Until then zeros stand in its place, where nobody looks:
    writing them costs one row, and what leaves a `cond` is copied, so that all rows must not.
    """
    stride, below = mixer.strides[c], mixer.strides[c - 1]
    i, ended = t // stride, (t + 1) % stride == 0
    k_LBJKH, v_LBJKH = (
        _put_recent(stack, row, index, t, below) for stack, row in zip((scale.k_LBJKH, scale.v_LBJKH), finer, strict=True)
    )

    def summary() -> tuple[tuple[Array, Array], Array]:
        k, v = (_last_two_blocks(stack, index, i) for stack in (k_LBJKH, v_LBJKH))
        k, v = (pair[:, 1:] for pair in mixer.coarser(c, k, v, _goes_on(i, k.shape[0]))[1])
        return (k, v), mixer.base.placed_keys(k, jnp.broadcast_to(i * stride + stride - 1, k.shape[:2]))

    nothing = jax.tree.map(jnp.zeros_like, finer)
    row, key_BTKH = lax.cond(ended, summary, lambda: (nothing, nothing[0]))
    return Coarse(k_LBJKH, v_LBJKH, kept(scale.rows, index, i, key_BTKH, row[1])), row
