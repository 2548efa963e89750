"""Reservoir models: recurrences that are what was asked for, on any mesh, read by what is trained."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at

from nash_mhc.config.reservoir import ReservoirConfig
from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.model import reservoir
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.ops.linear_scan import linear_scan, linear_scan_reference
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.state import abstract_state

CFG = ReservoirConfig(width=32, units=48, ffn=64)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: reservoir.Reservoir.init(CFG, key=jax.random.key(1)))()


logits_of = jax.jit(lambda model, tokens_BT, segments_BT: model.hidden(tokens_BT, segments_BT)[0] @ model.unembed_VD[:257].T)


def test_the_scan_is_the_recurrence_values_and_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    B, T, N = 3, 37, 8
    a_2N = reservoir.pairs(reservoir.multipliers(dataclasses.replace(CFG, units=N)))
    b_2BTN = jnp.stack([jax.random.normal(k, (B, T, N)) for k in keys[:2]])
    segments_BT = jnp.sort(jax.random.randint(keys[2], (B, T), 0, 4), axis=1)
    outcomes = []
    for form in (linear_scan, linear_scan_reference):
        h, pull = jax.vjp(lambda a, b, form=form: form(a, b, segments_BT), a_2N, b_2BTN)
        outcomes.append((h, *pull(jnp.ones_like(h))))
    for got, want in zip(*outcomes, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("radius", [0.5, 0.95, 0.999])
def test_the_radius_is_the_one_that_was_asked_for_and_states_forget_at_that_rate(radius):
    cfg = dataclasses.replace(CFG, radius=radius, leak=1.0, slowest_leak=1.0)
    m_N = reservoir.multipliers(cfg)
    # The ring whose eigenvalues these are, as a matrix: its spectral radius by numpy, not by our formula.
    ring = radius * np.roll(np.eye(cfg.units), 1, axis=0)
    ring[0, -1] *= -1  # half a step around
    assert np.abs(np.linalg.eigvals(ring)).max() == pytest.approx(radius, rel=1e-6)
    around = lambda numbers: np.sort(np.angle(numbers))
    np.testing.assert_allclose(around(np.linalg.eigvals(ring)), around(m_N), atol=1e-6)
    assert np.abs(m_N).max() == pytest.approx(radius, rel=1e-6)
    # Two states that begin apart, driven alike: what is between them shrinks by that factor a token.
    drawn = np.random.default_rng(0)
    h = drawn.normal(size=(2, cfg.units)) + 0j
    first = np.abs(h[0] - h[1])
    for _ in range(20):
        h = m_N[None] * h + drawn.normal(size=(1, cfg.units))
    np.testing.assert_allclose(np.abs(h[0] - h[1]) / first, radius**20, rtol=1e-6)


def test_slow_units_have_their_own_leak_and_nothing_grows():
    sizes = np.abs(reservoir.multipliers(CFG))
    assert sizes.max() < 1 and sizes.min() < 0.96 and np.mean(sizes > 0.97) > 0.2  # all time scales
    with pytest.warns(UserWarning, match=r"model.radius 1.1: a reservoir forgets where it began only below 1"):
        ReservoirConfig(radius=1.1)
    with pytest.raises(ConfigError, match="swap them"):
        ReservoirConfig(leak=0.1, slowest_leak=0.2)


def test_it_is_a_language_model_whose_reservoirs_are_no_parameters(model):
    assert isinstance(model, LanguageModel)
    assert {name.rpartition(".")[2] for name in named_leaves(model)} == {
        "embed_VD", "scale_D", "gate_DN", "read_real_ND", "read_imaginary_ND", "gate_DF", "up_DF", "down_FD",
    }  # fmt: skip
    one, other = (np.asarray(reservoir.input_matrix(CFG, layer)) for layer in (0, 1))
    assert (one != other).any() and (one == np.asarray(jax.jit(lambda n: reservoir.input_matrix(CFG, n))(0))).all()
    assert np.abs(one).max() <= (1.5 / CFG.width) ** 0.5
    changed = dataclasses.replace(CFG, reservoir_seed=1)
    assert (np.asarray(reservoir.input_matrix(changed, 0)) != one).any()


def test_each_token_sees_its_past_and_no_other_document(model):
    """Gradients of a place towards what it must not know are exactly 0, and decoding step by step is the same."""
    tokens_BT = jax.random.randint(jax.random.key(2), (1, 24), 0, 257)
    segments_BT = jnp.asarray([[1] * 10 + [2] * 14])
    x_BTD = jax.random.normal(jax.random.key(3), (1, 24, CFG.width))

    def after(x_BTD):
        layer = jax.tree.map(lambda a: a[0], model.layers)
        return layer(x_BTD, segments_BT, CFG, 0)

    jacobian = jax.jit(jax.jacrev(lambda x: after(x).sum(axis=(0, 2))))(x_BTD)[:, 0]  # [place, of which place, D]
    depends = np.abs(np.asarray(jacobian)).max(axis=-1) > 0
    allowed = np.tril(np.ones((24, 24), bool)) & (np.asarray(segments_BT)[0][:, None] == np.asarray(segments_BT)[0][None])
    np.testing.assert_array_equal(depends, allowed)
    packed = logits_of(model, tokens_BT, segments_BT)
    alone = logits_of(model, tokens_BT[:, 10:], jnp.ones((1, 14), jnp.int32))
    np.testing.assert_allclose(packed[:, 10:], alone, rtol=1e-4, atol=1e-5)


def test_decoding_is_the_whole_pass_with_a_state_of_one_size(model):
    tokens_BT = jax.random.randint(jax.random.key(4), (3, 20), 0, 257)
    want = logits_of(model, tokens_BT, None)
    step = jax.jit(reservoir.decode)
    state = reservoir.empty_state(CFG, 3, 20, jnp.float32)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for t in range(20):
        logits_BV, state = step(model, state, tokens_BT[:, t])
        np.testing.assert_allclose(logits_BV, want[:, t], rtol=2e-4, atol=2e-5)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == size == CFG.layers * 3 * CFG.units * 8


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    cfg = dataclasses.replace(RUN, model=CFG, optim=dataclasses.replace(RUN.optim, learning_rate=3e-3))
    train = dataclasses.replace(cfg.train, total_steps=40, eval_interval=20, checkpoint_interval=20, log_interval=10)
    cfg = dataclasses.replace(cfg, train=train)
    return cfg, at(tmp_path_factory.mktemp("reservoir") / "run", cfg)


def test_a_run_learns_and_a_mesh_learns_the_same(learned, tmp_path):
    cfg, unbroken = learned
    shorter = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, total_steps=20))
    first = at(tmp_path / "run", shorter)
    assert unbroken.evaluation["eval/loss"] < first.evaluation["eval/loss"] < 5.0
    assert unbroken.evaluation["eval/loss"] < 3.2
    few = dataclasses.replace(cfg.train, total_steps=3)
    meshed = dataclasses.replace(cfg, mesh=MeshConfig(data=2, fsdp=2, tp=2), train=few)
    alone = dataclasses.replace(meshed, mesh=MeshConfig())
    states = [at(tmp_path / name, c, evaluated=False).state for name, c in (("mesh", meshed), ("alone", alone))]
    assert_equal_states(states[0].model, states[1].model, atol=3e-5)


def test_a_stopped_run_is_the_unbroken_one(learned, tmp_path):
    cfg, unbroken = learned
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "40")
    assert_equal_states(at(copy, cfg).state, unbroken.state)
    assert abstract_state(cfg).model.cfg == CFG


def test_no_collective_stands_inside_the_scan():
    """tp splits the units, and a unit's state is its own."""
    cfg = small.mesh_config(dataclasses.replace(small.config(), model=CFG), 1, 1, 8)
    mesh = small.make_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: reservoir.Reservoir.init(CFG, key=jax.random.key(1)))
        tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
        text = jax.jit(lambda m, t: m.hidden(t, t)[0]).lower(model, tokens).compile().as_text()
    inside = [line for line in text.splitlines() if "linear_scan" in line and "all-" in line]
    assert "linear_scan" in text and not inside
