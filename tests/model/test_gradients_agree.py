"""Meshes and remat choices change the order of additions, not the gradient: random models against one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import small
from sampled import long

from nash_mhc.config.schema import MeshConfig
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.state import ProgramKey, state_shardings
from nash_mhc.train.step import make_objective

MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1), (2, 1, 4), (1, 4, 2)]


def random_model(seed):
    """(a run on one device, noise on its weights, share of the maps' biases).

    Without their biases, the maps of streams are nearly uniform; with them, near the identity.
    """
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    cfg = small.nash_config(train__remat="none")
    model = dataclasses.replace(
        small.NASH, width=32, head_dim=4, layers=pick(1, 2), streams=pick(2, 3, 4), residual=pick("mhc", "mhc-layer"),
        scales=pick(1, 2), ratio=pick(2, 4), window=pick(8, 16, None), nash_iterations=pick(1, 2), conv_taps=pick(0, 2),
        qk_norm=pick(True, False),
    )  # fmt: skip
    return dataclasses.replace(cfg, model=model), pick(0.01, 0.1, 0.3), pick(0.0, 0.3, 1.0)


def elsewhere(cfg, seed):
    """The same run on a random mesh, with a random remat."""
    rng = np.random.default_rng([seed, 3])
    data, fsdp, tp = MESHES[rng.integers(len(MESHES))]
    other = small.mesh_config(cfg, data=data, fsdp=fsdp, tp=tp)
    return dataclasses.replace(other, train=dataclasses.replace(other.train, remat=str(rng.choice(["none", "dots", "full"]))))


def gradients(cfg, noise, share):
    """Of the same weights and rows on any mesh. At the start all streams are alike; noise makes them differ."""
    objective, rows, mesh = make_objective(cfg), small.random_rows(cfg, 0), make_mesh(cfg.mesh)
    rng = np.random.default_rng(1)

    def changed(path, a, sharding):
        size = share if "bias_M" in jax.tree_util.keystr(path) else 1.0
        return jax.device_put(size * np.asarray(a) + (noise * rng.normal(size=a.shape)).astype(a.dtype), sharding)

    one = small.start(dataclasses.replace(cfg, mesh=MeshConfig()), make_mesh(MeshConfig())).model
    model = jax.tree_util.tree_map_with_path(changed, one, state_shardings(ProgramKey.of(cfg), mesh).model)
    with jax.set_mesh(mesh):
        batch = jax.tree.map(lambda a: a[0], to_device(rows, mesh))
        found = jax.jit(jax.grad(lambda model, batch: objective(model, batch)[0]))(model, batch)
    return {name: np.asarray(a, np.float64) for name, a in named_leaves(found).items()}


@functools.cache
def gradients_on_one_device(seed):
    return gradients(*random_model(seed))


def assert_agree(seed, seed_of_model):
    cfg, *start = random_model(seed_of_model)
    other = elsewhere(cfg, seed)
    want, got = gradients_on_one_device(seed_of_model), gradients(other, *start)
    norm = lambda leaves: np.sqrt(sum(np.sum(a**2) for a in leaves))
    whole = norm(want.values())
    assert np.isfinite(whole) and want.keys() == got.keys()
    case = f"seed {seed}: {other.mesh}, remat {other.train.remat}, {other.model}"
    assert norm([got[name] - want[name] for name in want]) <= 1e-4 * whole, case
    far = {name: norm([got[name] - want[name]]) / max(norm([want[name]]), 1e-3 * whole) for name in want}
    assert max(far.values()) <= 1e-4, f"{max(far, key=far.__getitem__)} {max(far.values()):.1e} in {case}"


@pytest.mark.parametrize("seed", [0, 1, *long(2, 3, 4)])
def test_gradients_agree(seed):
    assert_agree(seed, 1 + seed % 2)  # two models, since each is a program more: one with scales, one with all maps


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5, 50))
def test_gradients_agree_in_many_configurations(seed):
    assert_agree(seed, seed)
