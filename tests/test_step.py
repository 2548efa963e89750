"""The train step: one mesh equals another, accumulated equals whole, remat equals none, and it compiles once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.pack import Rows

MODELS = {"dense": small.config, "nash": small.nash_config}
MESHES = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2)]


@pytest.fixture(scope="module")
def batches():
    return [small.random_rows(small.config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def one_device(batches):
    return small.train(small.config(), batches)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_gives_the_same_run(shape, batches, one_device):
    small.assert_same_run(small.train(small.mesh_config(small.config(), *shape), batches), one_device)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_accumulation_4_of_batch_2_is_batch_8(config):
    rows = [small.random_rows(config(), seed) for seed in range(2)]
    # Uneven padding between the parts: a mean of means would differ from the mean over tokens.
    for r in rows:
        r.weights[:, :2, 5:] = 0.0
    split = [Rows(*(a.reshape(4, 2, -1) for a in r)) for r in rows]
    # Health is averaged over the parts, and the largest value of a batch is no average.
    parts = small.train(config(data__batch_size=2, train__grad_accum=4), split)
    small.assert_same_run(parts, small.train(config(), rows), health=False)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_memory_not_numbers(remat, config):
    batches = [small.random_rows(config(), seed) for seed in range(3)]
    run, plain = small.train(config(train__remat=remat), batches), small.train(config(), batches)
    small.assert_same_run(run, plain, rtol=1e-5)
    # And it is a different program: a remat that did nothing would pass the equality above.
    text = lambda step: next(iter(step._compiled.values())).as_text()
    assert text(run[2]).count(" dot(") + text(run[2]).count("fusion") != text(plain[2]).count(" dot(") + text(plain[2]).count(
        "fusion"
    )


def test_the_step_is_traced_once_and_a_new_shape_is_reported():
    heard: list[str] = []
    cfg = small.config(data__seq_len=16)
    mesh = small.make_mesh(cfg.mesh)
    step = small.compile_train_step(cfg, mesh, warn=heard.append)
    state = small.start(cfg, mesh)
    for seed in range(3):
        state, _ = step(state, small.to_device(small.random_rows(cfg, seed), mesh))
    assert (step.traces, heard) == (1, [])
    step(state, small.to_device(small.random_rows(dataclasses.replace(cfg, data=small.config(data__seq_len=8).data), 0), mesh))
    assert step.traces == 2
    assert len(heard) == 1
    assert "inputs:int32[1,8,8] (was inputs:int32[1,8,16])" in heard[0]


def test_the_state_is_donated():
    cfg = small.config()
    mesh, step = small._compiled(cfg)
    state = small.start(cfg, mesh)
    step(state, small.to_device(small.random_rows(cfg, 0), mesh))
    assert state.model.embed_VD.is_deleted()


def test_ema_follows_its_closed_form():
    decay, rows = 0.7, [small.random_rows(small.config(), seed) for seed in range(3)]
    cfg = small.config(optim__ema_decay=decay)
    start = jax.device_get(small.start(cfg, small.make_mesh(cfg.mesh)).model)
    models = [small.train(cfg, rows[:n])[0].model for n in (1, 2, 3)]
    ema = small.train(cfg, rows)[0].ema
    weights = [decay**3, (1 - decay) * decay**2, (1 - decay) * decay, 1 - decay]
    want = jax.tree.map(lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)), start, *models)
    for a, b in zip(jax.tree.leaves(ema), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_bfloat16_compute_stays_near_float32_and_keeps_float32_state(batches, one_device):
    state, history, _ = small.train(small.config(train__dtype="bfloat16"), batches)
    for a, b in zip(history, one_device[1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
    assert {x.dtype for x in jax.tree.leaves(state.model)} == {jnp.dtype("float32")}


def test_z_loss_is_its_own_component(batches, one_device):
    _, history, _ = small.train(small.config(optim__z_loss=1e-2), batches[:1])
    plain = one_device[1][0]
    assert history[0]["loss/ce"] == pytest.approx(plain["loss"], rel=1e-5)
    assert history[0]["loss/z"] > 0
    assert history[0]["loss"] == pytest.approx(history[0]["loss/ce"] + history[0]["loss/z"], rel=1e-6)


def test_clipping_scales_what_the_optimizer_sees_and_reports_the_raw_norm(batches, one_device):
    state, history, _ = small.train(small.config(optim__max_grad_norm=1e-3), batches[:1])
    assert history[0]["grad_norm"] == pytest.approx(one_device[1][0]["grad_norm"], rel=1e-5)
    first_moment = optax.tree.norm(state.opt_state[1].mu) / (1 - small.config().optim.b1)
    assert float(first_moment) == pytest.approx(1e-3, rel=1e-4)


def test_every_option_at_once_gives_the_same_run_on_a_mesh():
    """Grouped queries, biases, untied embeddings, a window, accumulation, averages, z-loss: 2x2x2 against one device."""
    model = dataclasses.replace(small.MODEL, kv_heads=4, qkv_bias=True, tied_embeddings=False, window=9)
    cfg = small.config(train__grad_accum=2, optim__ema_decay=0.5, optim__z_loss=1e-3, train__remat="dots")
    cfg = dataclasses.replace(cfg, model=model)
    rows = [small.random_rows(cfg, seed) for seed in range(2)]
    got, want = (small.train(c, rows) for c in (small.mesh_config(cfg, 2, 2, 2), cfg))
    small.assert_same_run(got, want)
    for a, b in zip(jax.tree.leaves(got[0].ema), jax.tree.leaves(want[0].ema), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_an_all_padding_batch_is_harmless(batches):
    cfg: RunConfig = small.config()
    empty = small.random_rows(cfg, 0)
    empty.weights[:] = 0.0
    state, history, _ = small.train(cfg, [empty])
    assert history[0]["loss"] == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.model))
