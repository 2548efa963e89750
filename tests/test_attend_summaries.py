"""Attention over summaries: the plain form against ordinary attention over blocks, and the GPU's kernels against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops import attend_summaries
from nash_mhc.ops.attend import attend_with_evidence
from nash_mhc.ops.attend_rows import Rows
from nash_mhc.ops.attend_summaries import find_in_summaries, find_reference, first_rows, fits_summaries

B, T, N, H, STRIDE = 2, 512, 4, 16, 4
# Documents end within a tile of keys, within one of queries, and with the row.
SEGMENTS = jnp.array([[1] * 37 + [2] * 70 + [3] * 21, [1] * 128])


def inputs(dtype, kv_heads=2, stride=STRIDE):
    keys = jax.random.split(jax.random.key(0), 5)
    q, dout = (jax.random.normal(k, (B, T, N, H), dtype) for k in keys[:2])
    k, v = (jax.random.normal(key, (B, T // stride, kv_heads, H), dtype) for key in keys[2:4])
    return Rows(q, k, v, SEGMENTS[:, :: stride // STRIDE]), dout, jax.random.normal(keys[4], (B, T, N))


def with_gradients(find, rows, dout, devidence):
    """(found, gradients of queries, keys and values)."""
    run = jax.jit(lambda q, k, v: find(rows._replace(q_BTNH=q, k_BIKH=k, v_BIKH=v)))
    found, back = jax.vjp(run, *rows[:3])
    return *found, *back(type(found)(dout, devidence))


@pytest.mark.parametrize("documents", [True, False], ids=["documents", "whole rows"])
def test_the_plain_form_is_attention_of_blocks(documents):
    rows, *cotangents = inputs(jnp.float32)
    rows = rows if documents else rows._replace(segments_BI=None)
    of_blocks = lambda rows: attend_with_evidence((rows,), windows=(None,), kernels=("xla",))[0]
    got, want = (with_gradients(find, rows, *cotangents) for find in (find_in_summaries, of_blocks))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("kv_heads, stride", [(2, 4), (4, 32)], ids=["grouped", "few summaries"])
def test_the_gpu_kernels_compute_what_the_plain_form_does(kv_heads, stride):
    """In Pallas's interpreter: the same kernels that a GPU compiles. What they get is rounded, so is what they give;
    the plain form works on the same numbers in float32."""
    rows, dout, devidence = inputs(jnp.bfloat16, kv_heads, stride)
    assert fits_summaries(rows)
    wide = lambda *arrays: [a.astype(jnp.float32) for a in arrays]
    first = first_rows(rows.segments_BI)
    found = jax.jit(functools.partial(attend_summaries._find_in_kernel, interpret=True))(*rows[:3], first)
    want, back = jax.vjp(lambda *qkv: find_reference(*qkv, first), *wide(*rows[:3]))
    backward = jax.jit(functools.partial(attend_summaries._backward_in_kernel, interpret=True))
    got = *found, *backward(*rows[:3], first, *found, dout, devidence)
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]
    for a, b in zip(got, [*want, *back((*wide(dout), devidence))], strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=2**-7 * float(jnp.abs(b).max()), rtol=2**-7)
    np.testing.assert_allclose(found[1], want[1], atol=1e-5)  # the evidence is not rounded


def test_where_cudnn_is_asked_for_summaries_go_their_own_way(monkeypatch):
    rows, *_ = inputs(jnp.bfloat16)
    asked = []
    monkeypatch.setattr("nash_mhc.ops.attend.found_by_cudnn", lambda each, *_: asked.extend(each) or [])
    (found,) = attend_with_evidence((rows,), windows=(None,), kernels=("cudnn",))
    assert not asked and found.out_BTNH.shape == rows.q_BTNH.shape


def test_documents_begin_where_segments_change():
    np.testing.assert_array_equal(
        first_rows(jnp.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3]])), [[0, 0, 2, 2, 2, 5], [0] * 6]
    )
