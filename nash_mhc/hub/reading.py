"""Weights of a Hugging Face folder -> our model on a mesh, a tensor at a time: no host ever holds the whole model."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from nash_mhc.hub.folder import HubFolder
from nash_mhc.hub.tensors import tensors
from nash_mhc.parallel.params import named_leaves

_PATIENCE = 2.0  # seconds between two words about the progress


def _without_layers(sharding: Sharding) -> Sharding:
    """Of one layer of a stack."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else sharding


class _Programs(NamedTuple):
    """For parameters of one shape and place. What comes in is widened where it lies."""

    empty: Callable[[], Array]  # a stack
    put: Callable[[Array, Array, int], Array]  # the stack with one layer in its place
    widen: Callable[[Array], Array]


@functools.cache
def _programs(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> _Programs:
    put = lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer.astype(dtype), i, 0)
    return _Programs(
        jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding),
        jax.jit(put, donate_argnums=0, out_shardings=sharding),
        jax.jit(lambda x: x.astype(dtype), donate_argnums=0, out_shardings=sharding),
    )


def read_weights(folder: HubFolder, like: Any, say: Callable[[str], None] = lambda text: None) -> Any:
    """The model as `like` describes it (ShapeDtypeStructs with shardings). ConfigError before anything is read.

    Every process of a mesh calls this, and reads what its own devices hold.
    """
    entries, cfg, leaves = folder.check(), folder.imported.model, named_leaves(like)
    by_parameter = {tensor.parameter: tensor for tensor in tensors(cfg)}
    total = sum(leaf.size for leaf in leaves.values())
    found: dict[str, Array] = {}
    done, said = 0, time.monotonic()
    for parameter, leaf in leaves.items():
        tensor = by_parameter[parameter]
        is_stack = "{i}" in tensor.name
        shape, sharding = (leaf.shape[1:], _without_layers(leaf.sharding)) if is_stack else (leaf.shape, leaf.sharding)

        def part(i: int, tensor: Any = tensor, shape: Any = shape, sharding: Any = sharding) -> Array:
            read = entries[tensor.name.format(i=i)].reader()
            # Always a copy: what lies in the file itself must not become an array that a step is given to overwrite.
            return jax.make_array_from_callback(
                shape, sharding, lambda index: np.array(tensor.read(read, index, shape), order="C")
            )

        programs = _programs(leaf.sharding, leaf.shape, leaf.dtype)
        if is_stack:
            found[parameter] = programs.empty()
            for i in range(cfg.layers):
                # One layer at a time: the next is not read before this one is in its place.
                found[parameter] = jax.block_until_ready(programs.put(found[parameter], part(i), i))
        else:
            read = part(0)
            found[parameter] = read if read.dtype == leaf.dtype else jax.block_until_ready(programs.widen(read))
        done += leaf.size
        if time.monotonic() - said > _PATIENCE:
            said = time.monotonic()
            say(f"reading {folder.path}: {done / 1e6:,.0f} of {total / 1e6:,.0f} million parameters ...")
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in leaves])
