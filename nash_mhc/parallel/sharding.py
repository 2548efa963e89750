"""Logical axis names -> PartitionSpec: the only file that builds one.

A parameter names its axes where it is declared (`param`, in `params.py`), an activation where it is used
(`constrain(x_BTD, "batch", "time_split", "width")`). The table below says which mesh axis carries which name, and the
same walk shards parameters, gradients, optimizer moments and the averaged weights.
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

# One row a logical axis. An empty row says "every device holds all of it", in so many words: a name that is not
# listed is an error, so nothing is replicated by accident.
RULES: Registry[tuple[str, ...]] = Registry("axes", {
    "batch": ("data", "fsdp"),  # rows of a batch
    "time": (),  # T inside attention and FFN, where every device needs the whole row
    "time_split": ("tp",),  # T of the residual stream outside them (sequence parallel)
    "documents": (),  # of a row, where a kernel walks them
    "width": (),  # D of an activation
    "embed": ("fsdp",),  # D of a parameter: gathered layer by layer, just before it is used
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "ffn": ("tp",),
    "vocab": ("tp",),
    "head_dim": (),
    "streams": (),  # R: a token's streams stay together; it is T that is split
    "maps": (),  # coefficients of the residual streams' maps
    "scales": (),  # C: every device has all scales of its own heads
    "taps": (),  # of a pooling kernel
    "candidates": (),  # tokens that a teacher finds likely
    "rank": (),  # of an adapter: between its two narrow matrices
    "groups": (),  # of inputs that share a scale: few, and cut where the weights are
    "levels": (),  # what codes stand for
    "vector": (),  # norm scales: too small to be worth a gather
    "layers": (),  # the stacked axis that the scan walks
    "experts": (),  # a stack of feed-forward networks: every device holds all of them
    "parts": (),  # the parts of an accumulated batch, taken one after another
})  # fmt: skip
# The axis whose shards are put together before compute; its gradients are scattered back over it.
GATHERED = "fsdp"
GATHERED_WEIGHT = "gathered_weight"  # checkpoint name of a layer's weights, cast and gathered


def spec(axes: Axes, *, without: str | None = None) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes (leaving the mesh axis `without` out)."""
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
    """The module's tree with a tuple of logical axis names in place of each array."""
    return map_declared(module, lambda declared, _: declared.axes)


def shardings(module: PyTree, mesh: Mesh) -> PyTree:
    """The module's tree with a NamedSharding in place of each array."""
    return map_declared(module, lambda declared, _: NamedSharding(mesh, spec(declared.axes)))


def with_shardings(module: PyTree, mesh: Mesh) -> PyTree:
    """A module of shapes, each with its place on the mesh: what restoring starts from."""
    place = lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
    return jax.tree.map(place, module, shardings(module, mesh))


def named_sharding(mesh: Mesh, *axes: str) -> NamedSharding:
    """The sharding of one array with these logical axes; no axes: replicated (scalars, keys)."""
    return NamedSharding(mesh, spec(axes))


_ONE_DEVICE: ContextVar[tuple[int, int] | None] = ContextVar("one_device", default=None)  # (seq_len, tp)


def _ambient() -> bool:
    """Whether code is being traced for a mesh (`jax.set_mesh`).
    Without one, a model runs on whatever holds its arrays."""
    return _ONE_DEVICE.get() is None and not jax.sharding.get_abstract_mesh().empty


@contextmanager
def one_device(seq_len: int, tp: int) -> Iterator[None]:
    """Trace what one of `tp` devices does, with sizes of its share: `constrain` gathers and splits the time axis."""
    token, unchecked = _ONE_DEVICE.set((seq_len, tp)), jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", unchecked or tp > 1)  # one name for T, which has two lengths here
    try:
        yield
    finally:
        _ONE_DEVICE.reset(token)
        jaxtyping.config.update("jaxtyping_disable", unchecked)


def _own_share(x: Array, axes: Axes, seq_len: int, tp: int) -> Array:
    for i, axis in enumerate(axes):
        if axis == "time" and x.shape[i] * tp == seq_len:
            x = jnp.concatenate([x] * tp, axis=i)
        elif axis == "time_split" and x.shape[i] == seq_len:
            x = jax.lax.slice_in_dim(x, 0, seq_len // tp, axis=i)
    return x


def constrain(x: Array, *axes: str) -> Array:
    """Pin an activation to its logical axes; a no-op without a mesh."""
    if (traced := _ONE_DEVICE.get()) is not None:
        return _own_share(x, axes, *traced) if traced[1] > 1 else x
    return jax.lax.with_sharding_constraint(x, spec(axes)) if _ambient() else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(w: Array, axes: Axes) -> Array:
    return jax.lax.with_sharding_constraint(w, spec(axes, without=GATHERED))


def _gathered_fwd(w: Array, axes: Axes) -> tuple[Array, None]:
    return _gathered(w, axes), None


def _gathered_bwd(axes: Axes, _: None, grad: Array) -> tuple[Array]:
    # Straight to the shards: left alone, the transpose would keep the whole gradient on every device.
    return (jax.lax.with_sharding_constraint(grad, spec(axes)),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def for_compute(module: PyTree, dtype: Any) -> PyTree:
    """One layer's parameters as its operations want them:
    in the compute dtype unless declared otherwise, whole along fsdp."""

    def prepare(declared: Declared, w: Array) -> Array:
        if declared.cast:
            w = w.astype(dtype)
        if len(declared.axes) < 2:
            return w
        return checkpoint_name(_gathered(w, declared.axes) if _ambient() else w, GATHERED_WEIGHT)

    is_made = lambda x: isinstance(x, DerivedParam)
    made = jax.tree.map(lambda x: x.materialize() if is_made(x) else x, module, is_leaf=is_made)
    return map_declared(made, prepare)


def is_gathered_weight(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation's result is a weight that `for_compute` put together: what no remat policy may save.

    By its name, and by the constraint that made it:
    the only one that leaves fsdp out, which activations carry in their batch.
    """
    if primitive.name == "name":
        return params["name"] == GATHERED_WEIGHT
    if primitive.name == "sharding_constraint":
        used = [a for entry in params["sharding"].spec for a in (entry if isinstance(entry, tuple) else (entry,))]
        return GATHERED not in used
    if primitive.name == "custom_vjp_call":  # `_gathered`, seen from outside
        inner = getattr(params.get("call_jaxpr"), "jaxpr", None)
        return inner is not None and any(is_gathered_weight(e.primitive, e.params) for e in inner.eqns)
    return False


def on_shards(fn: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
    """Runs `fn` on each device's own shards (shard_map); `fn` itself where there is one device.

    Axes are given in trees like the arguments and the result; None: the argument is None.
    """
    if _ONE_DEVICE.get() is not None or jax.sharding.get_abstract_mesh().size <= 1:
        return fn
    is_axes = lambda a: a is None or (isinstance(a, tuple) and all(isinstance(name, str) for name in a))
    specs = lambda tree: jax.tree.map(lambda a: PartitionSpec() if a is None else spec(a), tree, is_leaf=is_axes)
    return jax.shard_map(fn, in_specs=specs(tuple(in_axes)), out_specs=specs(out_axes), check_vma=False)


def mesh_axis(logical: str) -> tuple[str, ...]:
    """The mesh axes of a logical axis that really split it: what collectives inside `on_shards` run over."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(a for a in RULES[logical] if sizes.get(a, 1) > 1)
