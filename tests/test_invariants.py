"""What must always hold for the whole model (docs/model.md): causal, packed = alone, C = 1 is plain, meshes agree, no NaN.

Invariants of single operations (doubly stochastic mixing, weights on the simplex, gradients against finite differences) are in
test_sinkhorn, test_streams, test_pyramid and test_nash; decoding with caches is in test_incremental.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.config.schema import MeshConfig, ModelConfig
from nash_mhc.model import LM
from nash_mhc.model.attention import Attention
from nash_mhc.model.health import summary
from nash_mhc.model.lm import Execution
from nash_mhc.model.multiscale import Multiscale
from nash_mhc.parallel.mesh import make_mesh

B, V = 4, 144  # an id for every token of the longest rows below
BASE = ModelConfig(
    vocab_size=V, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=64, tied_embeddings=False,
    scales=3, ratio=2, window=8,
)  # fmt: skip
MIXERS = {
    "nash": {},
    "four scales, plain residual": {"scales": 4, "window": None, "residual": "plain"},
    "ratio 3, convex": {"scales": 2, "ratio": 3, "window": None, "aggregation": "convex"},
    "ratio 3, mean": {"scales": 3, "ratio": 3, "window": 9, "aggregation": "mean", "layers": 1},
    "dense + mHC": {"scales": 1},
}


def config(name):
    return dataclasses.replace(BASE, **MIXERS[name])


def row_length(cfg):
    """At least two of the coarsest blocks, so that every phase of every block occurs."""
    return 36 if cfg.ratio == 3 else 32


def two_documents(cfg, T):
    """[B, T] segment ids; a document begins at each of the first few multiples of the coarsest stride."""
    starts = [cfg.coarsest_stride * (1 + b) for b in range(B)] if cfg.coarsest_stride < 9 else [18, 9, 27, 18]
    return jnp.stack([1 + (jnp.arange(T) >= s) for s in starts]).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="execution")
def sensitivity(model, segments_BT, execution):
    """[t, b, u]: how much the logits at t of row b depend on the embedding of the token at u. Every token has its own id."""
    T = segments_BT.shape[1]
    tokens_BT = jnp.arange(B * T).reshape(B, T)
    probe_V = jax.random.normal(jax.random.key(7), (V,))

    def at(t):
        logits_BV = lambda table: dataclasses.replace(model, embed_VD=table)(tokens_BT, segments_BT, execution)[:, t]
        grad = jax.grad(lambda table: jnp.sum(logits_BV(table) @ probe_V))(model.embed_VD)
        return jnp.max(jnp.abs(grad[: B * T]), axis=1).reshape(B, T)

    return jax.vmap(at)(jnp.arange(T))


def check_causal(model, cfg, execution):
    T = row_length(cfg)
    for segments_BT in (jnp.ones((B, T), jnp.int32), two_documents(cfg, T)):
        found = np.asarray(sensitivity(model, segments_BT, execution))
        for b in range(B):
            segment = np.asarray(segments_BT[b])
            may = np.tril(np.ones((T, T), bool)) & (segment[:, None] == segment[None, :])
            assert (found[:, b][~may] == 0.0).all()
            assert (np.diag(found[:, b]) > 0.0).all()
            # And it is far from trivially so: what may be seen is seen, as far back as a window lets a token look.
            assert (found[:, b][may] > 0.0).mean() > (0.2 if cfg.scales == 1 else 0.9)


@pytest.mark.parametrize("name", MIXERS)
def test_causal_and_within_the_document_at_every_phase(name):
    cfg = config(name)
    check_causal(LM.init(cfg, key=jax.random.key(0)), cfg, Execution(attention="reference"))


def test_causal_in_bfloat16_on_eight_devices():
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tp=2))):
        check_causal(LM.init(BASE, key=jax.random.key(0)), BASE, Execution("bfloat16", attention="xla"))


@pytest.mark.parametrize("name", MIXERS)
def test_a_packed_document_has_the_logits_it_has_alone(name):
    cfg = config(name)
    T = row_length(cfg)
    model = LM.init(cfg, key=jax.random.key(1))
    forward = jax.jit(lambda model, tokens, segments=None: model(tokens, segments))
    tokens_BT = jax.random.randint(jax.random.key(2), (B, T), 0, V)
    segments_BT = two_documents(cfg, T)
    packed = forward(model, tokens_BT, segments_BT)
    for b in range(2):
        start = int(np.argmax(np.asarray(segments_BT[b]) == 2))
        alone = [forward(model, tokens_BT[b : b + 1, part]) for part in (slice(0, start), slice(start, T))]
        np.testing.assert_allclose(packed[b : b + 1], jnp.concatenate(alone, axis=1), atol=3e-5)


def test_one_scale_is_plain_attention_bit_for_bit():
    cfg = dataclasses.replace(BASE, scales=1, window=None, aggregation="nash")
    plain = Attention.init(cfg, key=jax.random.key(0))
    one = dataclasses.replace(Multiscale.init(cfg, key=jax.random.key(0)), base=plain)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 16, cfg.width))
    positions_BT = jnp.broadcast_to(jnp.arange(16), (2, 16))
    same, other = (m(x_BTD, None, positions_BT, kernel="xla")[0] for m in (plain, one))
    np.testing.assert_array_equal(same, other)


@functools.cache
def trained(*shape):
    cfg = small.mesh_config(small.nash_config(), *shape)
    return small.train(cfg, [small.random_rows(cfg, seed) for seed in range(2)])[:2]


@pytest.mark.parametrize("shape", [(2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 8)], ids=str)
def test_one_mesh_equals_another_in_losses_and_parameters(shape):
    (one, one_history), (eight, history) = trained(1, 1, 1), trained(*shape)
    for a, b in zip(history, one_history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    for a, b in zip(jax.tree.leaves(eight.model), jax.tree.leaves(one.model), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.fixture(scope="module")
def model():
    return LM.init(BASE, key=jax.random.key(3))


@functools.partial(jax.jit, static_argnames="dtype")
def loss_and_gradient(model, tokens_BT, dtype):
    def loss(model):
        logits_BTV = model(tokens_BT[:, :-1], None, Execution(dtype, attention="xla"))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), tokens_BT[:, 1:, None], axis=-1))

    return jax.value_and_grad(loss)(model)


def test_bfloat16_stays_close_to_float32(model):
    tokens_BT = jax.random.randint(jax.random.key(4), (B, 33), 0, V)
    exact, rounded = (float(loss_and_gradient(model, tokens_BT, dtype)[0]) for dtype in ("float32", "bfloat16"))
    assert rounded == pytest.approx(exact, abs=2e-2)
    assert rounded != exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["all-zero", "huge", "identical"])
def test_extreme_inputs_give_finite_losses_and_gradients(model, kind, dtype):
    table = {"all-zero": 0.0 * model.embed_VD, "huge": 1e4 * model.embed_VD, "identical": model.embed_VD}[kind]
    tokens_BT = jnp.zeros((B, 33), jnp.int32) if kind == "identical" else jnp.broadcast_to(jnp.arange(33), (B, 33))
    loss, grads = loss_and_gradient(dataclasses.replace(model, embed_VD=table), tokens_BT, dtype)
    assert np.isfinite(loss)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads))


def test_the_reports_of_a_forward_pass(model):
    tokens_BT = jax.random.randint(jax.random.key(5), (B, 32), 0, V)
    found = jax.jit(lambda m, t: summary(m.hidden(t, two_documents(BASE, 32))[1]))(model, tokens_BT)
    L, C, R = BASE.layers, BASE.scales, BASE.streams
    shapes = {"scale_weight": (L, C), "stream_rms": (L, R)}
    assert {k: v.shape for k, v in found.items()} == {k: shapes.get(k, (L,)) for k in found}
    np.testing.assert_allclose(jnp.sum(found["scale_weight"], axis=1), 1.0, atol=1e-5)
    assert float(found["scale_entropy"].min()) > 0.0 and float(found["scale_entropy"].max()) < 1.0
    assert float(found["nash_residual"].min()) >= 0.0
    assert float(found["res_deviation"].max()) < 1e-5
    assert 0.0 < float(found["sinkhorn_deviation"].max()) < 1e-1
    for gain in ("gain_forward", "gain_backward"):
        np.testing.assert_allclose(found[gain], 1.0, atol=1e-4)
    assert float(found["stream_rms"].min()) > 0.0
