"""Trained and frozen parameters; Muon with AdamW: on every mesh, across a checkpoint, and against a reference."""

import dataclasses

import jax
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at

from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, OptimConfig
from nash_mhc.estimate.roofline import flops_per_token as flops_of_run
from nash_mhc.model.lm import flops_per_token
from nash_mhc.optim.optimizers import make_optimizer
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.inputs import resolve
from nash_mhc.train.resume import starting_state
from nash_mhc.train.state import abstract_state

FROZEN = "embed_VD, layers.ffn, *norm.scale_D"  # a name, the first words of several, a pattern


def is_frozen(name):
    return name == "embed_VD" or name.startswith("layers.ffn.") or name.endswith("norm.scale_D")


@pytest.fixture(scope="module")
def batches():
    return [small.random_rows(small.config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def frozen_run(batches):
    return small.train(small.config(optim__freeze=FROZEN, optim__ema_decay=0.9), batches)


def test_frozen_parameters_keep_their_bits_and_the_others_move(frozen_run):
    cfg = small.config()
    before = named_leaves(jax.device_get(small.start(cfg, small.make_mesh(cfg.mesh)).model))
    after = named_leaves(frozen_run[0].model)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if is_frozen(name)}
    assert 0 < len(same) < len(before)


def test_no_moments_and_no_averages_are_kept_of_what_is_frozen(frozen_run):
    names = set(named_leaves(frozen_run[0]))
    trained = {name for name in named_leaves(frozen_run[0].model) if not is_frozen(name)}
    under = lambda part: {name.removeprefix(part) for name in names if name.startswith(part)}
    assert under("ema.") == under("opt_state[1].mu.") == under("opt_state[1].nu.") == trained
    # The averaged model is complete.
    assert set(named_leaves(frozen_run[0].averaged_model)) == set(named_leaves(frozen_run[0].model))


def test_the_program_computes_no_gradients_of_what_is_frozen():
    def costs(cfg):
        """Count the FLOPs of the lowered step; the compiler can only remove more."""
        mesh, step = small._compiled(cfg)
        shapes = small.sharded_abstract_state(cfg, mesh), small.abstract_batch(cfg.data, 1, mesh)
        with jax.set_mesh(mesh):
            return step._jit.lower(*shapes, *step._constants).cost_analysis()["flops"]

    cfg = small.config()
    maps = 4 * cfg.model.width**2 + 3 * cfg.model.width * cfg.model.ffn  # of one layer: the compiler counts a loop's body once
    saved = costs(cfg) - costs(small.config(optim__freeze="layers"))
    assert saved >= 2 * cfg.data.batch_size * cfg.data.seq_len * maps


def test_clipping_and_the_norms_know_only_what_is_trained(batches, frozen_run):
    loose = small.train(small.config(), batches[:1])[1][0]
    assert frozen_run[1][0]["grad_norm"] < loose["grad_norm"]
    assert frozen_run[1][0]["param_norm"] < loose["param_norm"]
    assert frozen_run[1][0]["loss"] == loose["loss"]


def test_frozen_on_a_mesh_is_frozen_on_one_device(batches, frozen_run):
    cfg = small.config(optim__freeze=FROZEN, optim__ema_decay=0.9)
    small.assert_same_run(small.train(small.mesh_config(cfg, 2, 2, 2), batches), frozen_run)


def test_to_train_only_some_is_to_freeze_the_others(frozen_run):
    others = ",".join(name for name in named_leaves(frozen_run[0].model) if not is_frozen(name))
    only, frozen = small.config(optim__train_only=others), small.config(optim__freeze=FROZEN)
    parts = [[named_leaves(part) for part in Training.of(cfg).split(frozen_run[0].model)] for cfg in (only, frozen)]
    for ours, theirs in zip(*parts, strict=True):  # the trained and the frozen part, on which the step depends
        assert set(ours) == set(theirs) != set()
    assert jax.tree.structure(abstract_state(only)) == jax.tree.structure(abstract_state(frozen))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"freeze": "layers.fnn"}, r"--freeze layers.fnn: matches no parameter .*did you mean layers.ffn\?"),
        ({"train_only": "xyzzy"}, r"--train-only xyzzy: .*; names begin with embed_VD, layers, norm"),
        ({"freeze": "*"}, "leave no parameter to train"),
        ({"freeze": "layers", "train_only": "layers.ffn"}, "leave no parameter to train"),
    ],
)
def test_a_pattern_that_fits_nothing_or_everything_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolve(small.config(**{f"optim__{name}": value for name, value in flags.items()}))


MUON_OPTIONS = {"optimizer": "muon", "freeze": "layers.ffn.up_DF", "ema_decay": 0.9}
MUON = dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, **MUON_OPTIONS))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("muon") / "unbroken", MUON, evaluated=False)


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.long)], ids=str)
def test_muon_with_frozen_parameters_goes_on_where_it_stopped(tmp_path, unbroken, mesh):
    part = at(tmp_path / "run", small.mesh_config(MUON, *mesh), total_steps=4, evaluated=False)
    assert int(part.state.step) == 4
    whole = at(tmp_path / "run", MUON, evaluated=False)
    if mesh == (1, 1, 1):
        assert_equal_states(whole.state, unbroken.state)
    else:
        close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-4)
        jax.tree.map(close, whole.state.model, unbroken.state.model)


