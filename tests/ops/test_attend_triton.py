"""Attention over summaries and windows: the plain form against ordinary attention, and the GPU's kernels against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.attend import attend, attend_with_lse
from nash_mhc.ops.attention_io import AttentionInput, AttentionOutput, bounds_of
from nash_mhc.ops.kernels import attend_triton
from nash_mhc.ops.kernels.attend_cudnn import documents_of
from nash_mhc.ops.kernels.attend_triton import attend_reference, attend_triton_with_lse, fits_triton
from nash_mhc.ops.platform import in_any_order

B, T, N, H, STRIDE = 2, 512, 4, 16, 4
# Documents end within a tile of keys, within one of queries, and with the row.
SEGMENTS = np.array([[1] * 37 + [2] * 70 + [3] * 21, [1] * 128], np.int32)


def inputs(dtype, kv_heads=2, stride=STRIDE):
    rng = np.random.default_rng(0)
    drawn = lambda *shape: rng.normal(size=shape).astype(dtype)
    q, dout, k, v = (drawn(B, T // s, heads, H) for s, heads in ((1, N), (1, N), (stride, kv_heads), (stride, kv_heads)))
    return AttentionInput(q, k, v, np.repeat(SEGMENTS, STRIDE, axis=1)[:, ::stride]), dout, drawn(B, T, N).astype(np.float32)


def with_gradients(find, rows, dout, dlse):
    """(found, gradients of queries, keys and values), all in one program."""

    @jax.jit
    def both(rows, *cotangents):
        found, back = jax.vjp(lambda q, k, v: find(rows._replace(q_BTNH=q, k_BIKH=k, v_BIKH=v)), *rows[:3])
        return *found, *back(type(found)(*cotangents))

    return both(rows, dout, dlse)


@pytest.mark.parametrize(
    "documents, stride, window", [(True, STRIDE, None), (False, STRIDE, None), (True, 1, 100)],
    ids=["documents", "whole rows", "a window"],
)  # fmt: skip
def test_the_plain_form_is_ordinary_attention(documents, stride, window):
    rows, *cotangents = inputs(jnp.float32, stride=stride)
    rows = rows if documents else rows._replace(segments_BI=None)
    ordinary = lambda rows: attend_with_lse((rows,), windows=(window,), kernels=("xla",))[0]
    ours = functools.partial(attend_triton_with_lse, window=window)
    got, want = (with_gradients(find, rows, *cotangents) for find in (ours, ordinary))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    "kv_heads, stride, window", [(2, 4, None), (4, 32, None), (4, 1, 100)], ids=["grouped", "few summaries", "a window"]
)
def test_the_gpu_kernels_compute_what_the_plain_form_does(monkeypatch, kv_heads, stride, window):
    """In Pallas's interpreter: the same kernels that a GPU compiles. What they get is rounded, so is what they give;
    the plain form works on the same numbers in float32. On the way back one block of threads walks along all queries of
    a tile of keys, or three share them."""
    rows, dout, dlse = inputs(jnp.bfloat16, kv_heads, stride)
    assert fits_triton(rows)
    bounds, how = jax.jit(bounds_of)(rows.segments_BI), {"window": window or T // stride}

    @jax.jit
    def plain(*arrays):
        found, back = jax.vjp(lambda *qkv: attend_reference(*qkv, *bounds, **how), *arrays[:3])
        return *found, *back(arrays[3:])

    want = plain(*(a.astype(np.float32) for a in (*rows[:3], dout, dlse)))
    found = jax.jit(functools.partial(attend_triton._attend_in_kernel, **how, interpret=True))(*rows[:3], *bounds)
    np.testing.assert_allclose(found[1], want[1], atol=1e-5)  # the lse is not rounded
    for shares in (1, 3):
        monkeypatch.setattr(attend_triton, "_LEAST_SHARE", 1 if shares > 1 else T)
        monkeypatch.setattr(attend_triton, "_MOST_SHARES", shares)
        backward = jax.jit(functools.partial(attend_triton._backward_in_kernel, **how, interpret=True))
        got = *found, *backward(*rows[:3], *bounds, *found, dout, dlse)
        assert [a.dtype for a in got] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=2**-7 * np.abs(b).max(), rtol=2**-7)


@pytest.fixture
def asked_of_cudnn(monkeypatch):
    """Windows that cuDNN was asked for, on a GPU that it walks documents on."""
    asked = []
    plain = lambda rows: AttentionOutput(rows.q_BTNH, rows.q_BTNH[..., 0])
    with_lse = lambda each, windows, _: asked.extend(windows) or [plain(rows) for rows in each]
    monkeypatch.setattr("nash_mhc.ops.attend.attend_cudnn_with_lse", with_lse)
    monkeypatch.setattr("nash_mhc.ops.attend.attend_cudnn", lambda rows, window: asked.append(window) or rows.q_BTNH)
    monkeypatch.setattr("nash_mhc.runtime.compat.cudnn.supports_document_masks", lambda: True)
    monkeypatch.setattr("nash_mhc.ops.attend._NARROW", 50)
    monkeypatch.setattr("nash_mhc.ops.attend._NARROW_IN_ORDER", 100)
    return asked


def test_where_cudnn_is_asked_for_summaries_and_narrow_windows_go_their_own_way(asked_of_cudnn):
    def find(*each):
        each = [rows._replace(documents=documents_of(rows.segments_BI, most=3)) for rows in each]
        return attend_with_lse(tuple(each), windows=(None, 100, 101, None), kernels=("cudnn",) * 4)

    summaries, tokens = inputs(jnp.bfloat16)[0], inputs(jnp.bfloat16, stride=1)[0]
    found = jax.eval_shape(find, summaries, tokens, tokens, tokens)
    assert asked_of_cudnn == [101, None] and all(f.out_BTNH.shape == tokens.q_BTNH.shape for f in found)
    asked_of_cudnn.clear()
    with in_any_order(True):  # cuDNN is then fast with fewer keys
        jax.eval_shape(functools.partial(find), summaries, tokens, tokens, tokens)  # traced anew
    assert asked_of_cudnn == [100, 101, None]


def test_a_single_scale_chooses_by_its_window_too(asked_of_cudnn):
    tokens = inputs(jnp.bfloat16, stride=1)[0]

    def run(window, rows):
        documents = documents_of(rows.segments_BI, most=3)
        return attend(*rows[:3], rows.segments_BI, documents, window=window, kernel="cudnn")

    for window in (100, 101, None):
        jax.eval_shape(functools.partial(run, window), tokens)
    assert asked_of_cudnn == [101, None]


def test_cudnn_is_not_asked_where_it_would_wait_for_the_host(asked_of_cudnn, monkeypatch):
    """To know how many documents there are."""
    rows, *_ = inputs(jnp.bfloat16, stride=1)
    segments, nothing = rows.segments_BI, lambda segments: None
    known, counted = (functools.partial(documents_of, most=most) for most in (3, None))

    def find(rows, found):
        rows = rows._replace(documents=found(rows.segments_BI))
        attend(*rows[:3], rows.segments_BI, rows.documents, kernel="cudnn")
        attend_with_lse((rows,), windows=(None,), kernels=("cudnn",))

    def run(segments, found):
        jax.eval_shape(functools.partial(find, found=found), rows._replace(segments_BI=segments))
        given = len(asked_of_cudnn)
        asked_of_cudnn.clear()
        return given

    assert [run(None, nothing), run(segments, known)] == [2, 2]
    assert [run(segments, counted), run(segments, nothing)] == [0, 0]
    monkeypatch.setattr("nash_mhc.runtime.compat.cudnn.supports_document_masks", lambda: False)
    assert run(segments, known) == 0


def test_documents_begin_and_end_where_segments_change():
    first, end = jax.jit(bounds_of)(np.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3]], np.int32))
    np.testing.assert_array_equal(first, [[0, 0, 2, 2, 2, 5], [0] * 6])
    np.testing.assert_array_equal(end, [[2, 2, 5, 5, 5, 6], [6] * 6])
