"""What is shown of a model's inside is what the model itself has computed with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.config.schema import ConfigError
from nash_mhc.model import LM
from nash_mhc.model.inside import look
from nash_mhc.model.parts import embed
from nash_mhc.model.protocol import Execution
from nash_mhc.model.residual import HyperConnection

# Grouped heads, and every second layer without the window. (Doubly stochastic matrices of two streams would commute.)
CFG = dataclasses.replace(small.NASH, kv_heads=4, full_every=2, streams=3)
PLAIN = Execution(attention="xla")
T = 32


@pytest.fixture(scope="module")
def model():
    return small.generic_model(CFG)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, CFG.vocab_size, T)


@pytest.fixture(scope="module")
def inside(model, tokens):
    return look(model, tokens)


def test_it_is_the_forward_pass_of_the_model_and_its_figures_are_those_that_a_run_reports(model, tokens, inside):
    def forward(model, tokens_BT):
        hidden_BTD, report = model.hidden(tokens_BT, execution=PLAIN)
        return hidden_BTD[0], model.health(report)

    hidden_TD, health = jax.jit(forward)(model, jnp.asarray(tokens)[None])
    np.testing.assert_allclose(inside.hidden_TD, hidden_TD, atol=1e-5)
    close = lambda got, name: np.testing.assert_allclose(got, health[name], rtol=1e-4, atol=1e-5, err_msg=name)
    close(inside.weights_LCTN.mean(axis=(2, 3)), "scale_weight")
    close(inside.entropy_LTN.mean(axis=(1, 2)), "scale_entropy")
    close(inside.composite_LTRR.sum(axis=-1).max(axis=(1, 2)), "gain_forward")
    close(inside.composite_LTRR.sum(axis=-2).max(axis=(1, 2)), "gain_backward")
    assert inside.weights_LCTN.std() > 0.1  # there is something to see


def test_weights_sum_to_one_and_weigh_what_the_scales_found_as_attention_does(model, inside):
    np.testing.assert_allclose(inside.weights_LCTN.sum(axis=1), 1.0, atol=1e-5)
    assert (inside.weights_LCTN[:, 1, : inside.strides[1]] == 0).all()  # no block has ended before
    mixed_LTNH = np.einsum("lctn,lctnh->ltnh", inside.weights_LCTN, inside.found_LCTNH)
    attention_LTD = np.einsum("ltnh,lnhd->ltd", mixed_LTNH, np.asarray(model.layers.attention.base.out_NHD))
    np.testing.assert_allclose(inside.attention_LTD, attention_LTD, atol=1e-4)


def test_every_mixing_matrix_is_doubly_stochastic_and_they_act_one_after_the_other(model, tokens, inside):
    mixing = inside.mixing_LSTRR
    assert mixing.shape == (CFG.layers, 2, T, CFG.streams, CFG.streams)
    for axis in (-1, -2):
        np.testing.assert_allclose(mixing.sum(axis=axis), 1.0, atol=1e-5)
        np.testing.assert_allclose(inside.composite_LTRR.sum(axis=axis), 1.0, atol=1e-4)
    assert mixing.min() >= 0

    def first(model, tokens_BT):  # what the first sub-layer does with the streams that enter
        layer = jax.tree.map(lambda a: a[0], model.layers)
        x_BTD = embed(model.embed_VD, tokens_BT, jnp.float32) * CFG.width**0.5
        return layer.attention_residual.read(HyperConnection.enter(CFG, x_BTD), layer.attention_norm)[1].res

    rows = jax.jit(first)(model, jnp.asarray(tokens)[None])
    np.testing.assert_allclose(mixing[0, 0], np.stack([np.stack(row, -1) for row in rows], -2)[0], atol=1e-6)
    (_, first_ffn), (attention, ffn) = mixing
    composite = np.einsum("tij,tjk,tkl,tlm->tim", ffn, attention, first_ffn, mixing[0, 0])  # the last one acts last
    np.testing.assert_allclose(inside.composite_LTRR[-1], composite, atol=1e-5)
    assert mixing[:, 0].std(axis=1).max() > 1e-3  # other matrices for other tokens, and in the other sub-layer
    assert np.abs(mixing[:, 0] - mixing[:, 1]).max() > 1e-2


def test_streams_that_are_mixed_once_a_layer_have_one_matrix_there(tokens):
    cfg = dataclasses.replace(CFG, residual="mhc-layer", scales=2, full_every=0)
    model = small.generic_model(cfg)
    inside = look(model, tokens)
    assert inside.mixing_LSTRR.shape[:2] == (CFG.layers, 1)
    health = jax.jit(lambda model, tokens_BT: model.health(model.hidden(tokens_BT, execution=PLAIN)[1]))(
        model, jnp.asarray(tokens)[None]
    )
    np.testing.assert_allclose(inside.composite_LTRR.sum(axis=-2).max(axis=(1, 2)), health["gain_backward"], rtol=1e-4)
    np.testing.assert_allclose(inside.mixing_LSTRR.mean(axis=2), health["res"], rtol=1e-4, atol=1e-5)


def test_the_gaze_of_a_head_brings_back_what_it_found(inside):
    for layer in range(CFG.layers):
        for head in (0, CFG.heads - 1):
            for c, (gaze, rows) in enumerate(zip(inside.gaze(layer, head), inside.rows, strict=True)):
                stride, weights_TS = gaze.stride, gaze.weights_TS
                np.testing.assert_allclose(weights_TS.sum(axis=1) + gaze.nothing_T, 1.0, atol=1e-5)
                t, s = np.arange(T)[:, None], np.arange(weights_TS.shape[1])[None]
                assert (weights_TS[(s + 1) * stride > t // stride * stride + (c == 0)] == 0).all()  # blocks that ended before
                if c == 0 and inside.windows[layer] is not None:
                    assert (weights_TS[t - s >= inside.windows[layer]] == 0).all()
                values_SH = rows.v_BIKH[layer, 0, :, head // (CFG.heads // CFG.kv_heads)]
                found_TH = weights_TS @ (values_SH[1:] if c else values_SH)
                np.testing.assert_allclose(inside.found_LCTNH[layer, c, :, head], found_TH, atol=1e-4)
    assert inside.windows == (8, None)


def test_nothing_changes_before_a_token_that_changes(model, tokens, inside):
    t = 21  # in the middle of a block
    others = tokens.copy()
    others[t:] = (others[t:] + 1) % CFG.vocab_size
    changed = look(model, others)
    time = {"hidden_TD": 0, "weights_LCTN": 2, "found_LCTNH": 2, "attention_LTD": 1, "mixing_LSTRR": 2, "composite_LTRR": 1}
    for name, axis in time.items():
        before, after = (np.moveaxis(getattr(x, name), axis, 0) for x in (inside, changed))
        np.testing.assert_array_equal(before[:t], after[:t], err_msg=name)
        assert np.abs(before[t:] - after[t:]).max() > 1e-3, name
    for a, b in zip(inside.gaze(1, 2), changed.gaze(1, 2), strict=True):
        np.testing.assert_array_equal(a.weights_TS[:t], b.weights_TS[:t])


def test_a_text_may_have_any_length_and_a_model_one_stream(tokens):
    model = small.generic_model(dataclasses.replace(CFG, residual="plain", layers=1, full_every=0))
    short = look(model, tokens[:13])
    assert short.weights_LCTN.shape[2] == len(short.gaze(0, 0)[1].weights_TS) == 13
    assert short.mixing_LSTRR is None
    with pytest.raises(ConfigError, match="no residual streams"):
        short.composite_LTRR  # noqa: B018


def test_what_cannot_be_shown_is_said_in_a_line(model, tokens, inside):
    with pytest.raises(ConfigError, match="--model-scales above 1"):
        look(jax.eval_shape(lambda: LM.init(small.MODEL, key=jax.random.key(0))), tokens)
    for wrong in ([], np.array([[1, 2]]), [CFG.vocab_size], [-1]):
        with pytest.raises(ConfigError, match="from 0 to 256"):
            look(model, wrong)
    with pytest.raises(ConfigError, match=r"layer 2, head 0: this model has layers 0 to 1 and heads 0 to 7"):
        inside.gaze(2, 0)
