"""Declared parameters: modules and arrays in tuples, lists and dicts, and stacks of several axes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array

from nash_mhc.config.schema import LoraConfig
from nash_mhc.model.lora import Lora, adapted, merged, with_dropout
from nash_mhc.optim.schedule import decays, is_orthogonal, matrix_axes
from nash_mhc.parallel.params import TABLE, map_declared, named_leaves, param, stacked
from nash_mhc.parallel.sharding import logical_axes, spec

D, F, E, L = 4, 6, 3, 2


class Expert(eqx.Module):
    up_DF: Array = param("embed", "ffn")
    bias_F: Array = param("ffn")


class Router(eqx.Module):
    route_DE: Array = param("embed", "levels")
    gate_EDF: Array = param("embed", "ffn", stack=("experts",))
    experts: Expert = stacked("experts")


class Toy(eqx.Module):
    layers: tuple[Any, ...] = stacked("layers")
    heads: dict[str, Expert]
    tables: list[Any] = param("vocab", "embed", role=TABLE)
    alone: Expert = stacked()


def expert(*stack: int) -> Expert:
    return Expert(jnp.ones((*stack, D, F)), jnp.ones((*stack, F)))


@pytest.fixture
def toy() -> Toy:
    router = Router(jnp.ones((L, D, E)), jnp.ones((L, E, D, F)), expert(L, E))
    table = jnp.ones((8, D))
    return Toy((expert(L), router), {"b": expert(), "a": expert()}, [table, None, table], expert())


def by_name(tree: Any) -> dict[str, Any]:
    is_leaf = lambda x: isinstance(x, tuple) and all(not isinstance(each, eqx.Module) for each in x)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def test_containers_are_walked_in_the_order_of_the_leaves(toy: Toy) -> None:
    seen = []
    twin = map_declared(toy, lambda declared, array: seen.append(array) or array)
    assert all(a is b for a, b in zip(seen, jax.tree.leaves(toy), strict=True))
    assert jax.tree.structure(twin) == jax.tree.structure(toy)


def test_stack_axes_come_first_and_several_add_up(toy: Toy) -> None:
    axes = by_name(logical_axes(toy))
    assert axes["layers[0].up_DF"] == ("layers", "embed", "ffn")
    assert axes["layers[1].gate_EDF"] == ("layers", "experts", "embed", "ffn")
    assert axes["layers[1].experts.up_DF"] == ("layers", "experts", "embed", "ffn")
    assert axes["heads['a'].up_DF"] == ("embed", "ffn")
    assert axes["tables[2]"] == ("vocab", "embed")
    assert spec(axes["layers[1].experts.up_DF"]) == PartitionSpec(None, None, "fsdp", "tp")


def test_an_optimizer_treats_a_stack_as_several_matrices(toy: Toy) -> None:
    assert named_leaves(is_orthogonal(toy))["layers[1].experts.up_DF"]
    assert not named_leaves(decays(toy))["layers[1].experts.bias_F"]
    numbers = matrix_axes(toy).layers[1]
    assert (numbers.experts.up_DF, numbers.gate_EDF) == (((2,), (3,)), ((2,), (3,)))
    assert (numbers.route_DE.reduction_axis, numbers.route_DE.output_axis) == ((1,), (2,))
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers.experts.up_DF)
    update_LEDF = jax.random.normal(jax.random.key(0), (L, E, D, F))
    together, _ = muon.update(update_LEDF, muon.init(update_LEDF))
    alone, _ = (one := optax.contrib.scale_by_muon()).update(update_LEDF[1, 2], one.init(update_LEDF[1, 2]))
    np.testing.assert_allclose(together[1, 2], alone, rtol=1e-4, atol=1e-5)


def test_adapters_of_a_stack_in_a_stack(toy: Toy) -> None:
    model = adapted(toy, LoraConfig(rank=2, targets="layers*", dropout=0.1), jax.random.key(0))
    lora = model.layers[1].experts.up_DF
    assert isinstance(lora, Lora) and lora.stack == (L, E)
    assert (lora.lora_a.shape, lora.lora_b.shape) == ((L, E, D, 2), (L, E, 2, F))
    assert by_name(logical_axes(model))["layers[1].experts.up_DF.lora_a"] == ("layers", "experts", "embed", "rank")
    assert with_dropout(model, jax.random.key(1)).layers[1].experts.up_DF.key_2.shape == (L, E, 2)
    changed = eqx.tree_at(lambda m: m.layers[1].experts.up_DF.lora_b, model, jnp.ones((L, E, 2, F)))
    a_DR = lora.lora_a[1, 2]
    expected = 1 + lora.factor * (a_DR @ jnp.ones((2, F)))
    np.testing.assert_allclose(merged(changed).layers[1].experts.up_DF[1, 2], expected, rtol=1e-6)


def test_an_array_without_axes_is_named_with_its_place() -> None:
    class Bare(eqx.Module):
        parts: tuple[Any, ...]

    with pytest.raises(ValueError, match=r"Bare.parts\[1\] is an array without logical axes"):
        logical_axes(Bare((expert(), jnp.ones(2))))
    with pytest.raises(ValueError, match=r"Toy.heads\['a'\].up_DF has shape \(4,\)"):
        logical_axes(Toy((), {"a": Expert(jnp.ones(4), jnp.ones(6))}, [], expert()))
