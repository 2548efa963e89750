"""What is handed to cuDNN and made of its answers. cuDNN itself is not here:
its contract is acted out on flat memory."""

import functools
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from sampled import long

from nash_mhc.config.schema import MeshConfig
from nash_mhc.ops.attend import attend, attend_with_lse
from nash_mhc.ops.attention_io import AttentionInput
from nash_mhc.ops.kernels import attend_cudnn
from nash_mhc.ops.platform import in_any_order, sums_in_any_order
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime.compat import cudnn
from nash_mhc.runtime.compiled import CompiledStep

T = 24
# More documents in one row than in another, and a row that is one.
SEGMENTS = np.array([[1] * 5 + [2] * 9 + [3] * 10, [1] * 24, [4] * 16 + [0] * 8])


class Lists:
    """Documents by offset and length; without any, each row is one."""

    def __init__(self, q, k, v, q_lengths, k_lengths, q_offsets, k_offsets, *, mask_type, sliding_window_length, scale, **_):
        if mask_type == fused.MaskType.CAUSAL:
            assert sliding_window_length is None or q.shape[1] <= k.shape[1]  # cuDNN refuses it
            q_lengths, k_lengths = (jnp.full((len(x), 1), x.shape[1]) for x in (q, k))
            q_offsets, k_offsets = (jnp.arange(len(x)) * math.prod(x.shape[1:]) for x in (q, k))
        self.q_lengths, self.k_lengths = (lengths.reshape(-1) for lengths in (q_lengths, k_lengths))
        count = len(self.q_lengths)
        self.q_offsets, self.k_offsets = (offsets.reshape(-1)[:count] for offsets in (q_offsets, k_offsets))
        self.q, self.k, self.v = self.taken(q, self.q_offsets), self.taken(k, self.k_offsets), self.taken(v, self.k_offsets)
        self.group = q.shape[2] // k.shape[2]
        t, s = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        seen = (s <= t) & (t - s < (sliding_window_length or q.shape[1]))
        seen = seen[None] & (s[None] < self.k_lengths[:, None, None]) & (t[None] < self.q_lengths[:, None, None])
        scores = jnp.einsum("xtnh,xsnh->xnts", self.q, jnp.repeat(self.k, self.group, axis=2)) * scale
        self.scores, self.scale = jnp.where(seen[:, None], scores, -math.inf), scale

    @staticmethod
    def taken(x, offsets):
        """[documents, T, N, H]: as many tokens from the place in memory that each offset names, whatever is there."""
        size = math.prod(x.shape[1:])
        flat = jnp.pad(x.reshape(-1), (0, size))
        return flat[offsets[:, None] + jnp.arange(size)[None]].reshape(len(offsets), *x.shape[1:])

    @staticmethod
    def put(documents, like, offsets, lengths):
        """Only what is inside of a document is written; elsewhere is what lay there before."""
        _, length, N, H = documents.shape
        there = jnp.arange(length)[None] < lengths[:, None]
        places = offsets[:, None, None] + N * H * jnp.arange(length)[None, :, None] + jnp.arange(N * H)[None, None]
        places = jnp.where(there[..., None], places, like.size)
        flat = jnp.full(like.size, 1e6).at[places.reshape(-1)].set(documents.reshape(-1), mode="drop")
        return flat.reshape(like.shape)


def forward(q, k, v, _, *rest, is_training, **settings):
    lists = Lists(q, k, v, *rest[:4], **settings)
    weights = jnp.nan_to_num(jax.nn.softmax(lists.scores, axis=-1))
    out = jnp.einsum("xnts,xsnh->xtnh", weights, jnp.repeat(lists.v, lists.group, axis=2))
    return lists.put(out, q, lists.q_offsets, lists.q_lengths), jax.nn.logsumexp(lists.scores, axis=-1)


def backward(q, k, v, _, *rest, **settings):
    lists = Lists(q, k, v, *rest[:4], **settings)
    sums, out, dout = rest[6:]
    out, dout = lists.taken(out, lists.q_offsets), lists.taken(dout, lists.q_offsets)
    weights = jnp.where(jnp.isfinite(lists.scores), jnp.exp(lists.scores - sums[..., None]), 0.0)
    dweights = jnp.einsum("xtnh,xsnh->xnts", dout, jnp.repeat(lists.v, lists.group, axis=2))
    dscores = lists.scale * weights * (dweights - jnp.sum(out * dout, axis=-1).transpose(0, 2, 1)[..., None])
    dq = jnp.einsum("xnts,xsnh->xtnh", dscores, jnp.repeat(lists.k, lists.group, axis=2))
    shared = lambda x: x.reshape(*x.shape[:2], k.shape[2], lists.group, -1).sum(axis=3)
    dk, dv = (shared(jnp.einsum("xnts,xtnh->xsnh", a, b)) for a, b in ((dscores, lists.q), (weights, dout)))
    keys = lists.k_offsets, lists.k_lengths
    return lists.put(dq, q, lists.q_offsets, lists.q_lengths), lists.put(dk, k, *keys), lists.put(dv, v, *keys)


