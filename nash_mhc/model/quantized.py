"""Weights of few bits in training: the model computes with what they will be, and learns what they should be.

A `Quantized` weight stands where an array was. It keeps the array as it is trained, and its scales; what is computed
with is made of both in every pass (`ops/quantize.py`), with straight-through gradients for all of them. Scales count as
they are exported, in float16: the forward pass of training is that of the packed file, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.config.schema import QuantizeConfig
from nash_mhc.model.weights import GROUPS, PROJECTIONS, Weight
from nash_mhc.ops import quantize as ops
from nash_mhc.parallel.params import SCALE, STATE, Declared, DerivedParam, map_declared, named_leaves, param

_LOOK_EVERY = 100  # steps between two looks at magnitudes
_RESTS = 2  # looks in a row at which one had hardly moved, and it stays


class Exported(NamedTuple):
    """What a quantized weight is made of: the same numbers as in training, by the same operations."""

    codes: Array  # u8, in the shape of the parameter
    levels_L: Array
    scale: Array | None  # float16, like the other two
    scale_a: Array | None
    scale_b: Array | None

    def array(self, inputs: int) -> Array:
        """Of one layer."""
        scale, a, b = (None if x is None else x.astype(jnp.float32) for x in (self.scale, self.scale_a, self.scale_b))
        s = _scales(self.codes.shape, scale, a, b, None, inputs)
        return ops.dequantized(self.codes.astype(jnp.int32), s, self.levels_L)


class Quantized(DerivedParam, Weight):
    base: Float[Array, "..."] = param("inputs", "outputs")
    # Either a scale for every group of inputs, or two narrow matrices whose product has one for every element.
    scale: Float[Array, "..."] | None = param("groups", "outputs", role=SCALE, cast=False)
    scale_a: Float[Array, "..."] | None = param("inputs", "rank", role=SCALE, cast=False)
    scale_b: Float[Array, "..."] | None = param("rank", "outputs", role=SCALE, cast=False)
    # With these, the two are unit vectors, column by column and row by row.
    magnitude_R: Float[Array, "..."] | None = param("rank", role=SCALE)
    # What they were when they were last looked at, and how often in a row they had hardly moved by then.
    seen_R: Float[Array, "..."] | None = param("rank", role=STATE)
    rests_R: Float[Array, "..."] | None = param("rank", role=STATE)
    steps_K: Float[Array, "..."] | None = param("levels", role=SCALE)  # of a table that is trained
    bits: int = eqx.field(static=True)
    axes: int = eqx.field(static=True)  # of the parameter, without that of stacked layers
    inputs: int = eqx.field(static=True)  # how many of them go in
    rest: float = eqx.field(static=True)  # share that a magnitude moves at most while it rests; 0: they are not looked at

    @property
    def magnitudes_R(self) -> Array | None:
        """As they count: those that have come to rest stay where they were seen."""
        if self.magnitude_R is None or self.seen_R is None or self.rests_R is None:
            return self.magnitude_R
        return jnp.where(self.rests_R >= _RESTS, self.seen_R, self.magnitude_R)

    @property
    def is_stack(self) -> bool:
        """Whether it is that of all layers."""
        return self.base.ndim > self.axes

    def materialize(self) -> Array:
        # What the backward pass needs is quickly made again, and as large as the weights themselves.
        parts = (self.base, self.scale, self.scale_a, self.scale_b, self.magnitudes_R, self.steps_K)
        one = jax.checkpoint(functools.partial(_made, bits=self.bits, inputs=self.inputs))
        return (jax.vmap(one) if self.is_stack else one)(*parts)

    def array(self) -> Array:
        return self.materialize()

    def after_update(self, step: Int[Array, ""], changed: Bool[Array, ""], health: Mapping[str, Array]) -> Quantized:
        """Check every 100 steps which magnitudes hardly moved. After two such checks in a row a magnitude is frozen."""
        if self.magnitude_R is None or self.seen_R is None or self.rests_R is None:
            return self
        due = changed & (step % _LOOK_EVERY == 0)
        rests = self.rests_R >= _RESTS
        moved = jnp.abs(self.magnitude_R - self.seen_R) / jnp.maximum(jnp.abs(self.seen_R), 1e-12)
        count = jnp.where(moved < self.rest, self.rests_R + 1, 0)
        seen = jnp.where(rests, self.seen_R, _as_exported(self.magnitude_R))
        chosen = (jnp.where(due, seen, self.seen_R), jnp.where(due & ~rests, count, self.rests_R))
        return eqx.tree_at(lambda w: (w.seen_R, w.rests_R), self, chosen)

    def exported(self) -> Exported:
        """All that a packed file holds of it; of a stack, of all layers."""
        return (jax.vmap(Quantized._exported) if self.is_stack else Quantized._exported)(self)

    def _exported(self) -> Exported:
        levels_L = _levels(self.steps_K, self.bits)
        s = _scales(self.base.shape, self.scale, self.scale_a, self.scale_b, self.magnitudes_R, self.inputs)
        codes = ops.codes_of(self.base.astype(jnp.float32), s, levels_L).astype(jnp.uint8)
        if self.scale is not None:
            return Exported(codes, levels_L, self.scale.astype(jnp.float16), None, None)
        assert self.scale_a is not None and self.scale_b is not None
        a, b = factors(self.scale_a, self.scale_b, self.magnitudes_R)
        return Exported(codes, levels_L, None, a.astype(jnp.float16), b.astype(jnp.float16))


@jax.custom_vjp
def _as_exported(x: Array) -> Array:
    """Rounded to float16; its gradient passes."""
    return x.astype(jnp.float16).astype(jnp.float32)


_as_exported.defvjp(lambda x: (_as_exported(x), None), lambda _, d: (d,))


def _levels(steps_K: Array | None, bits: int) -> Array:
    return jnp.asarray(ops.uniform_levels(bits)) if steps_K is None else ops.table_levels(steps_K)


def factors(scale_a: Array, scale_b: Array, magnitude_R: Array | None) -> tuple[Array, Array]:
    """The two narrow matrices as they are exported: with magnitudes, unit vectors of which the first has them."""
    if magnitude_R is not None:
        length = lambda x, axes: jnp.sqrt(jnp.sum(x**2, axes, keepdims=True) + 1e-20)
        outputs = tuple(range(1, scale_b.ndim))
        places = (1,) * (scale_a.ndim - 1)
        scale_a = scale_a / length(scale_a, tuple(range(scale_a.ndim - 1))) * magnitude_R.reshape(*places, -1)
        scale_b = scale_b / length(scale_b, outputs)
    return _as_exported(scale_a), _as_exported(scale_b)


def _scales(
    shape: tuple[int, ...],
    scale: Array | None,
    scale_a: Array | None,
    scale_b: Array | None,
    magnitude_R: Array | None,
    inputs: int,
) -> Array:
    """One for every element."""
    if scale is not None:
        last = inputs - 1
        return jnp.repeat(_as_exported(scale), shape[last] // scale.shape[last], axis=last)
    assert scale_a is not None and scale_b is not None
    return ops.product_scales(*factors(scale_a, scale_b, magnitude_R))


def _made(
    base: Array,
    scale: Array | None,
    scale_a: Array | None,
    scale_b: Array | None,
    magnitude_R: Array | None,
    steps_K: Array | None,
    *,
    bits: int,
    inputs: int,
) -> Array:
    s = _scales(base.shape, scale, scale_a, scale_b, magnitude_R, inputs)
    return ops.quantized(base.astype(jnp.float32), s, _levels(steps_K, bits))


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def has_few_bits(model: Any) -> bool:
    return any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized)))


def quantized(model: Any, cfg: QuantizeConfig) -> Any:
    """The model with weights of few bits, fitted to those that it has; one that has them already stays as it is."""
    if cfg.weights is None or has_few_bits(model):
        return model
    ends = {PROJECTIONS[name]: bits for part, bits in (("mlp", cfg.mlp), ("attention", cfg.attention)) for name in GROUPS[part]}
    names = iter(named_leaves(model))

    def replace(declared: Declared, array: Array) -> Any:
        wanted = ends.get(next(names).rpartition(".")[2])
        if wanted is None:
            return array
        fit = functools.partial(_fitted, inputs=declared.inputs, bits=wanted.bits, rank=wanted.rank, cfg=cfg)
        # One layer after another: a fit holds several matrices as large as the weight.
        for _ in range(declared.stack):
            fit = functools.partial(jax.lax.map, fit)
        return fit(array)

    return map_declared(model, replace)


def _fitted(array: Array, *, inputs: int, bits: int, rank: int, cfg: QuantizeConfig) -> Quantized:
    into, out = array.shape[:inputs], array.shape[inputs:]
    w_IO = array.astype(jnp.float32).reshape(math.prod(into), math.prod(out))
    # Groups never reach from one head into the next.
    group = max(size for size in range(1, into[-1] + 1) if into[-1] % size == 0 and size <= cfg.group)
    levels_L, steps_K = jnp.asarray(ops.uniform_levels(bits)), None
    if cfg.levels == "table":
        s_GO = ops.fitted_groups(w_IO, group, levels_L)
        steps_K = ops.nearest_steps(w_IO / ops.spread_groups(s_GO, w_IO.shape[0]), bits)
        levels_L = ops.table_levels(steps_K)
    whole: dict[str, Any] = {
        "steps_K": steps_K, "bits": bits, "axes": array.ndim, "inputs": inputs, "rest": cfg.rest,
        "seen_R": None, "rests_R": None,
    }  # fmt: skip
    if not rank:
        scale = ops.fitted_groups(w_IO, group, levels_L).reshape(*into[:-1], into[-1] // group, *out)
        return Quantized(array, scale, None, None, None, **whole)
    rank = min(rank, *w_IO.shape)
    a_IR, b_RO = ops.fitted_product(w_IO, group, rank, levels_L)
    magnitude_R = None
    if cfg.magnitudes:
        lengths_a, lengths_b = jnp.linalg.norm(a_IR, axis=0), jnp.linalg.norm(b_RO, axis=1)
        magnitude_R = lengths_a * lengths_b
        a_IR, b_RO = a_IR / (lengths_a + 1e-20)[None], b_RO / (lengths_b + 1e-20)[:, None]
        if cfg.rest:
            whole |= {"seen_R": magnitude_R, "rests_R": jnp.zeros_like(magnitude_R)}
    return Quantized(array, None, a_IR.reshape(*into, rank), b_RO.reshape(rank, *out), magnitude_R, **whole)


def baked(model: Any) -> Any:
    """The same model with plain arrays: the very numbers that its quantized weights are computed with."""
    return _each(model, Quantized.made)


def unquantized(shape: Any) -> Any:
    """A model of shapes, with those of plain arrays."""
    return _each(shape, lambda weight: weight.base)


def _each(model: Any, change: Callable[[Quantized], Any]) -> Any:
    return jax.tree.map(lambda x: change(x) if is_quantized(x) else x, model, is_leaf=is_quantized)


def counted(model: Any) -> dict[int, int]:
    """Weights by their bits."""
    found: dict[int, int] = {}
    for x in jax.tree.leaves(model, is_leaf=is_quantized):
        if is_quantized(x):
            found[x.bits] = found.get(x.bits, 0) + int(np.prod(x.base.shape))
    return found
