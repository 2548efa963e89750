"""The puzzle objective: the carry between steps, when a puzzle leaves its slot, and the metrics."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import small
from runs import RUN

from nash_mhc.config.schema import ConfigError, DataConfig, MeshConfig, ObjectiveConfig, OptimConfig, TrainConfig
from nash_mhc.data.pack import Rows
from nash_mhc.kits.recursive.model import CellMixer, Recursive
from nash_mhc.kits.recursive.objective import log_stablemax, puzzle
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Batch
from nash_mhc.optim.optimizers import OPTIMIZERS
from nash_mhc.optim.schedule import Hyperparameters
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.state import ProgramKey, create_state, initial_state, state_shardings
from nash_mhc.train.step import compile_train_step

MODEL = RecursiveConfig(
    vocab_size=5, width=16, heads=2, head_dim=8, ffn=32, inner_cycles=1, outer_cycles=1, mixer="cells", cells=16, causal=False,
    most_passes=3, explore=0.0,
)  # fmt: skip
ROWS = 8
CFG = dataclasses.replace(
    RUN, model=MODEL, data=DataConfig(batch_size=ROWS, seq_len=16), objective=ObjectiveConfig(name="puzzle"),
    optim=OptimConfig(learning_rate=1e-3, warmup_steps=0), train=TrainConfig(total_steps=10, dtype="float32", attention="xla"),
)  # fmt: skip


def rows_of(seed):
    drawn = np.random.default_rng(seed)
    answers = drawn.integers(1, 5, (1, ROWS, 16)).astype(np.int32)
    given = np.where(drawn.random(answers.shape) < 0.5, answers, 0).astype(np.int32)
    return Rows(given, answers, np.ones_like(answers), np.ones(answers.shape, np.float32))


@functools.cache
def fresh():
    """Return the initial model, shared by all tests."""
    return jax.jit(lambda: Recursive.init(MODEL, key=jax.random.key(0)))()


def begun(cfg, mesh):
    state = jax.jit(lambda model: initial_state(ProgramKey.of(cfg), model))(dataclasses.replace(fresh(), cfg=cfg.model))
    return jax.tree.map(lambda a, s: jax.device_put(np.array(a), s), state, state_shardings(ProgramKey.of(cfg), mesh))


def steps(cfg, batches, state=None):
    mesh = small.make_mesh(cfg.mesh)
    state = begun(cfg, mesh) if state is None else state
    with jax.set_mesh(mesh):
        step, seen = compile_train_step(cfg, mesh), []
        for rows in batches:
            state, metrics = step(state, to_device(rows, mesh))
            seen.append(jax.device_get((state.carry, metrics)))
    return state, seen


def test_stablemax_is_its_formula_and_never_loses_a_gradient():
    x = np.concatenate([np.linspace(-50, 50, 41), [-1e30, 1e30]]).astype(np.float32)
    s = np.where(x >= 0, x.astype(np.float64) + 1, 1 / (1 - x.astype(np.float64)))
    np.testing.assert_allclose(jax.jit(log_stablemax)(x[:41]), np.log(s[:41] / s[:41].sum()), rtol=1e-5)
    assert np.isfinite(jax.jit(jax.grad(lambda x: log_stablemax(x)[0]))(x)).all()


def test_a_puzzle_stays_for_its_passes_and_then_the_next_row_takes_its_slot():
    batches = [rows_of(seed) for seed in range(5)]
    _, seen = steps(CFG, batches)
    # The first stays for three passes. Initially the model considers no puzzle solved (bias -5).
    for n, (carry, metrics) in enumerate(seen):
        np.testing.assert_array_equal(carry.inputs, batches[0 if n < 3 else 3].inputs)
        np.testing.assert_array_equal(carry.targets, batches[0 if n < 3 else 3].targets)
        assert (carry.passes == n % 3 + 1).all() and carry.done.all() == (n % 3 == 2) and (carry.taken == n // 3 + 1).all()
        assert metrics["weight/passes"] == (ROWS if n % 3 == 2 else 0)
    # A second pass over the same puzzle starts from the carried states.
    assert not np.allclose(seen[0][0].upper, seen[1][0].upper)


def test_a_new_puzzle_starts_from_the_initial_states():
    """Nothing of the previous puzzle in the slot is left."""
    cfg = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, learning_rate=1e-12))
    batches = [rows_of(0), rows_of(1), rows_of(2), rows_of(0)]
    _, seen = steps(cfg, batches)
    np.testing.assert_allclose(seen[3][0].upper, seen[0][0].upper, atol=1e-5)
    np.testing.assert_allclose(seen[3][1]["loss"], seen[0][1]["loss"], rtol=1e-6)


def test_a_puzzle_considered_solved_leaves_its_slot_unless_it_explores():
    sure = lambda state: dataclasses.replace(
        state, model=dataclasses.replace(state.model, stop_bias=state.model.stop_bias + 10)
    )
    explores = dataclasses.replace(CFG, model=dataclasses.replace(MODEL, most_passes=8, explore=1.0))
    for cfg, at_once in ((CFG, True), (explores, False)):
        _, seen = steps(cfg, [rows_of(0)] * 8, sure(begun(cfg, small.make_mesh(cfg.mesh))))
        assert (seen[0][0].done.all(), seen[0][0].done.any()) == (at_once, at_once)
        lengths = {int(n) for carry, _ in seen for n in carry.passes[carry.done]}
        assert lengths == {1} if at_once else lengths <= set(range(2, 9)) and len(lengths) > 1


def test_microbatches_carry_separate_puzzles_and_meshes_agree():
    """Compare two microbatches on eight devices with one microbatch on one device."""
    parts = dataclasses.replace(
        CFG, train=dataclasses.replace(CFG.train, grad_accum=2), data=DataConfig(batch_size=ROWS // 2, seq_len=16),
        mesh=MeshConfig(data=2, fsdp=2, tp=2),
    )  # fmt: skip
    whole = [rows_of(seed) for seed in range(4)]
    halves = [Rows(*(a.reshape(2, ROWS // 2, 16) for a in rows)) for rows in whole]
    (_, one), (_, other) = steps(CFG, whole), steps(parts, halves)
    for (carry, metrics), (expected, wanted) in zip(other, one, strict=True):
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
        for a, b in zip(carry, expected, strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, atol=2e-3)


def test_a_bad_step_leaves_the_carry_unchanged():
    state, _ = steps(CFG, [rows_of(0)])
    before = jax.device_get(state.carry)
    bad = rows_of(1)
    bad.weights[...] = np.nan
    carry = before._replace(done=np.ones_like(before.done))
    mesh = small.make_mesh(CFG.mesh)
    state = dataclasses.replace(state, carry=jax.device_put(carry, jax.tree.map(lambda a: a.sharding, state.carry)))
    _, [(after, metrics)] = steps(CFG, [bad], state)
    assert metrics["skipped"] == 1 and mesh.size == 1
    for a, b in zip(after, carry, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_evaluation_makes_all_passes_and_measures_every_depth():
    evaluated = jax.jit(lambda model, batch: puzzle(model, batch, execution=Execution(evaluates=True))[1])
    batch = Batch(*(a[0] for a in rows_of(0)))
    aux = evaluated(fresh(), batch)
    assert {"exact", "exact_stopping", "passes", "exact_after/1", "exact_after/2", "exact_after/3"} <= set(aux.sums)
    assert float(aux.sums["passes"].total) == ROWS * 3 and float(aux.sums["exact"].weight) == ROWS
    # The last of three passes equals three steps of training.
    frozen = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, learning_rate=1e-12))
    _, seen = steps(frozen, [rows_of(0)] * 3)
    np.testing.assert_allclose(aux.sums["loss/ce"].total / (ROWS * 16), seen[2][1]["loss"], rtol=1e-4)
    # Padding rows do not count.
    none = batch._replace(weights=np.where(np.arange(ROWS)[:, None] < 2, batch.weights, 0.0).astype(np.float32))
    aux = evaluated(fresh(), none)
    assert float(aux.sums["exact"].weight) == 2 and float(aux.sums["loss/ce"].weight) == 32


def test_incompatible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"with --objective next_token, every position would see its own answer"):
        dataclasses.replace(CFG, objective=ObjectiveConfig())
    language = dataclasses.replace(RUN, objective=ObjectiveConfig(name="puzzle"))
    with pytest.raises(ConfigError, match=r"--objective puzzle needs a model that sees the whole grid"):
        create_state(language, small.make_mesh(language.mesh))


def test_adam_atan2_is_its_formula_and_ignores_the_gradients_scale():
    drawn = np.random.default_rng(0)
    model = jax.device_get(fresh())
    h = Hyperparameters.of(CFG.optim, CFG.train)
    made = OPTIMIZERS["adam_atan2"](h, model)
    update, begun = jax.jit(made.update), jax.jit(made.init)(model)
    kept = {1.0: begun, 1024.0: begun}
    m = v = 0.0
    for n in range(1, 4):
        g = jax.tree.map(lambda p: drawn.normal(size=p.shape).astype(np.float32), model)
        updates = {}
        for size, before in kept.items():
            updates[size], kept[size] = update(jax.tree.map(lambda g, size=size: size * g, g), before, model)
        m, v = 0.9 * m + 0.1 * g.stop_D.astype(np.float64), 0.95 * v + 0.05 * g.stop_D.astype(np.float64) ** 2
        angle = np.arctan2(m / (1 - 0.9**n), np.sqrt(v / (1 - 0.95**n)))
        factor = updates[1.0].stop_D / (4 / np.pi * angle)
        np.testing.assert_allclose(factor, factor.mean(), rtol=1e-5)  # the role's rate, the same everywhere
        for one, other in zip(jax.tree.leaves(updates[1.0]), jax.tree.leaves(updates[1024.0]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_padding_cells_to_a_tile_changes_nothing():
    cfg = dataclasses.replace(MODEL, cells=21, width=8)
    mixer = CellMixer.init(cfg, key=jax.random.key(0))
    x_BTD = jax.random.normal(jax.random.key(1), (3, 21, 8))
    across = lambda x, w: np.einsum("btd,tf->bfd", x, w)
    up = across(x_BTD, mixer.gate_CF)
    want = across(up / (1 + np.exp(-up)) * across(x_BTD, mixer.up_CF), mixer.down_FC)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(mixer, x_BTD), want, atol=1e-5)