@pytest.fixture(autouse=True)
def acted_out(monkeypatch):
    primitive = lambda call: SimpleNamespace(bind=call)
    acted = SimpleNamespace(
        _dot_product_attention_fwd_p=primitive(forward), _dot_product_attention_bwd_p=primitive(backward),
        MaskType=fused.MaskType, AttentionLayout=fused.AttentionLayout,
    )  # fmt: skip
    monkeypatch.setattr(cudnn, "fused", lambda: acted)
    monkeypatch.setattr(cudnn, "supports_document_masks", lambda: True)
    # The branch for rows of too many documents is traced and not taken.
    monkeypatch.setattr(attend_cudnn, "_masked", lambda rows, window: rows.q_BTNH)


@functools.cache
def computed(kernel, packed, window, most=None, at_once=None):
    """What attention finds and its gradients, with and without its log-sum-exp; cached for the reference."""
    rng = np.random.default_rng(0)
    q, dout, k, v = (jnp.asarray(rng.normal(size=(3, T, heads, 4)), jnp.float32) for heads in (6, 6, 2, 2))
    dlse = jnp.asarray(rng.normal(size=(3, T, 6)), jnp.float32)
    segments = jnp.asarray(SEGMENTS) if packed else None
    rows = lambda q, k, v: AttentionInput(
        q, k, v, segments, attend_cudnn.documents_of(segments, most) if packed and kernel == "cudnn" else None
    )

    def plainly(q, k, v):
        out = attend(*rows(q, k, v), window=window, kernel=kernel)
        return jnp.sum(out * dout), out

    def with_lse(q, k, v):
        (found,) = attend_with_lse((rows(q, k, v),), windows=(window,), kernels=(kernel,))
        return jnp.sum(found.out_BTNH * dout) + jnp.sum(found.lse_BTN * dlse), found

    both = lambda *args: [jax.grad(loss, (0, 1, 2), has_aux=True)(*args) for loss in (plainly, with_lse)]
    return jax.tree.leaves(jax.jit(both)(q, k, v))


# How many documents there are is asked for packed rows only. (packed, most, at once, window)
CASES = [(True, None, T, None), (True, 3, T, 4), (True, 3, 10, None), (False, None, T, None), (False, None, 10, 4)]
CASES += long((True, None, T, 4), (True, 3, T, None), (True, 3, 10, 4), (False, None, T, 4), (False, None, 10, None))


@pytest.mark.parametrize(("packed", "most", "at_once", "window"), CASES)
def test_grouped_queries_lse_and_documents_equal_the_reference(packed, window, most, at_once, monkeypatch):
    monkeypatch.setattr(attend_cudnn, "_KEYS_AT_ONCE", at_once)
    found = computed("cudnn", packed, window, most, at_once)
    for a, b in zip(found, computed("reference", packed, window), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_no_two_backward_passes_of_a_program_are_alike(monkeypatch):
    """A function that is called twice, once of them by another: XLA makes four calls of it."""
    monkeypatch.setattr(cudnn, "fused", lambda: fused)
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)

    @jax.jit
    def layer(x):
        return attend_cudnn._attend(attend_cudnn._Form(None, False), x, x, x, None)[0]

    twice = jax.jit(lambda x: layer(layer(x)))
    loss = lambda x: jnp.sum(twice(twice(x)).astype(jnp.float32))
    lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    before = _seeds_by_call(module)
    assert len(before) == 4
    assert len(set(before)) == 1
    cudnn.number_backward_passes(module)
    after = _seeds_by_call(module)
    assert len(after) == len(set(after)) == 4
    assert module.operation.verify()


def test_long_rows_go_backwards_in_parts_only_where_sums_have_an_order(monkeypatch):
    monkeypatch.setattr(cudnn, "fused", lambda: fused)
    monkeypatch.setattr(attend_cudnn, "_KEYS_AT_ONCE", 128)
    for limit in ("_NARROW", "_NARROW_IN_ORDER"):
        monkeypatch.setattr(f"nash_mhc.ops.attend.{limit}", 0)  # short sequences go to Triton
    x = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)

    def passes(any_order):
        loss = lambda x: jnp.sum(attend(x, x, x, kernel="cudnn").astype(jnp.float32))
        with in_any_order(any_order):
            lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
        return len(_seeds_by_call(lowered.compiler_ir("stablehlo")))

    assert [passes(any_order) for any_order in (False, True)] == [4, 1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_adds_up_in_any_order_unless_it_is_deterministic(deterministic):
    asked = []
    step = CompiledStep(lambda x, y: asked.append(sums_in_any_order()) or x, make_mesh(MeshConfig()))
    step._deterministic_gpu = deterministic  # as it would be on a GPU
    step(jnp.zeros(()), jnp.zeros(()))
    assert asked == [not deterministic]


def _seeds_by_call(module):
    """Of the backward passes that are reached from the program's start, one for each way there."""
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations}

    def seeds(name):
        for op in cudnn._operations(functions[name]):
            if cudnn._is_backward(op):
                yield json.loads(op.attributes["backend_config"].value)["cudnn_fmha_backend_config"]["seed"]
            elif callee := cudnn._callee(op):
                yield from seeds(callee)

    return list(seeds("main"))
