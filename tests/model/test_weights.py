"""A weight may be a module that makes an array: in every projection, the embedding and the output, on every mesh."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at

from nash_mhc.config.schema import ARCHITECTURES, ModelConfig
from nash_mhc.model import architectures
from nash_mhc.model.lm import LM, flops_per_token
from nash_mhc.model.protocol import Architecture, AttentionShape
from nash_mhc.model.weights import Weight, array_of
from nash_mhc.optim.schedule import decays, is_orthogonal
from nash_mhc.parallel.params import MATRIX, TABLE, VECTOR, map_declared, named_leaves, param
from nash_mhc.parallel.sharding import logical_axes

RANK = 2


class LowRank(Weight):
    """An array and a narrow correction of it."""

    base: jax.Array = param("inputs", "outputs")
    down: jax.Array = param("inputs", "rank", role=VECTOR)
    up: jax.Array = param("rank", "outputs", role=VECTOR)

    def array(self):
        return array_of(self.base) + jnp.tensordot(self.down, self.up, axes=1)


class Cheap(LowRank):
    """The same, without making the array where it is projected with."""

    def project(self, x, equation):
        count = self.down.ndim - 1  # axes that go in
        sides = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
        narrow = jnp.tensordot(x, self.down, axes=sides)
        return jnp.tensordot(x, self.base, axes=sides) + jnp.tensordot(narrow, self.up, axes=1)


class Rounded(Weight):
    """An array in steps of 1/64, and a gradient as if it were not."""

    base: jax.Array = param("inputs", "outputs")

    def array(self):
        return self.base + jax.lax.stop_gradient(jnp.round(self.base * 64) / 64 - self.base)


def adapted(model, kind=LowRank, inner=lambda array: array):
    """Each map and table of a model as a module, with a correction that is not nothing."""

    def replace(declared, array):
        if declared.role not in (MATRIX, TABLE):
            return array
        layers = "layers" in declared.axes
        stack, own = array.shape[:layers], array.shape[layers:]
        draw = lambda seed, *shape: 0.1 * jax.random.normal(jax.random.key(seed), (*stack, *shape))
        down, up = draw(1, *own[: declared.inputs], RANK), draw(2, RANK, *own[declared.inputs :])
        return kind(inner(array), down, up)

    return map_declared(model, replace)


def merged(model):
    """The same model with plain arrays."""
    is_weight = lambda x: isinstance(x, Weight)
    arrays = lambda tree: jax.tree.map(array_of, tree, is_leaf=is_weight)
    tables = {name: arrays(getattr(model, name)) for name in ("embed_VD", "output_VD")}
    return dataclasses.replace(model, layers=jax.vmap(arrays)(model.layers), **tables)


@pytest.fixture(scope="module")
def plain():
    """Dense: it has every weight that may be a module, and projects with each as the whole architecture does."""
    return small.generic_model(dataclasses.replace(small.MODEL, tied_embeddings=False, vocab_size=250))


forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))  # for both kinds: their arrays make the same model


@pytest.mark.parametrize("kind", [LowRank, Cheap])
def test_a_model_of_modules_is_the_model_of_their_arrays(plain, kind):
    tokens_BT = np.random.default_rng(3).integers(0, 250, (2, 16), np.int32)
    model = jax.jit(lambda plain: adapted(plain, kind))(plain)
    want = jax.jit(merged)(model)
    assert set(named_leaves(want)) == set(named_leaves(plain))
    merged_BTV = forward(want, tokens_BT)
    assert float(jnp.max(jnp.abs(merged_BTV - forward(plain, tokens_BT)))) > 0.05
    np.testing.assert_allclose(forward(model, tokens_BT), merged_BTV, atol=2e-4)
    cache = lambda: LM.empty_cache(plain.cfg, 2, 16)
    decoded = jax.jit(lambda m: small.read(m, cache(), jnp.asarray(tokens_BT), jnp.asarray(16))[0])
    np.testing.assert_allclose(decoded(model), merged_BTV[:, -1], atol=2e-4)


def test_the_axes_and_the_role_of_a_module_are_those_of_its_place(plain):
    model = jax.eval_shape(lambda plain: adapted(plain, inner=Rounded), plain)  # a module inside of a module
    axes, decay, orthogonal = (named_leaves_of(tree(model)) for tree in (logical_axes, decays, is_orthogonal))
    place = "layers.attention.out_NHD"
    assert axes[f"{place}.base.base"] == ("layers", "heads", "head_dim", "embed")
    assert axes[f"{place}.down"] == ("layers", "heads", "head_dim", "rank")
    assert axes[f"{place}.up"] == ("layers", "rank", "embed")
    assert axes["embed_VD.base.base"] == ("vocab", "embed")
    assert (decay[f"{place}.base.base"], decay[f"{place}.down"]) == (True, False)
    assert (orthogonal[f"{place}.base.base"], orthogonal["embed_VD.base.base"]) == (True, False)


def named_leaves_of(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


@dataclass(frozen=True)
class AdaptedConfig(ModelConfig):
    architecture = "adapted"


ADAPTED = Architecture(  # the same for all tests, which so share what is compiled
    init=lambda cfg, *, key: adapted(LM.init(cfg, key=key)),
    flops_per_token=flops_per_token,
    empty_cache=LM.empty_cache,
    decode=LM.decode,
    attention=lambda cfg: AttentionShape(cfg.head_dim, cfg.window),
)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(architectures, "_KNOWN", dict(architectures._KNOWN))
    monkeypatch.setitem(ARCHITECTURES, "adapted", AdaptedConfig)
    architectures.register(AdaptedConfig, ADAPTED)


def adapted_run(cfg):
    model = AdaptedConfig(**{f.name: getattr(cfg.model, f.name) for f in dataclasses.fields(ModelConfig)})
    return dataclasses.replace(cfg, model=model, optim=dataclasses.replace(cfg.optim, train_only="*.down,*.up"))


@pytest.mark.long
def test_adapters_alone_are_trained_on_a_mesh_as_on_one_device(known):
    cfg = adapted_run(small.config())
    batches = [small.random_rows(cfg, seed) for seed in range(3)]
    one = small.train(cfg, batches)
    small.assert_same_run(small.train(small.mesh_config(cfg, 2, 2, 2), batches), one)
    before = named_leaves(jax.device_get(small.start(cfg, small.make_mesh(cfg.mesh)).model))
    moved = {name for name, value in named_leaves(one[0].model).items() if not np.array_equal(value, before[name])}
    assert moved == {name for name in before if name.endswith((".down", ".up"))}


def test_a_run_with_adapters_goes_on_where_it_stopped(known, tmp_path):
    cfg = adapted_run(RUN)
    unbroken = at(tmp_path / "unbroken", cfg, evaluated=False)
    at(tmp_path / "run", cfg, total_steps=4, evaluated=False)
    assert_equal_states(at(tmp_path / "run", cfg, evaluated=False).state, unbroken.state)
    assert isinstance(unbroken.state.model.embed_VD, LowRank)
    assert eqx.is_array(unbroken.state.model.norm.scale_D)
