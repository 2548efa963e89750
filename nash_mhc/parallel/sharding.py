"""The sharding table: maps logical axis names to mesh axes. No other file builds a PartitionSpec.

Parameters name their axes in `param`, activations in `constrain(x_BTD, "batch", "time_split", "width")`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from nash_mhc.config.kits import Registry
from nash_mhc.parallel.params import Axes, Declared, DerivedParam, map_declared

# Mesh axes of each logical axis; () means replicated. Unlisted names are errors, which prevents accidental replication.
RULES: Registry[tuple[str, ...]] = Registry("axes", {
    "batch": ("data", "fsdp"),
    "time": (),  # T inside attention and MLP
    "time_split": ("tp",),  # T everywhere else (sequence parallelism)
    "documents": (),  # the documents of a sequence
    "width": (),  # D of an activation
    "value_embed": ("fsdp",),  # K x H of a value embedding
    "embed": ("fsdp",),  # D of a parameter: gathered one layer at a time
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "ffn": ("tp",),
    "vocab": ("tp",),
    "head_dim": (),
    "streams": (),  # R, residual streams
    "maps": (),  # M, coefficients of the residual streams' maps
    "scales": (),  # C, attention scales of a head
    "taps": (),  # taps of a pooling kernel
    "rank": (),  # of LoRA and of other products of narrow matrices
    "vector": (),  # norm scales: too small to shard
    "layers": (),  # scanned
    "experts": (),  # MLPs of a mixture of experts
    "matrices": ("fsdp", "tp", "data"),  # a stack of matrices in the optimizer: each device works on whole ones
    "rows": (),
    "columns": (),
    "parts": (),  # microbatches of gradient accumulation
})  # fmt: skip
GATHERED = "fsdp"  # mesh axis over which weights are gathered before use, and gradients are reduce-scattered
GATHERED_WEIGHT = "gathered_weight"  # checkpoint name of gathered weights


def spec(axes: Axes, *, without: str | None = None) -> PartitionSpec:
    """Return the PartitionSpec for these logical axes, except over the mesh axis `without`."""
    entries: list[tuple[str, ...] | str | None] = []
    owner: dict[str, str] = {}
    for name in axes:
        if name not in RULES:
            raise ValueError(f"unknown logical axis {name!r} in {axes}; the table has {', '.join(RULES)}")
        mesh_axes = tuple(a for a in RULES[name] if a != without)
        for mesh_axis in mesh_axes:
            if mesh_axis in owner:
                raise ValueError(f"logical axes {owner[mesh_axis]!r} and {name!r} of {axes} both want mesh axis {mesh_axis!r}")
            owner[mesh_axis] = name
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def logical_axes(module: PyTree) -> PyTree:
    """Return the module with each array replaced by its logical axes."""
    return map_declared(module, lambda declared, _: declared.axes)


def shardings(module: PyTree, mesh: Mesh) -> PyTree:
    """Return the module with each array replaced by its NamedSharding."""
    return map_declared(module, lambda declared, _: NamedSharding(mesh, spec(declared.axes)))


def with_shardings(module: PyTree, mesh: Mesh) -> PyTree:
    """Return a module of ShapeDtypeStructs with their shardings, as restoring needs it."""
    struct = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(struct, module, shardings(module, mesh))


def named_sharding(mesh: Mesh, *axes: str) -> NamedSharding:
    """Return the NamedSharding for these logical axes; without axes: replicated."""
    return NamedSharding(mesh, spec(axes))


_ONE_DEVICE: ContextVar[tuple[int, int] | None] = ContextVar("one_device", default=None)  # (seq_len, tp)


def _has_mesh() -> bool:
    """Return whether `jax.set_mesh` is active. Without a mesh, a model runs on the devices of its arrays."""
    return _ONE_DEVICE.get() is None and not jax.sharding.get_abstract_mesh().empty


@contextmanager
def one_device(seq_len: int, tp: int) -> Iterator[None]:
    """Trace the program of one of `tp` devices with local sizes: `constrain` gathers and splits the time axis."""
    token, unchecked = _ONE_DEVICE.set((seq_len, tp)), jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", unchecked or tp > 1)  # T has two lengths here
    try:
        yield
    finally:
        _ONE_DEVICE.reset(token)
        jaxtyping.config.update("jaxtyping_disable", unchecked)


def _local_shape(x: Array, axes: Axes, seq_len: int, tp: int) -> Array:
    for i, axis in enumerate(axes):
        # Only residual states ("width") are split along time; a coarse scale may have the same length.
        if axis == "time" and "width" in axes and x.shape[i] * tp == seq_len:
            x = jnp.concatenate([x] * tp, axis=i)
        elif axis == "time_split" and x.shape[i] == seq_len:
            x = jax.lax.slice_in_dim(x, 0, seq_len // tp, axis=i)
    return x


def constrain(x: Array, *axes: str) -> Array:
    """Constrain an activation to its logical axes; a no-op without a mesh."""
    if (traced := _ONE_DEVICE.get()) is not None:
        return _local_shape(x, axes, *traced) if traced[1] > 1 else x
    return jax.lax.with_sharding_constraint(x, spec(axes)) if _has_mesh() else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(w: Array, axes: Axes) -> Array:
    return jax.lax.with_sharding_constraint(w, spec(axes, without=GATHERED))


def _gathered_fwd(w: Array, axes: Axes) -> tuple[Array, None]:
    return _gathered(w, axes), None


def _gathered_bwd(axes: Axes, _: None, grad: Array) -> tuple[Array]:
    # Reduce-scatter; the default transpose would leave the whole gradient on every device.
    return (jax.lax.with_sharding_constraint(grad, spec(axes)),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def for_compute(module: PyTree, dtype: Any) -> PyTree:
    """Return one layer's parameters cast to the compute dtype (unless declared otherwise) and gathered over fsdp."""

    def prepare(declared: Declared, w: Array) -> Array:
        if declared.cast:
            w = w.astype(dtype)
        if len(declared.axes) < 2:
            return w
        return checkpoint_name(_gathered(w, declared.axes) if _has_mesh() else w, GATHERED_WEIGHT)

    is_derived = lambda x: isinstance(x, DerivedParam)
    arrays = jax.tree.map(lambda x: x.materialize() if is_derived(x) else x, module, is_leaf=is_derived)
    return map_declared(arrays, prepare)


