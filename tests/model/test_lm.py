"""The model: causal, packed = alone, the public calls, counts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.config import ConfigError, presets
from nash_mhc.config.schema import KEEPABLE
from nash_mhc.model import LM, remat
from nash_mhc.model.architectures import abstract_model, count_parameters
from nash_mhc.model.lm import flops_per_token
from nash_mhc.model.protocol import Execution

CFG = dataclasses.replace(small.MODEL, kv_heads=4, qkv_bias=True, window=None)


@functools.cache
def fresh(config, *shape):
    """The state that a run begins with on a mesh."""
    cfg = small.mesh_config(config(), *shape)
    return small.create_state(cfg, small.make_mesh(cfg.mesh))


@pytest.fixture(scope="module")
def model():
    return small.generic_model(CFG)


def tokens(B=2, T=24, seed=1):
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, (B, T), np.int32)


@jax.jit
def logits_of(model, tokens_BT, segments_BT=None):
    return model(tokens_BT, segments_BT)


def test_logits_do_not_depend_on_later_tokens(model):
    before = tokens()
    for t in (1, 7, 23):
        after = before.copy()
        after[:, t:] = (before[:, t:] + 1) % CFG.vocab_size
        changed = np.abs(np.asarray(logits_of(model, before)) - np.asarray(logits_of(model, after))).max(axis=(0, 2))
        assert changed[:t].max() == 0.0
        assert changed[t] > 0.0


def test_a_packed_document_has_the_logits_it_has_alone(model):
    rows, segments = tokens(B=3), np.zeros((3, 24), np.int32)
    for row, documents in enumerate(([9, 11], [9], [11])):  # both, then each in a row of its own, with padding of other tokens
        segments[row, : sum(documents)] = np.repeat(np.arange(1, len(documents) + 1), documents)
    rows[1, :9], rows[2, :11] = rows[0, :9], rows[0, 9:20]
    packed, first, second = np.asarray(logits_of(model, rows, segments))
    np.testing.assert_allclose(packed[:9], first[:9], atol=2e-5)
    np.testing.assert_allclose(packed[9:20], second[:11], atol=2e-5)
    np.testing.assert_allclose(packed[:9], logits_of(model, rows[:1, :9])[0], atol=2e-5)  # without any padding or segments


def test_logits_have_the_real_vocabulary_in_float32(model):
    logits = logits_of(model, tokens())
    assert logits.shape == (2, 24, CFG.vocab_size)
    assert logits.dtype == jnp.float32
    assert CFG.padded_vocab == 384


def test_a_window_hides_what_is_farther_back_than_the_layers_reach():
    cfg = dataclasses.replace(CFG, layers=1, window=4)
    model = small.generic_model(cfg)
    row = tokens()
    moved = row.copy()
    moved[:, 2] = (row[:, 2] + 1) % CFG.vocab_size
    changed = np.abs(np.asarray(logits_of(model, row)) - np.asarray(logits_of(model, moved))).max(axis=(0, 2))
    assert np.flatnonzero(changed).tolist() == [2, 3, 4, 5]


def test_tied_embeddings_are_one_leaf_and_untied_two():
    tied, untied = (dataclasses.replace(CFG, tied_embeddings=t) for t in (True, False))
    assert count_parameters(untied) - count_parameters(tied) == CFG.padded_vocab * CFG.width
    assert jax.eval_shape(lambda: LM.init(tied, key=jax.random.key(0))).output_VD is None


@pytest.mark.parametrize("config", [small.config, small.nash_config])
def test_parameters_start_at_the_same_values_on_every_mesh(config):
    one, eight = fresh(config).model, fresh(config, 2, 2, 2).model
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_state_that_other_tests_begin_with_is_the_one_that_a_run_begins_with():
    cfg = small.config()
    ours, theirs = small.start(cfg, small.make_mesh(cfg.mesh)), fresh(small.config)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_flops_are_those_that_xla_counts_in_the_forward_pass():
    # One layer, so that the scan's body counts once;
    # matmuls so large that what we leave out (softmax, norms) hardly shows.
    cfg = dataclasses.replace(CFG, layers=1, qkv_bias=False, width=256, ffn=1024, heads=4, kv_heads=2, head_dim=64)
    T = 64
    model = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    forward = lambda m, t: m(t, None, Execution(attention="reference"))
    counted = jax.jit(forward).lower(model, jax.ShapeDtypeStruct((1, T), jnp.int32)).compile().cost_analysis()["flops"] / T
    causal_half = 2 * T * cfg.heads * cfg.head_dim  # XLA computes the whole square of scores, of which half is useful
    assert flops_per_token(cfg, T) / 3 + causal_half == pytest.approx(counted, rel=0.03)


def test_a_window_lowers_the_flops():
    assert flops_per_token(dataclasses.replace(CFG, window=16), 512) < flops_per_token(CFG, 512)


@pytest.mark.parametrize("name", presets.sizes())
def test_every_preset_is_a_valid_run_that_a_2x2x2_mesh_divides(name):
    from nash_mhc.parallel.mesh import check_fit

    run = presets.run(name)
    assert run.model == presets.model(name)
    check_fit(run.data, run.model, {"data": 2, "fsdp": 2, "tp": 2})


def test_the_default_preset_divides_over_eight_devices_along_any_axis():
    from nash_mhc.parallel.mesh import check_fit

    for shape in ((8, 1, 1), (1, 8, 1), (1, 1, 8)):
        check_fit(presets.run().data, presets.run().model, dict(zip(("data", "fsdp", "tp"), shape, strict=True)))


def test_an_unknown_size_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown size 'huge' of --model-kind nash-mhc; choose from tiny, small"):
        presets.model("huge")


def untied():
    return small.config(model__tied_embeddings=False)


# The layers and the table have no part in each other's start: Nash-MHC with one of the two.
GUESSING = {"dense, tied": small.config, "dense, untied": untied, "nash, tied": small.nash_config}


@pytest.mark.parametrize("config", GUESSING.values(), ids=GUESSING)
def test_the_first_loss_is_that_of_guessing(config):
    """The first number that everyone checks: within 3% of ln V, and no token is predicted to come again."""
    cfg, model, row = config().model, fresh(config).model, tokens(8, 32)
    logits = np.asarray(logits_of(model, row), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_probs[:, :-1], row[:, 1:, None], axis=-1)
    assert losses.mean() == pytest.approx(math.log(cfg.vocab_size), rel=0.03)
    itself = np.exp(np.take_along_axis(log_probs, row[..., None], axis=-1))
    assert itself.mean() < 2 / cfg.vocab_size


def test_every_name_that_may_be_kept_marks_something():
    """A policy that asks for a name which nothing has would keep nothing, and say nothing."""
    assert set(remat.MARKS) == set(KEEPABLE)
    shape = abstract_model(small.nash_config().model)
    traced = str(jax.make_jaxpr(lambda m, t: m.hidden(t)[0])(shape, jax.ShapeDtypeStruct((2, 32), jnp.int32)))
    marked = {name for name in KEEPABLE if f"name[name={remat.MARKS[name]}]" in traced}
    assert marked == set(KEEPABLE) - {"attention"}  # which the kernels of GPUs and TPUs mark
