"""What must always hold for the whole model (docs/model.md):
causal, packed = alone, C = 1 is plain, meshes agree, no NaN.

Invariants of single operations (doubly stochastic mixing, weights on the simplex, gradients against finite differences)
are in test_doubly_stochastic, test_residual_streams, test_pyramid, test_nash and test_residual;
decoding with caches is in test_incremental.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.config.schema import MeshConfig, ModelConfig
from nash_mhc.model.captures import recording
from nash_mhc.model.mixers.attention import Attention, attention_layout
from nash_mhc.model.mixers.multiscale import Multiscale
from nash_mhc.model.protocol import Execution
from nash_mhc.model.residual import StreamState
from nash_mhc.ops import residual_streams
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.sharding import for_compute, named_sharding, shardings

BASE = ModelConfig(
    vocab_size=2, width=64, layers=2, heads=8, kv_heads=8, head_dim=8, ffn=32, tied_embeddings=False,
    scales=3, ratio=2, window=12, aggregation="nash", nash_iterations=1, residual="mhc", streams=2, conv_taps=3,
)  # fmt: skip
MIXERS = {
    "dense": {"scales": 1, "window": None, "residual": "plain", "conv_taps": 0},
    "dense, window, mHC": {"scales": 1, "window": 8, "streams": 4},
    "two scales, one softmax": {"scales": 2, "aggregation": "convex", "window": None, "kv_heads": 4, "residual": "plain"},
    "three scales": {"nash_iterations": 3},
    "four scales, shared keys": {"scales": 4, "window": None, "kv_heads": 4, "residual": "plain"},
    "ratio 3, every second layer without a window": {
        "scales": 2, "ratio": 3, "window": 12, "full_every": 2, "residual": "plain"
    },
    "ratio 3, two scales, mean": {"scales": 2, "ratio": 3, "window": None, "aggregation": "mean", "residual": "mhc-layer"},
}  # fmt: skip
F32, BF16 = Execution(attention="xla"), Execution("bfloat16", attention="xla")
# One of them in bfloat16 and on eight devices, where a packed document must be itself bit for bit.
ELSEWHERE = {"three scales": (BF16, (1, 2, 4))}
CASES = {name: (name, *ELSEWHERE.get(name, (F32, (1, 1, 1)))) for name in MIXERS}
# The others have each part once; each is seconds of the compiler.
_LONG = ("dense, window, mHC", "four scales, shared keys", "ratio 3, two scales, mean")
NAMES = [pytest.param(name, marks=[pytest.mark.long] * (name in _LONG)) for name in CASES]


class Case:
    """One model, and one compiled pass through it that every test below uses."""

    def __init__(self, name):
        mixer, self.execution, shape = CASES[name]
        stride = dataclasses.replace(BASE, **MIXERS[mixer]).coarsest_stride
        # Every phase of at least three of the coarsest blocks; on a mesh, T is split eight ways.
        self.T = max(24, 3 * stride)
        self.B = 2 * self.T
        self.cfg = dataclasses.replace(BASE, **MIXERS[mixer] | {"vocab_size": self.B * self.T})
        self.mesh = make_mesh(MeshConfig(*shape))
        # Documents of two blocks and of one, or for one scale of 16 and 8 tokens.
        self.starts = (0, 2 * (stride if stride > 1 else 8))
        model = small.generic_model(self.cfg)
        with jax.set_mesh(self.mesh):
            self.model = jax.device_put(model, shardings(model, self.mesh))

    @functools.cached_property
    def compiled(self):
        """(model, tokens, segments, asked) -> (logits, gradients): of `probe .
        logits[b, asked[b]]`, by rows of the table."""
        probe_V = np.random.default_rng(1).normal(size=self.cfg.vocab_size).astype(np.float32)

        def loss(table_VD, model, tokens_BT, segments_BT, asked_B):
            logits_BTV = dataclasses.replace(model, embed_VD=table_VD)(tokens_BT, segments_BT, self.execution)
            return jnp.sum(logits_BTV[jnp.arange(self.B), asked_B] @ probe_V), logits_BTV

        run = jax.jit(jax.grad(loss, has_aux=True))
        return lambda model, *args: run(model.embed_VD, model, *args)

    def __call__(self, tokens_BT, segments_BT, asked_B):
        with jax.set_mesh(self.mesh):
            place = lambda a, *axes: jax.device_put(np.asarray(a, np.int32), named_sharding(self.mesh, *axes))
            args = place(tokens_BT, "batch", "time"), place(segments_BT, "batch", "time"), place(asked_B, "batch")
            grads_VD, logits_BTV = self.compiled(self.model, *args)
        return np.asarray(logits_BTV), np.asarray(grads_VD)


@functools.cache
def case(name):
    return Case(name)


@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_on_their_past_and_on_nothing_else(name):
    """The whole Jacobian d logits[t] / d embedding[u] in one pass: row b of the batch asks for token t = b.

    Every token of every row has its own id, so row `id` of the table's gradient is that one token's. The first T rows
    are one document, the other T rows two.
    """
    m = case(name)
    T = m.T
    tokens_BT = np.arange(m.B * T).reshape(m.B, T)
    segments_BT = np.ones((m.B, T), int)
    segments_BT[T:, m.starts[1] :] = 2
    # All rows read the same text, under other ids.
    table_VD = np.zeros(m.model.embed_VD.shape, np.float32)
    table_VD[: m.B * T] = np.tile(np.asarray(m.model.embed_VD)[:T], (m.B, 1))
    m.model = dataclasses.replace(m.model, embed_VD=jax.device_put(table_VD, m.model.embed_VD.sharding))
    asked_B = np.tile(np.arange(T), 2)
    _, grads_VD = m(tokens_BT, segments_BT, asked_B)
    found_BT = np.abs(grads_VD[: m.B * T].reshape(m.B, T, -1)).max(axis=-1)
    t_B1, u_1T = asked_B[:, None], np.arange(T)[None]
    seen_BT = (u_1T <= t_B1) & (segments_BT == segments_BT[np.arange(m.B), asked_B][:, None])
    if m.cfg.scales == 1 and m.cfg.window is not None:
        seen_BT &= t_B1 - u_1T <= m.cfg.layers * (m.cfg.window - 1 + m.cfg.conv_taps - 1)
    assert np.isfinite(grads_VD).all()
    assert (found_BT[~seen_BT] == 0.0).all()
    # And what may be seen is seen, all of it: coarse scales reach back to the start of the document.
    assert (found_BT[seen_BT] > 0.0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_document_has_the_logits_it_has_alone(name):
    m = case(name)
    T, start = m.T, m.starts[1]
    rng = np.random.default_rng(2)
    tokens_BT = rng.integers(0, m.cfg.vocab_size, (m.B, T))
    segments_BT = np.ones((m.B, T), int)
    # Row 0: both. Row 1: the first alone, then padding of other tokens. Row 2:
    # the second alone, at the start of its row.
    segments_BT[0, start:] = 2
    tokens_BT[1, :start] = tokens_BT[0, :start]
    segments_BT[1, start:] = 0
    tokens_BT[2, : T - start] = tokens_BT[0, start:]
    segments_BT[2, T - start :] = 0
    logits_BTV, _ = m(tokens_BT, segments_BT, np.zeros(m.B))
    tolerance = {"atol": 2e-4 if m.execution.dtype == "float32" else 0.0}
    np.testing.assert_allclose(logits_BTV[0, :start], logits_BTV[1, :start], **tolerance)
    np.testing.assert_allclose(logits_BTV[0, start:], logits_BTV[2, : T - start], **tolerance)
    # It is the segments that keep them apart: without, the second document would read the first.
    segments_BT[0] = 1
    joined, _ = m(tokens_BT, segments_BT, np.zeros(m.B))
    assert np.abs(joined[0, start:] - logits_BTV[0, start:]).max() > 1e-2


def test_alone_may_be_any_length():
    """A document that ends within a block, by itself: as the same tokens in a longer row."""
    m = case("ratio 3, every second layer without a window")
    tokens_1T = np.random.default_rng(3).integers(0, m.cfg.vocab_size, (1, m.T))
    forward = jax.jit(lambda model, tokens: model(tokens, None, F32))
    whole = m(np.tile(tokens_1T, (m.B, 1)), np.ones((m.B, m.T)), np.zeros(m.B))[0][:1]
    for length in (m.cfg.coarsest_stride, 13):
        np.testing.assert_allclose(forward(m.model, tokens_1T[:, :length]), whole[:, :length], atol=2e-4)


def test_summaries_without_a_score_leave_plain_attention_bit_for_bit():
    first_layer = lambda cfg: jax.tree.map(lambda a: jnp.asarray(a[0]), small.generic_model(cfg).layers.attention)
    plain, mixer = first_layer(dataclasses.replace(BASE, scales=1)), first_layer(BASE)
    assert isinstance(plain, Attention) and isinstance(mixer, Multiscale)
    mixer = dataclasses.replace(mixer, base=plain, offset_CN=jnp.asarray(np.full(mixer.offset_CN.shape, -np.inf, np.float32)))
    x_BTD, probe_BTD = np.random.default_rng(1).normal(size=(2, 2, 16, BASE.width)).astype(np.float32)
    segments_BT = np.repeat([[1, 1, 2, 2], [1, 2, 3, 0]], 4, axis=1).astype(np.int32)

    def loss(mixer, x_BTD):
        layout = attention_layout(segments_BT.shape, jnp.asarray(segments_BT), BASE.strides)
        out_BTD = mixer(x_BTD, layout, window=BASE.window, kernel="xla")
        return jnp.sum(out_BTD * probe_BTD), out_BTD

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (want_mixer, want_x), want = run(plain, x_BTD)
    (got_mixer, got_x), got = run(mixer, x_BTD)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_x, want_x)
    jax.tree.map(np.testing.assert_array_equal, got_mixer.base, want_mixer)


# --- the step: meshes, dtypes, extremes ------------------------------------------------------------------------------


@functools.cache
def trained(shape, dtype="float32"):
    cfg = small.mesh_config(small.nash_config(train__dtype=dtype), *shape)
    return small.train(cfg, [small.random_rows(cfg, seed) for seed in range(2)])


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((1, 1, 8), marks=pytest.mark.long)], ids=str)
def test_one_mesh_equals_another(shape):
    small.assert_same_run(trained(shape), trained((1, 1, 1)))


def test_a_layer_that_mixes_its_streams_twice_is_the_same_on_a_mesh():
    """What it makes of streams that differ, and what it reports; test_residual_streams has the gradients of a sub-layer
    on a mesh. The runs above mix their streams once a layer."""
    cfg = dataclasses.replace(BASE, **MIXERS["dense"] | {"residual": "mhc"})
    layer = jax.tree.map(lambda a: a[0], small.generic_model(cfg).layers)
    xs = tuple(np.random.default_rng(0).normal(size=(cfg.streams, 8, 16, cfg.width)).astype(np.float32))

    @jax.jit
    def through(layer, xs):
        entered, layout = StreamState(xs, residual_streams.squares(xs)), attention_layout(xs[0].shape[:2], None, cfg.strides)
        with recording({"streams"}) as captured:
            return for_compute(layer, xs[0].dtype)(entered, layout, window=None, kernel="xla"), captured

    found = []
    for shape in ((2, 2, 2), (1, 1, 1)):
        mesh = make_mesh(MeshConfig(*shape))
        with jax.set_mesh(mesh):
            placed = jax.device_put(xs, named_sharding(mesh, "batch", "time_split", "width"))
            found.append(jax.device_get(jax.tree.leaves(through(jax.device_put(layer, shardings(layer, mesh)), placed))))
    assert np.abs(found[0][0] - found[0][1]).max() > 1.0  # streams that still differ
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_close_to_float32_and_keeps_a_float32_state():
    (_, exact, _), (state, rounded, _) = (trained((2, 2, 2), dtype) for dtype in ("float32", "bfloat16"))
    for a, b in zip(rounded, exact, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-2)
        assert a["loss"] != b["loss"]
    assert {x.dtype for x in jax.tree.leaves(state.model)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (1, 1, 1)), ("bfloat16", (2, 2, 2))], ids=str)
@pytest.mark.parametrize("kind", ["all-zero", "huge", "identical"])
def test_extreme_inputs_give_finite_losses_and_gradients(kind, dtype, shape):
    cfg = small.mesh_config(small.nash_config(train__dtype=dtype), *shape)
    mesh, step = small._compiled(cfg)
    state = small.start(cfg, mesh)
    factor = {"all-zero": 0.0, "huge": 1e4, "identical": 1.0}[kind]
    state = dataclasses.replace(state, model=dataclasses.replace(state.model, embed_VD=factor * state.model.embed_VD))
    rows = small.random_rows(cfg, 0)
    if kind == "identical":
        rows = rows._replace(inputs=np.full_like(rows.inputs, 7), targets=np.full_like(rows.targets, 7))
    state, metrics = step(state, small.to_device(rows, mesh))
    # One NaN anywhere in the gradients would be one in their norm, and in every moment.
    for tree in (metrics, state.model, state.opt_state):
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree))
    assert float(metrics["loss"]) > 0.0
