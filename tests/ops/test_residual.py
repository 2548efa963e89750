"""The residual of a sub-layer: what its maps keep whatever their parameters are,
and plain addition as a special case."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.model import LM
from nash_mhc.model.lm import Layer
from nash_mhc.model.parts import RMSNorm
from nash_mhc.model.residual import HyperConnection, PlainResidual, StreamState
from nash_mhc.ops import residual_streams
from nash_mhc.parallel.sharding import for_compute

CFG = dataclasses.replace(small.NASH, streams=4)
R, B, T, D = CFG.streams, 2, 32, CFG.width
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


started = jax.jit(lambda: HyperConnection.init(CFG, key=jax.random.key(0)))


def normal(shape, count, dtype=np.float32):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for _ in range(count)]


def connection(kind):
    """As it starts, or with parameters that no training would reach."""
    fresh = started()
    if kind == "fresh":
        return fresh
    rng = np.random.default_rng(0)
    draw = lambda a, size: jnp.asarray((size * rng.normal(size=a.shape)).astype(np.float32))
    alpha = jnp.asarray(np.array([1.0, -2.0, 3.0], np.float32))
    return dataclasses.replace(fresh, phi_RDM=draw(fresh.phi_RDM, 0.5), bias_M=draw(fresh.bias_M, 3.0), alpha_3=alpha)


class NoNorm(RMSNorm):
    def __call__(self, x):
        return x


@jax.jit
def pass_through(connection, state, y_BTD):
    """(maps, what the sub-layer reads, before its norm, the state after it)."""
    state = StreamState(state, residual_streams.squares(state))
    x_BTD, maps = connection.read(state, NoNorm(jnp.ones(D), 0.0))
    return (maps.pre, maps.post, maps.res), x_BTD, connection.write(state, y_BTD, maps).xs


@functools.cache
def passed(kind, dtype):
    *state, y_BTD = normal((B, T, D), R + 1, jnp.dtype(dtype))
    ready = for_compute(connection(kind), jnp.dtype(dtype))
    maps, x_BTD, after = pass_through(ready, tuple(state), jnp.asarray(np.zeros(y_BTD.shape, jnp.dtype(dtype))))
    _, _, written = pass_through(ready, tuple(state), y_BTD)
    wide = lambda tree: np.array(jax.tree.map(lambda a: np.asarray(a, np.float64), tree))
    return tuple(wide(a) for a in (*maps, state, y_BTD, x_BTD, after, written))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["fresh", "wild"])
def test_the_mixing_of_streams_is_doubly_stochastic_and_keeps_their_mean(kind, dtype):
    pre, post, res, state, _, _, after, _ = passed(kind, dtype)
    assert res.shape == (R, R, B, T)
    assert res.min() >= 0.0
    np.testing.assert_allclose(res.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(res.sum(axis=0), 1.0, atol=1e-5)
    norms = np.linalg.norm(np.moveaxis(res, (0, 1), (-2, -1)), 2, axis=(-2, -1))
    assert norms.max() <= 1 + 1e-5
    np.testing.assert_allclose(after.mean(axis=0), state.mean(axis=0), atol=TOLERANCE[dtype])
    assert pre.min() >= 0.0 and pre.max() <= 1.0 and post.min() >= 0.0 and post.max() <= 2.0
    # It is a mixing: every stream goes on in the others, hardly at the start and plainly elsewhere.
    moved = np.abs(after - state).max()
    assert 0.0 < moved < 0.1 if kind == "fresh" else moved > 1.0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_reading_and_writing_are_the_equations_of_the_paper(dtype):
    pre, post, res, state, y_BTD, x_BTD, after, written = passed("wild", dtype)
    np.testing.assert_allclose(x_BTD, np.einsum("rbt,rbtd->btd", pre, state), atol=TOLERANCE[dtype])
    np.testing.assert_allclose(after, np.einsum("ijbt,jbtd->ibtd", res, state), atol=TOLERANCE[dtype])
    np.testing.assert_allclose(written, after + post[..., None] * y_BTD[None], atol=2 * TOLERANCE[dtype])


def test_maps_that_do_not_look_at_the_token_are_plain_addition():
    """Without phi, fresh streams are read as their mean and written alike:
    R copies of the plain residual, then their sum."""
    cfg = dataclasses.replace(CFG, scales=1)
    model = jax.jit(lambda: LM.init(cfg, key=jax.random.key(2)))()
    phis = lambda m: (m.layers.attention_residual.phi_RDM, m.layers.ffn_residual.phi_RDM)
    mixed = eqx.tree_at(phis, model, replace_fn=jnp.zeros_like)
    layers = dataclasses.replace(model.layers, attention_residual=PlainResidual(), ffn_residual=PlainResidual())
    plain = dataclasses.replace(model, layers=layers, cfg=dataclasses.replace(cfg, residual="plain"))
    tokens_BT = np.random.default_rng(3).integers(0, cfg.vocab_size, (B, T), np.int32)
    forward = jax.jit(lambda model, tokens: model(tokens))
    want = forward(plain, tokens_BT)
    np.testing.assert_allclose(forward(mixed, tokens_BT), want, atol=1e-4)
    assert np.abs(np.asarray(forward(model, tokens_BT)) - want).max() > 1e-3  # with phi it is another function


def test_a_layer_that_mixes_once_adds_attention_and_feed_forward_to_what_it_has_read():
    cfg = dataclasses.replace(CFG, residual="mhc-layer")
    layer = jax.jit(lambda: Layer.init(cfg, cfg.group[0], key=jax.random.key(0)))()
    layer = dataclasses.replace(layer, attention_residual=connection("wild"))
    *xs, found_BTD = normal((B, T, D), R + 1)
    heard = []

    @jax.jit
    def through(layer, xs, found_BTD):
        seen = []

        def mixed(x_BTD):
            seen.append(x_BTD)
            return found_BTD, "said"

        after, said, (maps,) = layer._apply(StreamState(xs, residual_streams.squares(xs)), mixed)
        heard.append(said)
        return after, (maps.pre, maps.post, maps.res), seen

    @jax.jit
    def by_hand(layer, read_BTD, found_BTD):
        normed_BTD = layer.attention_norm(read_BTD)
        return normed_BTD, found_BTD + layer.ffn(layer.ffn_norm(normed_BTD + found_BTD))

    after, maps, (seen_BTD,) = through(layer, tuple(xs), found_BTD)
    pre, post, res = (np.asarray(part) for part in maps)
    read_BTD = np.einsum("rbt,rbtd->btd", pre, xs)
    normed_BTD, added_BTD = by_hand(layer, jnp.asarray(read_BTD), found_BTD)
    np.testing.assert_allclose(seen_BTD, normed_BTD, atol=1e-5)
    want = np.einsum("ijbt,jbtd->ibtd", res, xs) + post[..., None] * np.asarray(added_BTD)[None]
    np.testing.assert_allclose(np.array(after.xs), want, atol=1e-4)
    assert heard == ["said"]
    # Half of the maps, and nothing else less.
    twice = jax.eval_shape(lambda: Layer.init(CFG, CFG.group[0], key=jax.random.key(0)))
    numbers = lambda tree: sum(a.size for a in jax.tree.leaves(tree))
    assert numbers(twice) - numbers(layer) == numbers(layer.attention_residual)