def is_gathered_weight(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an operation gathers a weight in `for_compute`: no remat policy may save its result.

    Recognized by name, or by a constraint without fsdp (activations have it in their batch axis).
    """
    if primitive.name == "name":
        return params["name"] == GATHERED_WEIGHT
    if primitive.name == "sharding_constraint":
        used = [a for entry in params["sharding"].spec for a in (entry if isinstance(entry, tuple) else (entry,))]
        return GATHERED not in used
    if primitive.name == "custom_vjp_call":  # `_gathered` before it is inlined
        inner = getattr(params.get("call_jaxpr"), "jaxpr", None)
        return inner is not None and any(is_gathered_weight(e.primitive, e.params) for e in inner.eqns)
    return False


def on_shards(fn: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
    """Run `fn` on each device's own shards (shard_map); return `fn` itself on a single device.

    `in_axes` and `out_axes` are trees of logical axes like the arguments and the result; None for a None argument.
    """
    if _ONE_DEVICE.get() is not None or jax.sharding.get_abstract_mesh().size <= 1:
        return fn
    is_axes = lambda a: a is None or (isinstance(a, tuple) and all(isinstance(name, str) for name in a))
    specs = lambda tree: jax.tree.map(lambda a: PartitionSpec() if a is None else spec(a), tree, is_leaf=is_axes)
    return jax.shard_map(fn, in_specs=specs(tuple(in_axes)), out_specs=specs(out_axes), check_vma=False)


def to_whole_matrices(axes: Axes) -> list[PartitionSpec]:
    """Return the shardings through which a stack of matrices moves until each device has whole ones.

    One mesh axis at a time moves to the stack axis, which XLA does by an all-to-all. To do it at once, it would gather
    all matrices on all devices.
    """
    entries = list(spec(axes))
    moved: tuple[str, ...] = ()
    steps = [PartitionSpec(*entries)]
    for name in RULES["matrices"]:
        if name in entries:
            moved = (*moved, name)
            entries = [moved, *(None if entry == name else entry for entry in entries[1:])]
            steps.append(PartitionSpec(*entries))
    return steps


def mesh_axis(logical: str) -> tuple[str, ...]:
    """Return the mesh axes of size > 1 that split a logical axis, for collectives inside `on_shards`."""
    if _ONE_DEVICE.get() is not None:
        return ()
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(a for a in RULES[logical] if sizes.get(a, 1) > 1)
