"""Embedding lookup with a deterministic gradient."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from nash_mhc.ops.arithmetic import wide_dtype
from nash_mhc.ops.platform import on_platform, run_kernel

_CHUNK_ELEMENTS = 2**26  # of the largest one-hot block
_TOKENS = 16  # tokens that the kernel loads at once: a frequent id has thousands
_COLUMNS, _WARPS = 1024, 4
_FEW_ROWS = 2048  # rows up to which a one-hot matmul is fast enough


@jax.custom_vjp
def rows_of(table_VD: Float[Array, "V D"], index_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return `table_VD[index_BT]`.

    The gradient sums the cotangents of each row. XLA on a GPU does this with atomic additions in any order, or, if it
    must be deterministic, by sorting every element. In a 1b step this takes 60 ms, a one-hot matmul 8, the kernel < 1.
    """
    return table_VD[index_BT]


def _forward(table_VD, index_BT):  # type: ignore[no-untyped-def]
    return table_VD[index_BT], (table_VD[:, :0], index_BT)  # saves the number of rows, not the table


def added_rows(rows_V0: Array, index_BT: Array, d_BTD: Array) -> Array:
    """Return the gradient [V, D]: the sum of d over the tokens of each id, as a scatter-add."""
    return jnp.zeros((rows_V0.shape[0], d_BTD.shape[-1]), d_BTD.dtype).at[index_BT].add(d_BTD)


def added_rows_by_matmul(rows_V0: Array, index_BT: Array, d_BTD: Array) -> Array:
    """Compute `added_rows` as one-hot matmuls over chunks of tokens, summed in float32."""
    V, D, N = rows_V0.shape[0], d_BTD.shape[-1], index_BT.size
    wanted = max(1, _CHUNK_ELEMENTS // V)
    c = max(n for n in range(1, min(N, wanted) + 1) if N % n == 0)

    def chunk(total_VD: Array, inputs: tuple[Array, Array]) -> tuple[Array, None]:
        index_c, d_cD = inputs
        ones_cV = (index_c[:, None] == jnp.arange(V)[None]).astype(d_cD.dtype)
        return total_VD + jnp.einsum("cv,cd->vd", ones_cV, d_cD, preferred_element_type=jnp.float32), None

    start_VD = jnp.zeros((V, D), jnp.float32)
    total_VD, _ = lax.scan(chunk, start_VD, (index_BT.reshape(N // c, c), d_BTD.reshape(N // c, c, D)))
    return total_VD.astype(d_BTD.dtype)


def added_rows_by_kernel(rows_V0: Array, index_BT: Array, d_BTD: Array, *, interpret: bool = False) -> Array:
    """Compute `added_rows` with a GPU kernel (Pallas, Triton), in float32, rounded at the end.

    Tokens are sorted by id first, so each block of threads sums its own row in token order, without atomics.
    """
    rows, index_N, d_ND = rows_V0.shape[0], index_BT.ravel(), d_BTD.reshape(-1, d_BTD.shape[-1])
    D, wide = d_ND.shape[1], wide_dtype(d_ND.dtype)
    columns = math.gcd(D & -D, _COLUMNS)
    order_N = jnp.argsort(index_N, stable=True).astype(jnp.int32)
    first_V1 = jnp.searchsorted(index_N[order_N], jnp.arange(rows + 1, dtype=index_N.dtype)).astype(jnp.int32)

    def kernel(order_ref: Any, first_ref: Any, d_ref: Any, out_ref: Any) -> None:
        row, here = pl.program_id(0), pl.ds(pl.program_id(1) * columns, columns)
        first, end = first_ref[row], first_ref[row + 1]

        def body(n: Array, total: Array) -> Array:
            place = first + n * _TOKENS + jnp.arange(_TOKENS)
            # Past the end, reload the last token, which is cached, and mask it.
            each = d_ref[order_ref[jnp.minimum(place, end - 1)], here].astype(wide)
            return total + jnp.sum(jnp.where((place < end)[:, None], each, 0.0), axis=0)

        total = lax.fori_loop(0, pl.cdiv(end - first, _TOKENS), body, jnp.zeros(columns, wide))
        out_ref[row, here] = total.astype(out_ref.dtype)

    args, outs, grid = (order_N, first_V1, d_ND), [((rows, D), d_ND.dtype)], (rows, D // columns)
    (out_VD,) = run_kernel("lookup_gradient", kernel, args, outs, grid=grid, warps=_WARPS, interpret=interpret)
    return out_VD


def _backward(saved, d_BTD):  # type: ignore[no-untyped-def]
    on_gpu = added_rows_by_matmul if saved[0].shape[0] < _FEW_ROWS else added_rows_by_kernel
    return on_platform(*saved, d_BTD, cuda=on_gpu, default=added_rows), None


rows_of.defvjp(_forward, _backward)
