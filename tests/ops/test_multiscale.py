"""Attention in which every token asks every scale: without the game it is one softmax over all keys of all scales."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.model.captures import recording
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.model.mixers.multiscale import Multiscale
from nash_mhc.ops.attend import attend_with_lse
from nash_mhc.ops.attention_io import AttentionInput, by_block, by_token

CFG = dataclasses.replace(small.NASH, aggregation="convex", kv_heads=4)
T = 32


def mixer_of(cfg):
    """With noise on every parameter: what starts at 0 or 1 would not be missed if it were left out."""
    mixer = jax.tree.map(lambda a: a[0], small.generic_model(cfg).layers.attention)
    assert isinstance(mixer, Multiscale)
    return mixer


def pooled_by_hand(z_BTKH, taps_JKH, segments_BT):
    """Row i: its own block and the one before, where that is of the same document."""
    r = taps_JKH.shape[0] // 2
    z_BIJKH = z_BTKH.reshape(z_BTKH.shape[0], -1, r, *z_BTKH.shape[2:])
    both_BIJKH = jnp.concatenate([jnp.roll(z_BIJKH, 1, axis=1), z_BIJKH], axis=2)
    same_BI = segments_BT[:, ::r] == jnp.roll(segments_BT, 1, axis=1)[:, ::r]
    same_BI = same_BI & (jnp.arange(same_BI.shape[1]) > 0)[None]
    read_BIJ = jnp.repeat(jnp.stack([same_BI, jnp.ones_like(same_BI)], axis=-1), r, axis=-1)
    return jnp.einsum("bijkh,jkh->bikh", jnp.where(read_BIJ[..., None, None], both_BIJKH, 0.0), taps_JKH)


def one_softmax(mixer, x_BTD, segments_BT, window):
    """All keys of all scales in one list,
    and beside those of a coarse scale one that scores 0 and has nothing to say."""
    base = mixer.base
    layout = attention_layout(segments_BT.shape, segments_BT, mixer.strides)
    positions_BT = layout.positions_BT
    q, k, v = base.project(x_BTD)
    _, T, N, H = q.shape
    group = N // k.shape[2]
    turned, keys = base.rotate(q, k, positions_BT)
    wide = lambda z: jnp.repeat(z, group, axis=2)
    t = jnp.arange(T)
    near = (t[None] <= t[:, None]) & (t[:, None] - t[None] < window)
    mask = [near[None] & (segments_BT[:, :, None] == segments_BT[:, None])]
    scores = [jnp.einsum("btnh,bsnh->bnts", turned, wide(keys)) / H**0.5]
    values = [wide(v)]
    of_rows = segments_BT
    for c, stride in enumerate(mixer.strides[1:]):
        k, v = pooled_by_hand(k, mixer.pool_k_CJKH[c], of_rows), pooled_by_hand(v, mixer.pool_v_CJKH[c], of_rows)
        of_rows = segments_BT[:, ::stride]
        keys = base.rotate_keys(k, positions_BT[:, ::stride] + stride - 1)
        keys, said = (jnp.pad(wide(z), ((0, 0), (0, 1), (0, 0), (0, 0))) for z in (keys, v))
        offset = mixer.offset_CN[c][None, :, None, None]
        scores.append(jnp.einsum("btnh,bsnh->bnts", turned, keys) / H**0.5 + offset)
        values.append(said)
        i = jnp.arange(T // stride)
        blocks = (i[None] < t[:, None] // stride)[None] & (segments_BT[:, :, None] == of_rows[:, None])
        nothing = (positions_BT >= stride)[..., None]
        mask.append(jnp.concatenate([blocks, nothing], axis=-1))
    every = jnp.where(jnp.concatenate(mask, axis=-1)[:, None], jnp.concatenate(scores, axis=-1), -jnp.inf)
    weights = jax.nn.softmax(every, axis=-1)
    return base.output(jnp.einsum("bnts,bsnh->btnh", weights, jnp.concatenate(values, axis=1)))


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
def plain_gradient(mixer, x_BTD, segments_BT, probe_BTD, window):
    out_BTD = one_softmax(mixer, x_BTD, segments_BT, window)
    return jnp.sum(out_BTD * probe_BTD), out_BTD


@functools.cache
def gradients(kernel, window):
    """((of the parameters, of x), what came out), of a mixer that is the same for all kernels, and of None:
    of the one softmax, to which the window is a number, so that all windows share its program."""
    mixer = mixer_of(CFG)
    x_BTD, probe_BTD = np.random.default_rng(2).normal(size=(2, 2, T, CFG.width)).astype(np.float32)
    segments_BT = np.repeat([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], 4, axis=1).astype(np.int32)

    given = mixer, x_BTD, segments_BT, probe_BTD
    if kernel is None:
        return plain_gradient(*given, np.int32(window or T))

    def loss(mixer, x_BTD, segments_BT, probe_BTD):
        layout = attention_layout(segments_BT.shape, segments_BT, mixer.strides)
        out_BTD = mixer(x_BTD, layout, window=window, kernel=kernel)
        return jnp.sum(out_BTD * probe_BTD), out_BTD

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*given)


# That the plain kernel takes any window is in test_attend.
@pytest.mark.parametrize(
    ("kernel", "window"), [("xla", 8), pytest.param("xla", None, marks=pytest.mark.long), ("reference", 8)]
)
def test_without_the_game_it_is_one_softmax_over_all_keys_of_all_scales(kernel, window):
    (got_mixer, got_x), got = gradients(kernel, window)
    (want_mixer, want_x), want = gradients(None, window)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(got_x, want_x, atol=1e-4)
    for a, b in zip(jax.tree.leaves(got_mixer), jax.tree.leaves(want_mixer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-3)
    assert np.abs(want_mixer.offset_CN).min() > 0


def test_queries_of_a_block_share_a_row_and_come_back():
    q = np.random.default_rng(0).normal(size=(2, 12, 6, 4)).astype(np.float32)
    rows = np.asarray(jax.jit(by_block, static_argnums=(1, 2))(q, 4, 3))
    assert rows.shape == (2, 3, 24, 4)
    np.testing.assert_array_equal(jax.jit(by_token, static_argnums=(1, 2))(rows, 4, 3), q)
    # Key head 1 serves query heads 2 and 3 of all four tokens of the block.
    np.testing.assert_array_equal(rows[0, 1, 8:16].reshape(4, 2, 4), q[0, 4:8, 2:4])


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 8])
def test_the_lse_of_blocks_and_its_gradients_equal_the_reference(window):
    lse_equals_the_reference("xla", window, T=130)


def lse_equals_the_reference(kernel, window, T):
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(0.5 * rng.normal(size=(2, T, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    dlse = rng.normal(size=(2, T, 4)).astype(np.float32)
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, T)), axis=1))

    def loss(q, k, v, kernel):
        (found,) = attend_with_lse((AttentionInput(q, k, v, segments),), windows=(window,), kernels=(kernel,))
        return jnp.sum(found.out_BTNH * dout) + jnp.sum(found.lse_BTN * dlse), found

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    (got, found), (want, plain) = run(q, k, v, kernel), run(q, k, v, "reference")
    for a, b in zip((*got, *found), (*want, *plain), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 40])
def test_the_lse_of_splash_and_its_gradients_equal_the_reference(window, monkeypatch):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    make = splash.make_splash_mqa_single_device
    monkeypatch.setattr(splash, "make_splash_mqa_single_device", lambda **options: make(**options, interpret=True))
    lse_equals_the_reference("splash", window, T=128)


def test_a_token_in_the_first_block_of_its_document_finds_only_what_is_near():
    cfg = dataclasses.replace(CFG, aggregation="nash")
    mixer = mixer_of(cfg)
    x_BTD = jnp.asarray(np.random.default_rng(5).normal(size=(1, 16, cfg.width)), jnp.float32)
    placed = lambda: attention_layout((1, 16), 1 + jnp.arange(16)[None] // 4, cfg.strides)

    def forward(mixer, x_BTD):
        with recording({"game"}) as captured:
            mixer(x_BTD, placed(), window=cfg.window, kernel="xla")
        return captured["game"]

    game = jax.jit(forward)(mixer, x_BTD)
    weights = np.asarray(game.weight_BCN)[0] / 16  # documents of 4 tokens: two of each see one block of 2, none a block of 4
    np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-6)
    assert (weights[2] == 0.0).all()
    assert (weights[1] > 0.0).all() and (weights[1] < 0.5).all()
