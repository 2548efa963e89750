"""Rows of a table: the gradient by matmul is the sum that the plain form takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops import lookup
from nash_mhc.ops.lookup import added_rows, added_rows_by_kernel, added_rows_by_matmul, rows_of

V, D, B, T = 48, 8, 3, 10


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    index = jnp.asarray(rng.integers(0, V // 4, (B, T)), jnp.int32)  # each row about two and a half times, most rows never
    return table, index, jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


def test_it_is_a_lookup_with_a_lookups_gradient(case):
    table, index, d = case
    np.testing.assert_array_equal(jax.jit(rows_of)(table, index), np.asarray(table)[index])
    takes = (lambda t: rows_of(t, index), lambda t: t[index])
    grads = [jax.jit(jax.grad(lambda t, take=take: jnp.sum(take(t) * d)))(table) for take in takes]
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("elements", [V, 5 * V, 2**26], ids=["a token a chunk", "five", "all at once"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_matmul_adds_up_the_same_rows(case, monkeypatch, elements, dtype):
    monkeypatch.setattr(lookup, "_CHUNK_ELEMENTS", elements)
    table, index, d = case
    given = np.asarray(table)[:, :0], index, np.asarray(d).astype(jnp.dtype(dtype))
    got = jax.jit(functools.partial(added_rows_by_matmul))(*given)  # a function of its own for every length of a chunk
    assert got.dtype == dtype
    check_sums(case, got)


plainly_added = jax.jit(added_rows)


def check_sums(case, got):
    table, index, d = case
    exact = plainly_added(np.asarray(table)[:, :0], index, np.asarray(d).astype(got.dtype).astype(np.float32))
    # Summed in float32 whatever the dtype; only the result is rounded.
    np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=1e-6 if got.dtype == "float32" else 2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gpu_kernel_adds_up_the_same_rows(case, dtype):
    """In Pallas's interpreter. One number has more tokens than are loaded at once, most have none, the last has one."""
    table, index, d = case
    index = np.array(index)
    index[:2], index[2, 0] = 3, V - 1
    assert np.sum(index == 3) > lookup._TOKENS
    given = np.asarray(table)[:, :0], index, np.asarray(d).astype(jnp.dtype(dtype))
    got = jax.jit(lambda *args: added_rows_by_kernel(*args, interpret=True))(*given)
    assert got.dtype == dtype
    check_sums((table, index, d), got)
