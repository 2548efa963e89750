"""Reservoir models: their recurrences have the configured dynamics, on any mesh, and their readouts learn."""

import dataclasses
import functools
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, rows
from sampled import long

from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.kits.reservoir import model as reservoir
from nash_mhc.kits.reservoir import ridge as reservoir_ridge
from nash_mhc.kits.reservoir import scans
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.loading.load import load
from nash_mhc.model.architectures import abstract_model
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import abstract_state

CFG = ReservoirConfig(width=32, units=48, ffn=64)
TANH = dataclasses.replace(CFG, unit="tanh", ring=6)
ATTENDING = dataclasses.replace(CFG, layers=4, attention_every=2, heads=4, head_dim=8, window=7)


@pytest.fixture(scope="module", params=[CFG, TANH, ATTENDING], ids=["linear", "tanh", "attention"])
def model(request):
    return small.drawn_model(request.param)


# One shape for all tests of a model, so that its forward pass is one program.
TOKENS_BT = np.random.default_rng(4).integers(0, 257, (6, 33)).astype(np.int32)
WHOLE_BT = np.ones((6, 32), np.int32)  # one document per row


logits_of = jax.jit(lambda model, tokens_BT, segments_BT: model.hidden(tokens_BT, segments_BT)[0] @ model.unembed_VD[:257].T)


def token_by_token(a_2N, b_2BTN, segments_BT):
    """Compute h_t = a h_{t-1} + b_t, restarted at every document."""

    def step(h_2BN, inputs):
        b_2BN, continues_B = inputs
        h_2BN = jnp.where(continues_B[None, :, None], scans.complex_product(a_2N[:, None], h_2BN), 0) + b_2BN
        return h_2BN, h_2BN

    inputs = (jnp.moveaxis(b_2BTN, 2, 0), scans.continues(segments_BT).T)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(b_2BTN[:, :, 0]), inputs)[1], 0, 2)


