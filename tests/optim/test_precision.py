"""Weights and moments in bfloat16: small updates add up, results are the same everywhere, memory is halved."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import small
from jax.sharding import NamedSharding, PartitionSpec

from nash_mhc.config.schema import ConfigError, PrecisionConfig
from nash_mhc.estimate.memory import estimate
from nash_mhc.loading.load import load
from nash_mhc.optim.rounding import salt_of, stochastic_bfloat16
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.state import abstract_state

HALVES = PrecisionConfig(weights_dtype="bfloat16", moments_dtype="bfloat16")
CFG = dataclasses.replace(runs.RUN, precision=HALVES)
rounded = jax.jit(stochastic_bfloat16)


def test_a_number_goes_to_one_of_its_neighbours_and_on_average_nowhere():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=500), 1e-30 * rng.normal(size=250), -1e20 * rng.random(250)]).astype(np.float32)
    x[:4] = [0.0, 1.0, -2.0, 1 / 3]
    many = jax.jit(jax.vmap(lambda x, i: stochastic_bfloat16(x, salt_of(7, i)), (None, 0)))
    drawn = np.asarray(many(jnp.asarray(x), jnp.arange(2000))).astype(np.float64)
    low = (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    step = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64) - low
    chance = (x.astype(np.float64) - low) / step
    up = (drawn - low) / step
    assert set(np.unique(up)) == {0.0, 1.0}
    assert (up[:, chance == 0] == 0).all()  # bfloat16 numbers stay the same
    deviation = (up.mean(0) - chance) / np.sqrt(np.maximum(chance * (1 - chance), 1e-4) / len(up))
    assert np.abs(deviation).max() < 5
    assert 0.9 < deviation[chance > 0].std() < 1.1  # as often as independent coin flips
    together = np.corrcoef(up[:, np.abs(chance - 0.5) < 0.4].T)  # and the elements of an array are independent
    assert np.abs(together - np.eye(len(together))).max() < 6 / np.sqrt(len(up))


def test_what_is_not_finite_stays_so():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3.4e38])
    for i in range(20):
        made = np.asarray(rounded(x, salt_of(i))).astype(np.float32)
        np.testing.assert_array_equal(made[:3], x[:3])
        assert not np.isnan(made[3])


def test_the_same_bits_on_every_mesh_and_others_for_every_salt():
    mesh = make_mesh(small.mesh_config(small.config(), 2, 2, 2).mesh)
    x = np.random.default_rng(1).normal(size=(16, 8, 4)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp", "tp", "data")))
    one = np.asarray(rounded(x, salt_of(3, 4)))
    np.testing.assert_array_equal(np.asarray(rounded(split, salt_of(3, 4))), one)
    for other in (salt_of(3, 5), salt_of(4, 4), salt_of(4, 3)):
        assert 0.3 < (np.asarray(rounded(x, other)) != one).mean() / 0.5 < 1.1


def test_updates_that_are_too_small_for_a_weight_add_up_all_the_same():
    """1 can move by 1/128 or not at all; a hundred updates of a thousandth move it by a tenth."""

    @jax.jit
    def update(i, weights, nearest):
        nearest = (nearest.astype(jnp.float32) + 1e-3).astype(jnp.bfloat16)
        return stochastic_bfloat16(weights.astype(jnp.float32) + 1e-3, salt_of(i)), nearest

    weights = nearest = jnp.ones(4096, jnp.bfloat16)
    for i in range(100):
        weights, nearest = update(i, weights, nearest)
    assert float(weights.astype(jnp.float32).mean()) == pytest.approx(1.1, abs=2e-3)
    assert float(nearest.astype(jnp.float32).mean()) == 1.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs.at(tmp_path_factory.mktemp("precision") / "run", CFG, evaluated=False)


def test_matrices_tables_and_their_moments_are_kept_in_half_and_nothing_else(trained):
    kinds = lambda tree: {name: leaf.dtype for name, leaf in named_leaves(tree).items()}
    state = trained.state
    mu, nu = state.opt_state[1].mu, state.opt_state[1].nu
    assert kinds(state.model) == kinds(mu) == kinds(nu)
    halved = {name for name, kind in kinds(state.model).items() if kind == jnp.bfloat16}
    assert "embed_VD" in halved
    assert {"layers.ffn.up_DF", "layers.attention.q_DNH"} <= halved
    assert {kind for name, kind in kinds(state.model).items() if name not in halved} == {jnp.dtype("float32")}
    assert all("norm" in name for name in set(kinds(state.model)) - halved)


def test_a_run_that_is_stopped_and_goes_on_has_the_bits_of_one_that_was_not(trained, tmp_path):
    runs.at(tmp_path / "run", CFG, total_steps=3, evaluated=False)
    again = runs.at(tmp_path / "run", CFG, evaluated=False)
    runs.assert_equal_states(jax.tree.map(_wide, again.state), jax.tree.map(_wide, trained.state), rtol=0, atol=0)


def test_a_run_may_go_on_in_half_and_it_is_written_down(tmp_path):
    runs.at(tmp_path / "run", runs.RUN, total_steps=3, evaluated=False)
    went_on = runs.at(tmp_path / "run", CFG, evaluated=False)
    assert went_on.state.model.embed_VD.dtype == went_on.state.opt_state[1].mu.embed_VD.dtype == jnp.bfloat16
    (entry,) = json.loads((tmp_path / "run" / "run.json").read_text())["history"]
    assert entry["changed"]["precision.weights_dtype"] == ["float32", "bfloat16"]


def _wide(x):
    return np.asarray(x).astype(np.float32)


def test_its_losses_follow_those_of_float32_weights(trained, tmp_path):
    whole = runs.at(tmp_path / "run", runs.RUN, evaluated=False)
    ours, theirs = ([row["loss"] for row in runs.rows(folder)] for folder in (trained.folder, whole.folder))
    assert theirs[-1] < theirs[0] - 0.3  # it learns
    np.testing.assert_allclose(ours, theirs, atol=0.02)


def test_steps_that_are_too_small_for_the_weights_move_them_as_far_as_float32_weights():
    cfg, batches = small.config(optim__learning_rate=2e-6, optim__weight_decay=0.0), [small.random_rows(small.config(), 0)] * 3
    found = []
    for each in (cfg, dataclasses.replace(cfg, precision=HALVES)):
        mesh = make_mesh(each.mesh)
        before, after = small.start(each, mesh).model, small.train(each, batches)[0].model
        moved = [_wide(b) - _wide(a) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        found.append(np.concatenate([change.ravel() for change in moved]))
    whole, halved = found
    assert (halved == 0).mean() > 0.5  # most stay, the others jump
    assert (whole @ halved) / (whole @ whole) == pytest.approx(1, abs=0.1)


def test_one_device_and_eight_agree():
    """With two microbatches: their sums are rounded stochastically, too."""
    cfg = dataclasses.replace(small.config(train__grad_accum=2), precision=HALVES)
    batches = [small.random_rows(cfg, seed) for seed in range(3)]
    found = [small.train(small.mesh_config(cfg, *axes), batches)[:2] for axes in ((1, 1, 1), (2, 2, 2))]
    (one, its), (other, others) = found
    assert [row["loss"] for row in its] == pytest.approx([row["loss"] for row in others], rel=2e-3)
    # Sums differ in their last bits between meshes, which changes the rounding of a few numbers.
    for a, b in zip(*map(jax.tree.leaves, (one.model, other.model)), strict=True):
        assert (_wide(a) != _wide(b)).mean() < 0.1 or a.dtype == np.float32
        np.testing.assert_allclose(_wide(a), _wide(b), rtol=2**-6, atol=2e-3)


def test_other_commands_read_it(trained):
    loaded = load(trained.folder)
    want, got = named_leaves(trained.state.model), named_leaves(loaded.model)
    for name in want:
        np.testing.assert_array_equal(_wide(got[name]), _wide(want[name]))


def test_it_is_half_of_the_state_and_the_planner_knows():
    half, whole = (estimate(cfg, {"data": 1, "fsdp": 1, "tp": 1}) for cfg in (CFG, runs.RUN))
    assert half.parameters < 0.55 * whole.parameters
    assert half.optimizer < 0.55 * whole.optimizer


def test_an_average_is_kept_whole():
    cfg = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, ema_decay=0.9))
    assert {x.dtype for x in jax.tree.leaves(abstract_state(cfg).ema)} == {jnp.dtype("float32")}


def test_moments_of_another_optimizer_are_refused_in_a_line():
    cfg = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, optimizer="muon"))
    with pytest.raises(ConfigError, match=r"--moments-dtype bfloat16 .*--optimizer .*muon"):
        abstract_state(cfg)