def test_a_run_begins_with_averaged_and_frozen_weights_of_another(tmp_path):
    """Frozen parameters have no averages; they come from the model."""
    optim = dataclasses.replace(RUN.optim, freeze=FROZEN, ema_decay=0.9)
    other = at(tmp_path / "other", dataclasses.replace(RUN, optim=optim), total_steps=2, evaluated=False)
    cfg = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, init_from=str(tmp_path / "other")))
    with Store(tmp_path / "run") as store:
        begun = starting_state(cfg, small.make_mesh(cfg.mesh), store)
    assert begun.init_from["averaged"]
    assert_equal_states(begun.state.model, other.state.averaged_model)
    taken, last = named_leaves(begun.state.model), named_leaves(other.state.model)
    assert {name for name in last if np.array_equal(taken[name], last[name])} == {name for name in last if is_frozen(name)}


# --- Muon ------------------------------------------------------------------------------------------------------------

OPTIM = OptimConfig(learning_rate=1.0, warmup_steps=0, schedule="constant", weight_decay=0.0)
H = Hyperparameters.of(OPTIM, small.config().train)


@pytest.fixture(scope="module")
def updates():
    """One step of each optimizer with the same gradients, on the whole architecture."""
    model, rng = small.generic_model(small.nash_config().model), np.random.default_rng(1)
    gradients = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), model)

    @jax.jit
    def step(gradients, model):
        optimizers = {name: make_optimizer(H, model, name) for name in ("adamw", "muon")}
        return {name: of.update(gradients, of.init(model), model)[0] for name, of in optimizers.items()}

    return {name: named_leaves(updates) for name, updates in step(gradients, model).items()}


# Names of the matrices, with the number of their input axes after the layer axis.
MAPS = {
    **{f"layers.attention.base.{name}": 1 for name in ("q_DNH", "k_DKH", "v_DKH")},
    "layers.attention.base.out_NHD": 2,
    **{f"layers.ffn.{name}": 1 for name in ("gate_DF", "up_DF", "down_FD")},
}


def test_muon_turns_the_maps_and_adam_all_else(updates):
    differ = {name for name, u in updates["adamw"].items() if not np.array_equal(u, updates["muon"][name])}
    assert differ == set(MAPS)


@pytest.mark.parametrize(("name", "inputs"), MAPS.items())
def test_each_layer_of_a_map_moves_by_an_orthogonal_matrix(updates, name, inputs):
    for layer in np.asarray(updates["muon"][name]):
        matrix = layer.reshape(int(np.prod(layer.shape[:inputs])), -1)
        singular = np.linalg.svd(matrix, compute_uv=False)
        # Newton-Schulz brings singular values close to 1; tiny ones take longer.
        scaled = singular / (0.8 * np.sqrt(640) * np.sqrt(matrix.shape[1] / matrix.shape[0]))
        assert np.quantile(scaled, 0.1) > 0.5
        assert scaled.max() < 1.3


def test_muon_on_a_mesh_is_muon_on_one_device():
    """For a dense model, which has every kind of matrix (MAPS), one of them frozen; the rest is trained by Adam."""
    cfg = dataclasses.replace(small.config(), optim=dataclasses.replace(small.config().optim, **MUON_OPTIONS))
    rows = [small.random_rows(cfg, seed) for seed in range(3)]
    small.assert_same_run(small.train(small.mesh_config(cfg, 2, 2, 2), rows), small.train(cfg, rows), rtol=1e-3)


def test_muon_keeps_one_moment_of_a_map_where_adam_keeps_two():
    cfg = small.nash_config(optim__optimizer="muon")
    counts = dict.fromkeys(MAPS, 0)
    for name in named_leaves(abstract_state(cfg).opt_state):
        for end in MAPS:
            counts[end] += name.endswith(end)
    assert set(counts.values()) == {1}


def test_what_is_frozen_has_no_gradients_to_count():
    """One of three matmuls per weight computes its gradient; adapters have all three; attention does not change."""
    cfg = small.config()
    m = cfg.model
    weights = m.layers * (m.width * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * m.width * m.ffn)
    unembedding = m.vocab_size * m.width
    whole = flops_per_token(m, cfg.data.seq_len)
    assert flops_of_run(cfg) == whole
    assert flops_of_run(small.config(optim__freeze="layers.ffn")) == whole - 2 * m.layers * 3 * m.width * m.ffn
    adapters = m.layers * 4 * sum((m.width + out) for out in (m.heads * m.head_dim, m.kv_heads * m.head_dim)) * 2
    tuned = flops_of_run(small.config(lora__rank=4, lora__targets="attention"))
    assert tuned == whole - 2 * (weights + unembedding) + 6 * adapters