def test_the_scan_is_the_recurrence_values_and_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    B, T, N = 3, 37, 8
    a_2N = reservoir.pairs(reservoir.multipliers(dataclasses.replace(CFG, units=N)))
    b_2BTN = jnp.stack([jax.random.normal(k, (B, T, N)) for k in keys[:2]])
    segments_BT = jnp.sort(jax.random.randint(keys[2], (B, T), 0, 4), axis=1)
    outcomes = []
    for form in (scans.linear_scan, token_by_token):
        weighed = lambda a, b, form=form: (jnp.sum((h := form(a, b, segments_BT)) * jnp.cos(b)), h)
        grads, h = jax.jit(jax.grad(weighed, argnums=(0, 1), has_aux=True))(a_2N, b_2BTN)
        outcomes.append((h, *grads))
    for got, want in zip(*outcomes, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_gpu_kernel_equals_the_associative_scan(backwards):
    """Runs the GPU's kernel in Pallas's interpreter. Documents end inside a block."""
    keys = jax.random.split(jax.random.key(0), 2)
    a_2N = reservoir.pairs(reservoir.multipliers(dataclasses.replace(CFG, units=64)))
    b_2BTN = jax.random.normal(keys[0], (2, 2, 64, 64))
    on_BT = jax.random.uniform(keys[1], (2, 64)) < 0.9
    assert scans.fits_gpu_kernel(b_2BTN.shape) and not scans.fits_gpu_kernel((2, 2, 47, 64))
    kernel = functools.partial(scans.gpu_recurrence, interpret=True, tokens=4)
    want, got = (
        jax.jit(functools.partial(form, backwards=backwards))(a_2N, b_2BTN, on_BT)
        for form in (scans.associative_recurrence, kernel)
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("radius", [0.5, 0.95, 0.999])
def test_states_forget_at_the_rate_of_the_configured_radius(radius):
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


def test_rings_of_tanh_units_forget_at_least_at_the_configured_rate():
    cfg = dataclasses.replace(TANH, radius=0.9, leak=1.0, slowest_leak=0.5)
    w_2N, ring = np.asarray(reservoir.ring_weights(cfg)), cfg.ring
    for weights in w_2N:  # each ring as a matrix: its spectral radius by numpy
        matrix = np.roll(np.eye(ring), 1, axis=0) * weights[:ring, None]
        np.testing.assert_allclose(np.abs(np.linalg.eigvals(matrix)), 0.9, rtol=1e-6)
    drawn = np.random.default_rng(0)
    h = [jnp.asarray(drawn.normal(size=(2, 3, cfg.units)), jnp.float32) for _ in range(2)]
    apart = float(jnp.abs(h[0] - h[1]).max())
    step = jax.jit(lambda h, b: reservoir.next_state(cfg, h, b))
    slowest = float((1 - reservoir.leaks(cfg) * (1 - cfg.radius)).max())
    for n in range(1, 40):
        b = jnp.asarray(drawn.normal(size=(2, 3, cfg.units)), jnp.float32)
        h = [step(each, b) for each in h]
        assert float(jnp.abs(h[0] - h[1]).max()) <= apart * slowest**n * 1.001
    with pytest.raises(ConfigError, match=r"model.ring 7 does not divide model.units 48; .* 49"):
        dataclasses.replace(TANH, ring=7)


def test_chunks_of_a_tanh_scan_are_one_token_after_the_other_values_and_gradients():
    b_2BTN = jax.random.normal(jax.random.key(0), (2, 3, 37, 12))
    segments_BT = jnp.sort(jax.random.randint(jax.random.key(1), (3, 37), 0, 4), axis=1)
    cfg = dataclasses.replace(TANH, units=12)
    parts = (reservoir.ring_weights(cfg), jnp.asarray(reservoir.leaks(cfg), jnp.float32))

    before = np.array([6 * (n // 6) + (n - 1) % 6 for n in range(12)])  # on its ring
    begins_TB = np.diff(np.asarray(segments_BT), axis=1, prepend=-1).T != 0

    def plain(b_2BTN):
        def one(h, at):
            b, begins = at
            h, leak = jnp.where(begins[None, :, None], 0.0, h), parts[1][None, None]
            h = (1 - leak) * h + leak * jnp.tanh(parts[0][:, None] * h[..., before] + b)
            return h, h

        along = (jnp.moveaxis(b_2BTN, 2, 0), jnp.asarray(begins_TB))
        return jnp.moveaxis(jax.lax.scan(one, jnp.zeros((2, 3, 12)), along)[1], 0, 2)

    weigh = jax.random.normal(jax.random.key(2), b_2BTN.shape)
    forms = (lambda b: scans.tanh_scan(*parts, b, segments_BT, 6, chunk=8), plain)
    got, want = (jax.jit(jax.value_and_grad(lambda b, form=form: jnp.sum(form(b) * weigh)))(b_2BTN) for form in forms)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


def test_multipliers_cover_all_time_scales_and_do_not_grow():
    sizes = np.abs(reservoir.multipliers(CFG))
    assert sizes.max() < 1 and sizes.min() < 0.96 and np.mean(sizes > 0.97) > 0.2  # all time scales
    with pytest.warns(UserWarning, match=r"model.radius 1.1: .* only below 1"):
        ReservoirConfig(radius=1.1)
    with pytest.raises(ConfigError, match="swap them"):
        ReservoirConfig(leak=0.1, slowest_leak=0.2)


def test_it_is_a_language_model_whose_reservoirs_are_not_parameters(model):
    assert isinstance(model, LanguageModel)
    attention = {"q_DNH", "k_DKH", "v_DKH", "out_NHD"} if model.cfg.attention_every else set()
    assert {name.rpartition(".")[2] for name in named_leaves(model)} == attention | {
        "embed_VD", "scale_D", "gate_DN", "read_real_ND", "read_imaginary_ND", "gate_DF", "up_DF", "down_FD",
    }  # fmt: skip
    one, other = (np.asarray(reservoir.input_matrix(CFG, layer)) for layer in (0, 1))
    assert (one != other).any() and (one == np.asarray(jax.jit(lambda n: reservoir.input_matrix(CFG, n))(0))).all()
    assert np.abs(one).max() <= (1.5 / CFG.width) ** 0.5
    changed = dataclasses.replace(CFG, reservoir_seed=1)
    assert (np.asarray(reservoir.input_matrix(changed, 0)) != one).any()


def test_tokens_see_only_the_past_of_their_document(model):
    """Gradients to other tokens are exactly 0, and the result of a document does not depend on its position."""
    segments_BT = np.asarray([[1] * 10 + [2] * 14])
    x_BTD = np.random.default_rng(3).normal(size=(1, 24, CFG.width)).astype(np.float32)

    def after(x_BTD):
        layer = jax.tree.map(lambda a: a[0], model.layers)
        return layer(x_BTD, jnp.asarray(segments_BT), model.cfg, 0)

    jacobian = jax.jit(jax.jacrev(lambda x: after(x).sum(axis=(0, 2))))(x_BTD)[:, 0]  # [place, of which place, D]
    depends = np.abs(np.asarray(jacobian)).max(axis=-1) > 0
    allowed = np.tril(np.ones((24, 24), bool)) & (segments_BT[0][:, None] == segments_BT[0][None])
    np.testing.assert_array_equal(depends, allowed)
    packed = logits_of(model, TOKENS_BT[:, :-1], np.where(np.arange(32) < 10, 1, 2)[None] * WHOLE_BT)
    other_text = TOKENS_BT[:, 9::-1]  # behind it, where it does not matter
    alone = logits_of(model, np.concatenate([TOKENS_BT[:, 10:32], other_text], axis=1), WHOLE_BT)
    np.testing.assert_allclose(packed[:, 10:], alone[:, :22], rtol=1e-4, atol=1e-5)


def test_decoding_equals_the_forward_pass_with_a_constant_state(model):
    """The attention window holds seven of twenty tokens."""
    want = logits_of(model, TOKENS_BT[:, :-1], WHOLE_BT)
    step = jax.jit(reservoir.decode)
    state = reservoir.empty_state(model.cfg, 6, 20, jnp.float32)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for t in range(20):
        logits_BV, state = step(model, state, TOKENS_BT[:, t])
        np.testing.assert_allclose(logits_BV, want[:, t], rtol=2e-4, atol=2e-5)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == size
    assert state.h_L2BN.nbytes == model.cfg.layers * 6 * CFG.units * 8
    assert (state.rows is not None) == bool(model.cfg.attention_every)
    if state.rows is not None:
        assert state.rows.k_LBKSH.shape == (2, 6, 4, 7, 8)


@pytest.mark.parametrize("window", [None, pytest.param(10, marks=pytest.mark.long)])
def test_a_full_attention_cache_gives_nan(window):
    cfg = dataclasses.replace(ATTENDING, window=window)
    model, tokens_BT = small.drawn_model(cfg), TOKENS_BT[:1, :10]
    want, step = logits_of(model, tokens_BT, None), jax.jit(reservoir.decode)
    state = reservoir.empty_state(cfg, 1, 9, jnp.float32)
    for t in range(9):
        logits_BV, state = step(model, state, tokens_BT[:, t])
        np.testing.assert_allclose(logits_BV, want[:, t], rtol=2e-4, atol=2e-5)
    assert np.isnan(np.asarray(step(model, state, tokens_BT[:, 9])[0])).all()
    with pytest.raises(ConfigError, match=r"model.attention_every 3 does not divide model.layers 4; .* 3$"):
        dataclasses.replace(ATTENDING, attention_every=3)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return (configuration, run) with a ridge regression before the first step."""
    model = dataclasses.replace(CFG, ridge_batches=2)
    cfg = dataclasses.replace(RUN, model=model, optim=dataclasses.replace(RUN.optim, learning_rate=3e-3))
    train = dataclasses.replace(cfg.train, total_steps=40, eval_interval=20, checkpoint_interval=20, log_interval=1)
    cfg = dataclasses.replace(cfg, train=train)
    return cfg, at(tmp_path_factory.mktemp("reservoir") / "run", cfg)


def test_a_run_learns(learned):
    halfway, end = (row["eval/loss"] for row in rows(learned[1].folder, "eval.jsonl"))
    assert end < halfway < 4.0 and end < 3.2


@pytest.mark.long  # the ridge regression below runs on a mesh, too
def test_a_mesh_learns_the_same(learned, tmp_path):
    cfg, unbroken = learned
    ways = {"mesh": MeshConfig(data=2, fsdp=2, tp=2), "alone": MeshConfig()}
    states = []
    for name, mesh in ways.items():  # both from the same step on
        copy = shutil.copytree(unbroken.folder, tmp_path / name)
        shutil.rmtree(copy / "checkpoints" / "40")
        states.append(at(copy, dataclasses.replace(cfg, mesh=mesh), evaluated=False, total_steps=23).state)
    assert_equal_states(states[0].model, states[1].model, atol=3e-5)


def test_a_resumed_run_equals_an_uninterrupted_one(learned, tmp_path):
    cfg, unbroken = learned
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "40")
    assert_equal_states(at(copy, cfg).state, unbroken.state)
    assert abstract_state(cfg).model.cfg == cfg.model


@pytest.mark.parametrize("model", [CFG, *long(ATTENDING)], indirect=True, ids=["linear", "attention"])
def test_the_ridge_regression_agrees_with_least_squares(model):
    """Against numpy's least squares over all tokens that count, with the ridge as more equations."""
    batch = tuple(map(jnp.asarray, (TOKENS_BT[:, :-1], TOKENS_BT[:, 1:], WHOLE_BT)))
    weights_BT = (np.random.default_rng(5).random((6, 32)) < 0.9).astype(np.float32)
    found = jax.jit(lambda m, *b: reservoir_ridge.sums(m, Batch(*b), Execution()))(model, *batch, weights_BT)
    read = jax.jit(lambda m: reservoir_ridge.features(m, batch[0], batch[2], Execution()))(model)
    counts = np.asarray(weights_BT) > 0
    f, D = np.asarray(read, np.float64)[counts], CFG.width
    y = (np.asarray(model.unembed_VD)[np.asarray(batch[1])] * D**0.5 * np.asarray(model.norm.scale_D))[counts]
    ridge = (1e-3 * np.trace(f.T @ f) / f.shape[1]) ** 0.5 * np.eye(f.shape[1])
    want = np.linalg.lstsq(np.concatenate([f, ridge]), np.concatenate([y, np.zeros((len(ridge), D))]), rcond=None)[0]
    one = reservoir_ridge.solutions(found)[1]
    np.testing.assert_allclose(one, want, atol=2e-3 * np.abs(want).max())
    with_it = reservoir_ridge.put(model, 4 * jnp.asarray(one))
    np.testing.assert_array_equal(with_it.layers.read_real_ND[:-1], model.layers.read_real_ND[:-1])
    # What was computed apart from the model is what the model reads: it knows these tokens now.
    log_p = lambda m: np.asarray(jax.nn.log_softmax(logits_of(m, batch[0], batch[2])))
    of_next = lambda m: np.take_along_axis(log_p(m), np.asarray(batch[1])[..., None], -1).mean()
    assert of_next(with_it) > of_next(model) + 1


def test_ridge_regression_lowers_the_initial_loss_on_every_mesh(learned, messages):
    """The test of a resumed run above shows that it does not run again."""
    cfg, unbroken = learned
    assert rows(unbroken.folder)[0]["loss"] < math.log(257) - 1  # where drawn weights begin
    source = open_source(cfg.data, load_tokenizer("bytes"), split="train", seed=0, align=1)
    for shape in (MeshConfig(), MeshConfig(data=2, fsdp=2, tp=2)):
        resolved, mesh = resolve(dataclasses.replace(cfg, mesh=shape))
        reservoir_ridge.warm_start(resolved, source, mesh)
    before, after = zip(*(map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", line)[0]) for line in messages), strict=True)
    assert before[0] == pytest.approx(before[1], abs=1e-4) and after[0] == pytest.approx(after[1], abs=1e-3)
    assert after[0] < before[0] - 0.3  # on rows that the sums are not of


def test_a_changed_random_generator_is_refused(learned, tmp_path):
    """As another version of the generator would give them."""
    cfg, unbroken = learned
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    info = json.loads((copy / "run.json").read_text())
    assert info["drawn"]["numbers"] == 2 * 48 * (2 * 32 + 1)
    info["drawn"]["digest"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(info))
    for go_on in (lambda: at(copy, cfg), lambda: load(copy)):
        with pytest.raises(ConfigError, match="random weights of seed 0 differ"):
            go_on()


@pytest.mark.parametrize("cfg", [CFG, *long(dataclasses.replace(TANH, units=48))], ids=["linear", "tanh"])
def test_the_scan_has_no_collectives(cfg):
    """tp splits the units, and a unit's state, or that of its ring, is its own."""
    run = small.mesh_config(dataclasses.replace(small.config(), model=cfg), 1, 1, 8)
    mesh = small.make_mesh(run.mesh)
    with jax.set_mesh(mesh):
        model = with_shardings(abstract_model(cfg), mesh)
        tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
        text = jax.jit(lambda m, t: m.hidden(t, t)[0]).lower(model, tokens).compile().as_text()
    scan = f"{cfg.unit}_scan"
    inside = [line for line in text.splitlines() if scan in line and ("all-" in line or "collective" in line)]
    assert scan in text and not inside
