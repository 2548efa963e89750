"""Projections that multiply in float8 (`--matmul-dtype float8`): those of attention and of the feed-forward layers."""

from __future__ import annotations

import string
from typing import Any

import jax
from jaxtyping import Array, Float

from nash_mhc.model.weights import PROJECTIONS, Weight
from nash_mhc.ops import float8
from nash_mhc.parallel.params import param


class Float8(Weight):
    """A weight as it is; its products are rounded."""

    base: Float[Array, "..."] = param("inputs", "outputs")

    def array(self) -> Array:
        return self.base

    def project(self, x: Array, equation: str | None) -> Array:
        return float8.einsum(equation or _last_and_first(x.ndim, self.base.ndim), x, self.base)


def _last_and_first(of_x: int, of_w: int) -> str:
    """The equation of a product over the last axis of x and the first of w."""
    letters = string.ascii_lowercase
    x, w = letters[:of_x], letters[of_x - 1 : of_x + of_w - 1]
    return f"{x},{w}->{x[:-1]}{w[1:]}"


def in_float8(layer: Any) -> Any:
    """A layer whose projections multiply so. One that is an adapter or a quantizer stays what it is."""
    is_projection = lambda path: getattr(path[-1], "name", None) in PROJECTIONS.values()
    return jax.tree.map_with_path(lambda path, w: Float8(w) if is_projection(path) else w, layer)
