"""The gradient of a lookup as a GPU kernel (Pallas, Triton): the rows of each number, added up in the tokens' order.

Tokens are sorted by their number first, so that each block knows its own and nothing is added atomically: the same bits
every time. A product with zeros and ones does as much work for every row of the table as for one that occurs.
`lookup.py` has the plain form.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_TOKENS = 16  # loaded at once: a frequent number has thousands, one after the other
_COLUMNS, _WARPS = 1024, 4


def added_rows(rows: int, index_N: Array, d_ND: Array, *, interpret: bool = False) -> Array:
    """[rows, D]: the sum of d over the tokens of each number, in float32, rounded at the end."""
    D, wide = d_ND.shape[1], jnp.promote_types(d_ND.dtype, jnp.float32)
    columns = math.gcd(D & -D, _COLUMNS)
    order_N = jnp.argsort(index_N, stable=True).astype(jnp.int32)
    first_V1 = jnp.searchsorted(index_N[order_N], jnp.arange(rows + 1, dtype=index_N.dtype)).astype(jnp.int32)

    def kernel(order_ref: Any, first_ref: Any, d_ref: Any, out_ref: Any) -> None:
        row, here = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        first, end = first_ref[row], first_ref[row + 1]

        def body(n: Array, total: Array) -> Array:
            place = first + n * _TOKENS + jnp.arange(_TOKENS)
            # Past the end, the last one again: it is in the cache, and not added.
            each = d_ref[order_ref[jnp.minimum(place, end - 1)], here].astype(wide)
            return total + jnp.sum(jnp.where((place < end)[:, None], each, 0.0), axis=0)

        total = lax.fori_loop(0, pl.cdiv(end - first, _TOKENS), body, jnp.zeros(columns, wide))
        out_ref[row, here] = total.astype(out_ref.dtype)

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((rows, D), d_ND.dtype), grid=(rows, D // columns),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1), name="lookup_gradient", interpret=interpret,
    )(order_N, first_V1, d_ND)  # fmt: skip
