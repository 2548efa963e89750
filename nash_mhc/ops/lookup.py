"""Rows of a table by number, with a gradient that is the same every time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.kernels import lookup_gpu
from nash_mhc.ops.platform import on_platform

# Largest block of zeros and ones of one chunk, in elements.
_CHUNK_ELEMENTS = 2**26
_FEW_ROWS = 2048  # of a table, that a matrix product is fast enough for


@jax.custom_vjp
def rows_of(table_VD: Float[Array, "V D"], index_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """`table_VD[index_BT]`.

    Its gradient adds up the rows of each number. A GPU does that with atomic additions in whatever order they come, or,
    where it has to be exact, after sorting every single element:
    60 ms of a 1b model's step, against 8 ms as a matmul, which is for small tables, and less than 1 by a kernel.
    """
    return table_VD[index_BT]


def _forward(table_VD: Array, index_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return table_VD[index_BT], (table_VD[:, :0], index_BT)  # of the table, only how many rows it has is needed


def added_rows(rows_V0: Array, index_BT: Array, d_BTD: Array) -> Array:
    """The plain form of the gradient: [V, D], the sum of the rows of each number."""
    return jnp.zeros((rows_V0.shape[0], d_BTD.shape[-1]), d_BTD.dtype).at[index_BT].add(d_BTD)


def added_rows_by_matmul(rows_V0: Array, index_BT: Array, d_BTD: Array) -> Array:
    """The same as a product with zeros and ones, chunk by chunk of the tokens, summed in float32."""
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
    return lookup_gpu.added_rows(rows_V0.shape[0], index_BT.ravel(), d_BTD.reshape(-1, d_BTD.shape[-1]), interpret=interpret)


def _backward(saved: tuple[Array, Array], d_BTD: Array) -> tuple[Array, None]:
    on_gpu = added_rows_by_matmul if saved[0].shape[0] < _FEW_ROWS else added_rows_by_kernel
    return on_platform(*saved, d_BTD, cuda=on_gpu, default=added_rows), None


rows_of.defvjp(_forward, _backward)
