"""The sharding table: every array declares its axes, and nothing is replicated by accident."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nash_mhc.config.schema import DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig
from nash_mhc.model.lm import LM
from nash_mhc.model.parts import init_matrix
from nash_mhc.optim.schedule import decays
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import param, stacked
from nash_mhc.parallel.sharding import (
    GATHERED,
    RULES,
    constrain,
    logical_axes,
    mesh_axis,
    named_sharding,
    on_shards,
    shardings,
    spec,
)
from nash_mhc.train.state import ProgramKey, TrainState, create_state, state_shardings

CFG = RunConfig(
    model=ModelConfig(
        vocab_size=200,
        width=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn=24,
        conv_taps=2,
        scales=3,
        ratio=4,
        residual="mhc",
        qkv_bias=True,
        tied_embeddings=False,
    ),
    data=DataConfig(batch_size=4, seq_len=16),
    optim=OptimConfig(ema_decay=0.9),
)
MESH = MeshConfig(data=2, fsdp=2, tp=2)

is_axes = lambda a: isinstance(a, tuple) and all(isinstance(name, str) for name in a)


def by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.fixture(scope="module")
def model() -> LM:
    return jax.eval_shape(lambda: LM.init(CFG.model, key=jax.random.key(0)))


@pytest.fixture(scope="module")
def state() -> TrainState:
    with pytest.MonkeyPatch.context() as patch:
        # The draws of a whole model take ten seconds to compile on a CPU, and where it lies does not depend on them.
        patch.setattr(jax.random, "truncated_normal", lambda key, low, high, shape, dtype: jnp.ones(shape, dtype))
        return create_state(CFG, make_mesh(MESH))


# --- spec ------------------------------------------------------------------------------------------------------------


def test_rules_name_only_axes_of_the_mesh() -> None:
    assert {axis for axes in RULES.values() for axis in axes} <= set(MeshConfig().axes)


def test_spec_follows_the_table() -> None:
    assert spec(("vocab", "embed")) == PartitionSpec("tp", "fsdp")
    assert spec(("batch", "time", "width")) == PartitionSpec(("data", "fsdp"), None, None)
    assert spec(("layers", "embed", "ffn"), without=GATHERED) == PartitionSpec(None, None, "tp")
    assert spec(("batch",), without=GATHERED) == PartitionSpec("data")
    assert spec(()) == PartitionSpec()


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("heads", "ffn"), r"'heads' and 'ffn' .*both want mesh axis 'tp'"),
        (("batch", "embed"), r"'batch' and 'embed' .*both want mesh axis 'fsdp'"),
        (("embed", "embed"), r"'embed' and 'embed' .*both want mesh axis 'fsdp'"),
    ],
)
def test_two_logical_axes_on_one_mesh_axis_are_refused(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(axes)


def test_an_excluded_mesh_axis_cannot_collide() -> None:
    assert spec(("batch", "embed"), without="fsdp") == PartitionSpec("data", None)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown logical axis 'hedas' .*the table has batch, .*heads"):
        spec(("embed", "hedas"))


# --- declarations ----------------------------------------------------------------------------------------------------


class Inner(eqx.Module):
    good_DF: jax.Array = param("embed", "ffn")
    other: Any = None


class Outer(eqx.Module):
    inner: Inner
    many: Inner = stacked("layers")
    size: int = eqx.field(static=True, default=3)


def matrix(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


def test_an_undeclared_array_is_refused_with_its_path() -> None:
    tree = Outer(inner=Inner(matrix(2, 2)), many=Inner(matrix(3, 2, 2), other=matrix(2)))
    for walk in (logical_axes, decays, lambda m: shardings(m, make_mesh(MESH))):
        with pytest.raises(ValueError, match=r"Outer\.many\.other is an array without logical axes; declare it with param"):
            walk(tree)


def test_a_wrong_number_of_axes_is_refused_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"Outer\.inner\.good_DF has shape \(2, 2, 2\) but declares .*'embed', 'ffn'"):
        logical_axes(Outer(inner=Inner(matrix(2, 2, 2)), many=Inner(matrix(3, 2, 2))))
    with pytest.raises(ValueError, match=r"Outer\.many\.good_DF has shape \(2, 2\) but declares .*'layers', 'embed', 'ffn'"):
        logical_axes(Outer(inner=Inner(matrix(2, 2)), many=Inner(matrix(2, 2))))


def test_stacked_modules_get_a_layer_axis_in_front() -> None:
    axes = logical_axes(Outer(inner=Inner(matrix(2, 2)), many=Inner(matrix(3, 2, 2))))
    assert axes.inner.good_DF == ("embed", "ffn")
    assert axes.many.good_DF == ("layers", "embed", "ffn")
    assert axes.size == 3


# --- the model -------------------------------------------------------------------------------------------------------


def test_decay_is_for_matrices_only(model: LM) -> None:
    marks = by_path(decays(model))
    assert set(marks) == set(by_path(model))
    # Nor for pooling kernels, whose rest is a mean, not zero.
    spared = ("norm", "bias", "alpha", "tau", "pool", "conv", "offset")
    for path, mark in marks.items():
        assert mark is not any(name in path for name in spared), path
    for name in spared:
        assert {mark for path, mark in marks.items() if name in path} == {False}  # there are some


def test_every_matrix_of_the_model_is_split_over_fsdp_and_tp(model: LM) -> None:
    axes = by_path(logical_axes(model), is_leaf=is_axes)
    assert set(axes) == set(by_path(model))
    for path, mark in by_path(decays(model)).items():
        if mark:
            # The maps of the streams are made from whole tokens, of which each tp device has its own:
            # it needs all of phi.
            wanted = {"fsdp"} if path.endswith("phi_RDM") else {"fsdp", "tp"}
            assert {a for name in axes[path] for a in RULES[name]} == wanted, path
    assert sum(path.endswith("phi_RDM") for path in axes) == 2  # of attention and of ffn


def test_no_array_with_a_rule_is_replicated(state: TrainState) -> None:
    axes = by_path(logical_axes(state.model), is_leaf=is_axes)
    split = 0
    for tree in (state.model, state.ema, *(s for s in (state.opt_state[1].mu, state.opt_state[1].nu))):
        for path, leaf in by_path(tree).items():
            ways = 2 ** sum(len(RULES[name]) for name in axes[path])
            shards = leaf.addressable_shards
            assert len(shards) == 8
            assert {shard.data.size for shard in shards} == {leaf.size // ways}, path
            assert len({str(shard.index) for shard in shards}) == ways, path
            # What has two dimensions of its own, beside that of the layers and a few taps, is never whole anywhere.
            if len([name for name in axes[path] if name not in ("layers", "taps")]) >= 2:
                assert ways >= 2, path
                split += 1
    assert split > 4 * 8


def test_moments_and_averages_are_sharded_like_their_parameters(state: TrainState) -> None:
    tree = state_shardings(ProgramKey.of(CFG), make_mesh(MESH))
    parameters = by_path(tree.model)
    adam = tree.opt_state[1]
    for copy in (adam.mu, adam.nu, tree.ema):
        assert by_path(copy) == parameters
    assert adam.count.spec == tree.step.spec == PartitionSpec()
    # And not only on paper.
    placed = {path: leaf.sharding for path, leaf in by_path(state.model).items()}
    assert placed == parameters
    assert {path: leaf.sharding for path, leaf in by_path(state.opt_state[1].nu).items()} == parameters
    assert sum(s.data.nbytes for leaf in jax.tree.leaves(state.model) for s in leaf.addressable_shards[:1]) < (
        0.35 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.model))
    )


def test_a_state_without_averages_has_no_sharding_for_them() -> None:
    cfg = RunConfig(model=CFG.model, data=CFG.data)
    assert state_shardings(ProgramKey.of(cfg), make_mesh(MESH)).ema is None


def test_weights_do_not_depend_on_the_mesh() -> None:
    draw = lambda: init_matrix(jax.random.key(3), (8, 4), 8)
    split = jax.jit(draw, out_shardings=named_sharding(make_mesh(MESH), "vocab", "embed"))()
    assert split.sharding.shard_shape(split.shape) == (4, 2)
    np.testing.assert_array_equal(np.asarray(split), np.asarray(jax.jit(draw)()))


# --- inside jit ------------------------------------------------------------------------------------------------------


def test_constrain_shards_an_activation() -> None:
    mesh = make_mesh(MESH)
    x = jnp.zeros((4, 8, 16))
    with jax.set_mesh(mesh):
        placed = jax.jit(lambda x: constrain(x, "batch", "time_split", "width"))(x)
    assert placed.sharding.shard_shape(placed.shape) == (1, 4, 16)
    assert constrain(x, "batch", "time_split", "width") is x  # no mesh, nothing to do


def test_on_shards_runs_on_each_devices_shard() -> None:
    mesh = make_mesh(MESH)
    seen: list[tuple[int, ...]] = []

    def local(x: jax.Array, y: None) -> jax.Array:
        assert y is None
        seen.append(x.shape)
        return jax.lax.psum(x.sum(), mesh_axis("batch"))

    x = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh):
        total = jax.jit(on_shards(local, [("batch", "width"), None], ()))(x, None)
    assert seen == [(2, 4)]
    assert float(total) == math.fsum(range(32))
    assert on_shards(local, [("batch", "width"), None], ()) is local


def test_mesh_axis_omits_axes_of_size_one() -> None:
    with jax.set_mesh(make_mesh(MeshConfig(data=4, fsdp=1, tp=2))):
        assert mesh_axis("batch") == ("data",)
        assert mesh_axis("heads") == ("tp",)
        assert mesh_axis("embed") == ()
    assert mesh_axis("batch") == ()
