"""Quantized weights in training: a module in a projection's place trains the array and its scales.

Every pass computes with the quantized weights (`ops.py`), with straight-through gradients. Scales are rounded to
float16 as in a packed file, so training and the packed file compute the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.kits.quantize import ops
from nash_mhc.kits.quantize.settings import QuantizeConfig
from nash_mhc.model.weights import GROUPS, PROJECTIONS, Weight, has_derived
from nash_mhc.parallel.params import STATE, Declared, DerivedParam, Role, map_declared, named_leaves, param

SCALE = Role("scale", decays=False, by_width=False)
_CHECK_INTERVAL = 100  # steps between two checks of the magnitudes
_CHECKS_AT_REST = 2  # consecutive checks without movement that freeze a magnitude


class Exported(NamedTuple):
    """The arrays of a quantized weight in a packed file."""

    codes: Array  # u8, in the shape of the parameter
    levels_L: Array
    scale: Array | None  # float16, like the other two
    scale_a: Array | None
    scale_b: Array | None

    def array(self, inputs: int) -> Array:
        """Return the weights of one layer, by the operations of training."""
        scale, a, b = (None if x is None else x.astype(jnp.float32) for x in (self.scale, self.scale_a, self.scale_b))
        s = _scales(self.codes.shape, scale, a, b, None, inputs)
        return ops.dequantized(self.codes.astype(jnp.int32), s, self.levels_L)


class Quantized(DerivedParam, Weight):
    base: Float[Array, "..."] = param("inputs", "outputs")
    # Either one scale per group of inputs, or two narrow matrices whose product has a scale for every element.
    scale: Float[Array, "..."] | None = param("groups", "outputs", role=SCALE, cast=False)
    scale_a: Float[Array, "..."] | None = param("inputs", "rank", role=SCALE, cast=False)
    scale_b: Float[Array, "..."] | None = param("rank", "outputs", role=SCALE, cast=False)
    # With magnitudes, the columns of scale_a and the rows of scale_b are unit vectors.
    magnitude_R: Float[Array, "..."] | None = param("rank", role=SCALE)
    seen_R: Float[Array, "..."] | None = param("rank", role=STATE)  # magnitudes at the last check
    rests_R: Float[Array, "..."] | None = param("rank", role=STATE)  # consecutive checks without movement
    steps_K: Float[Array, "..."] | None = param("levels", role=SCALE)  # of a trained table
    bits: int = eqx.field(static=True)
    axes: int = eqx.field(static=True)  # dimensions of the parameter in one layer
    inputs: int = eqx.field(static=True)  # number of input axes
    rest: float = eqx.field(static=True)  # largest relative movement of a magnitude at rest; 0: never checked

    @property
    def storage(self) -> str:
        return f"{self.bits} bits"

    @property
    def magnitudes_R(self) -> Array | None:
        """The magnitudes in use: a frozen one has the value of its last check."""
        if self.magnitude_R is None or self.seen_R is None or self.rests_R is None:
            return self.magnitude_R
        return jnp.where(self.rests_R >= _CHECKS_AT_REST, self.seen_R, self.magnitude_R)

    @property
    def is_stack(self) -> bool:
        """Whether it holds the weights of all layers."""
        return self.base.ndim > self.axes

    def materialize(self) -> Array:
        # Recompute in the backward pass: it is cheap, and the residuals are as large as the weights.
        one = jax.checkpoint(Quantized._materialized)
        weights: Array = (jax.vmap(one) if self.is_stack else one)(self)
        return weights

    def _materialized(self) -> Array:
        s = _scales(self.base.shape, self.scale, self.scale_a, self.scale_b, self.magnitudes_R, self.inputs)
        return ops.quantized(self.base.astype(jnp.float32), s, _levels(self.steps_K, self.bits))

    def array(self) -> Array:
        return self.materialize()

    def after_update(self, step: Int[Array, ""], applied: Bool[Array, ""], health: Mapping[str, Array]) -> Quantized:
        """Check every 100 steps which magnitudes hardly moved. After two such checks in a row a magnitude is frozen."""
        if self.magnitude_R is None or self.seen_R is None or self.rests_R is None:
            return self
        due = applied & (step % _CHECK_INTERVAL == 0)
        rests = self.rests_R >= _CHECKS_AT_REST
        moved = jnp.abs(self.magnitude_R - self.seen_R) / jnp.maximum(jnp.abs(self.seen_R), 1e-12)
        count = jnp.where(moved < self.rest, self.rests_R + 1, 0)
        seen = jnp.where(rests, self.seen_R, _as_exported(self.magnitude_R))
        chosen = (jnp.where(due, seen, self.seen_R), jnp.where(due & ~rests, count, self.rests_R))
        return eqx.tree_at(lambda w: (w.seen_R, w.rests_R), self, chosen)

    def exported(self) -> Exported:
        """Return the arrays of a packed file, stacked like the weight."""
        return (jax.vmap(Quantized._exported) if self.is_stack else Quantized._exported)(self)

    def _exported(self) -> Exported:
        levels_L = _levels(self.steps_K, self.bits)
        s = _scales(self.base.shape, self.scale, self.scale_a, self.scale_b, self.magnitudes_R, self.inputs)
        codes = ops.codes_of(self.base.astype(jnp.float32), s, levels_L).astype(jnp.uint8)
        if self.scale is not None:
            return Exported(codes, levels_L, self.scale.astype(jnp.float16), None, None)
        assert self.scale_a is not None and self.scale_b is not None
        a, b = _factors(self.scale_a, self.scale_b, self.magnitudes_R)
        return Exported(codes, levels_L, None, a.astype(jnp.float16), b.astype(jnp.float16))


@jax.custom_vjp
def _as_exported(x: Array) -> Array:
    """Round to float16; the gradient passes through."""
    return x.astype(jnp.float16).astype(jnp.float32)


_as_exported.defvjp(lambda x: (_as_exported(x), None), lambda _, d: (d,))


def _levels(steps_K: Array | None, bits: int) -> Array:
    return jnp.asarray(ops.uniform_levels(bits)) if steps_K is None else ops.table_levels(steps_K)


def _factors(scale_a: Array, scale_b: Array, magnitude_R: Array | None) -> tuple[Array, Array]:
    """Return the two narrow matrices as exported: magnitudes are multiplied into the first."""
    if magnitude_R is not None:
        length = lambda x, axes: jnp.sqrt(jnp.sum(x**2, axes, keepdims=True) + 1e-20)
        outputs = tuple(range(1, scale_b.ndim))
        ones = (1,) * (scale_a.ndim - 1)
        scale_a = scale_a / length(scale_a, tuple(range(scale_a.ndim - 1))) * magnitude_R.reshape(*ones, -1)
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
    """Return a scale for every element."""
    if scale is not None:
        last = inputs - 1
        return jnp.repeat(_as_exported(scale), shape[last] // scale.shape[last], axis=last)
    assert scale_a is not None and scale_b is not None
    return ops.product_scales(*_factors(scale_a, scale_b, magnitude_R))


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def quantized(model: Any, cfg: QuantizeConfig) -> Any:
    """Return the model with quantized projections, fitted to its weights; a quantized model is returned as it is."""
    if cfg.weights is None or has_derived(model):
        return model
    bits_of = {PROJECTIONS[name]: bits for part, bits in cfg.parts.items() for name in GROUPS[part]}
    names = iter(named_leaves(model))

    def replace(declared: Declared, array: Array) -> Any:
        bits = bits_of.get(next(names).rpartition(".")[2])
        if bits is None:
            return array
        fit = functools.partial(_fitted, inputs=declared.inputs, bits=bits.bits, rank=bits.rank, cfg=cfg)
        # One layer at a time: a fit takes the memory of several such matrices.
        for _ in range(declared.stack):
            fit = functools.partial(jax.lax.map, fit)
        return fit(array)

    return map_declared(model, replace)


def _fitted(array: Array, *, inputs: int, bits: int, rank: int, cfg: QuantizeConfig) -> Quantized:
    into, out = array.shape[:inputs], array.shape[inputs:]
    w_IO = array.astype(jnp.float32).reshape(math.prod(into), math.prod(out))
    # A group never spans two heads.
    group = max(size for size in range(1, into[-1] + 1) if into[-1] % size == 0 and size <= cfg.group)
    levels_L, steps_K = jnp.asarray(ops.uniform_levels(bits)), None
    if cfg.levels == "table":
        s_GO = ops.fit_group_scales(w_IO, group, levels_L)
        steps_K = ops.nearest_steps(w_IO / ops.spread_groups(s_GO, w_IO.shape[0]), bits)
        levels_L = ops.table_levels(steps_K)
    rest: dict[str, Any] = {
        "steps_K": steps_K, "bits": bits, "axes": array.ndim, "inputs": inputs, "rest": cfg.rest,
        "seen_R": None, "rests_R": None,
    }  # fmt: skip
    if not rank:
        scale = ops.fit_group_scales(w_IO, group, levels_L).reshape(*into[:-1], into[-1] // group, *out)
        return Quantized(array, scale, None, None, None, **rest)
    rank = min(rank, *w_IO.shape)
    a_IR, b_RO = ops.fit_product_scales(w_IO, group, rank, levels_L)
    magnitude_R = None
    if cfg.magnitudes:
        lengths_a, lengths_b = jnp.linalg.norm(a_IR, axis=0), jnp.linalg.norm(b_RO, axis=1)
        magnitude_R = lengths_a * lengths_b
        a_IR, b_RO = a_IR / (lengths_a + 1e-20)[None], b_RO / (lengths_b + 1e-20)[:, None]
        if cfg.rest:
            rest |= {"seen_R": magnitude_R, "rests_R": jnp.zeros_like(magnitude_R)}
    return Quantized(array, None, a_IR.reshape(*into, rank), b_RO.reshape(rank, *out), magnitude_R, **rest)
