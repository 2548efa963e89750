"""Recursive models follow their equations on any mesh, and learn."""

import dataclasses
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, rows

from nash_mhc.config.schema import ConfigError, DataConfig, MeshConfig
from nash_mhc.kits.recursive import model as recursive
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.model.architectures import abstract_model
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.parallel.sharding import named_sharding, with_shardings

CFG = RecursiveConfig(width=32, heads=2, head_dim=16, ffn=48, inner_cycles=2, outer_cycles=3, gradient_cycles=1)
TWO_NETS = dataclasses.replace(CFG, nets=2, gradient_cycles=2)


@pytest.fixture(scope="module")
def model():
    return small.drawn_model(CFG)


@pytest.fixture(scope="module")
def two_nets():
    return small.drawn_model(TWO_NETS)


logits_of = jax.jit(lambda model, tokens_BT, segments_BT: model.hidden(tokens_BT, segments_BT)[0] @ model.unembed_VD[:257].T)


def normed(x, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


@functools.partial(jax.jit, static_argnums=2)
def plainly_applied(net, x_BTD, cfg):
    """Apply a net once; jitted, so that all applications share a program."""

    def turned(x_BTNH):
        T, H = x_BTNH.shape[1], x_BTNH.shape[-1]
        angles_TF = jnp.arange(T)[:, None] * cfg.rope_theta ** (-jnp.arange(H // 2) / (H // 2))[None]
        cos, sin = (f(angles_TF)[None, :, None] for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x_BTNH, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    for n in range(cfg.layers):
        block = jax.tree.map(lambda a, n=n: a[n], net.layers)
        a, f = block.mixer, block.ffn
        q, k, v = (jnp.einsum("btd,dnh->btnh", x_BTD, w) for w in (a.q_DNH, a.k_DKH, a.v_DKH))
        scaled = ((q, a.q_norm), (k, a.k_norm))
        q, k = (turned(normed(x, cfg.norm_eps) * n.scale_D[None, None, None]) for x, n in scaled)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(cfg.head_dim)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None], scores, -jnp.inf)
        mixed = jnp.einsum("bnts,bsnh,nhd->btd", jax.nn.softmax(scores), v, a.out_NHD)
        x_BTD = normed(x_BTD + mixed, cfg.norm_eps)
        up = jax.nn.silu(jnp.einsum("btd,df->btf", x_BTD, f.gate_DF)) * jnp.einsum("btd,df->btf", x_BTD, f.up_DF)
        x_BTD = normed(x_BTD + jnp.einsum("btf,fd->btd", up, f.down_FD), cfg.norm_eps)
    return x_BTD


def plain_hidden(model, tokens_BT):
    """Evaluate the equations in the dtype of the weights, for one document per row."""
    cfg = model.cfg
    applied = lambda net, x_BTD: plainly_applied(net, x_BTD, CFG)  # nets of all models have one shape
    x = model.embed_VD[tokens_BT] * math.sqrt(cfg.width) / 0.5
    upper, lower = x, jnp.zeros_like(x)
    upper_net = model.net if model.upper_net is None else model.upper_net
    for turn in range(cfg.outer_cycles):
        if turn == cfg.outer_cycles - cfg.gradient_cycles:
            upper, lower = jax.lax.stop_gradient((upper, lower))
        for _ in range(cfg.inner_cycles):
            lower = applied(model.net, lower + upper + x)
        upper = applied(upper_net, upper + lower)
    return normed(upper, cfg.norm_eps) * model.norm.scale_D[None, None]


@pytest.mark.parametrize("which", [pytest.param("model", marks=pytest.mark.long), "two_nets"])
def test_values_and_gradients_agree_with_the_equations_in_double_precision(which, request):
    model = request.getfixturevalue(which)
    rng = np.random.default_rng(2)
    tokens_BT, seen = rng.integers(0, 257, (2, 9)), rng.normal(size=(2, 9, model.cfg.width)).astype(np.float32)
    ours = jax.jit(jax.value_and_grad(lambda m: jnp.sum(m.hidden(jnp.asarray(tokens_BT))[0] * seen)))(model)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), model)
        plain = jax.value_and_grad(lambda m: jnp.sum(plain_hidden(m, jnp.asarray(tokens_BT)) * jnp.asarray(seen)))
        want = jax.tree.map(np.asarray, plain(exact))  # not jitted as a whole, which would compile every application
    np.testing.assert_allclose(ours[0], want[0], rtol=2e-4)
    for got, exact in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-3, atol=2e-4 * np.abs(exact).max())


def test_positions_see_only_earlier_ones_of_the_same_document(model):
    segments_BT = jnp.asarray([[1] * 5 + [2] * 7])
    rng = np.random.default_rng(2)
    tokens_BT = jnp.asarray(rng.integers(0, 257, (1, 12)), jnp.int32)
    x_BTD = jnp.asarray(rng.normal(size=(1, 12, model.cfg.width)), jnp.float32)

    def after(x_BTD):
        layout = model.layout(tokens_BT, segments_BT, Execution())
        return model.run_pass(x_BTD, model.initial_states(x_BTD), layout)[0].upper_BTD

    # Weighted, because the plain sum of normalized states hardly changes.
    weigh_D = rng.normal(size=model.cfg.width).astype(np.float32)
    jacobian = jax.jit(jax.jacrev(lambda x: jnp.einsum("btd,d->t", after(x), weigh_D)))(x_BTD)[:, 0]
    depends = np.abs(np.asarray(jacobian)).max(axis=-1) > 0
    same = np.asarray(segments_BT)[0][:, None] == np.asarray(segments_BT)[0][None]
    np.testing.assert_array_equal(depends, np.tril(np.ones((12, 12), bool)) & same)
    # Put the second document first. The row keeps its length, so that the program is the same.
    packed = logits_of(model, tokens_BT, segments_BT)
    moved_BT = jnp.concatenate([tokens_BT[:, 5:], tokens_BT[:, 4::-1]], axis=1)
    first = logits_of(model, moved_BT, jnp.asarray([[1] * 7 + [2] * 5]))
    np.testing.assert_allclose(packed[:, 5:], first[:, :7], rtol=1e-3, atol=1e-4)


def test_decoding_equals_the_forward_pass(two_nets):
    model = two_nets
    tokens_BT = jnp.asarray(np.random.default_rng(4).integers(0, 257, (2, 10)), jnp.int32)
    want = logits_of(model, tokens_BT, None)
    step, cache = jax.jit(recursive.decode), recursive.empty_cache(model.cfg, 2, 9, jnp.float32)
    assert cache.rows.k_LBKSH.shape[0] == 3 * (2 + 1) * 2
    for t in range(9):
        logits_BV, cache = step(model, cache, tokens_BT[:, t])
        np.testing.assert_allclose(logits_BV, want[:, t], rtol=1e-3, atol=1e-4)
    assert np.isnan(step(model, cache, tokens_BT[:, 9])[0]).all()  # full


def test_it_is_a_language_model_and_refuses_contradicting_settings():
    assert isinstance(small.drawn_model(CFG), LanguageModel)
    with pytest.raises(ConfigError, match=r"model.gradient_cycles 4 is more than model.outer_cycles 3; lower it"):
        dataclasses.replace(CFG, gradient_cycles=4)
    with pytest.raises(ConfigError, match="set --no-model-causal for puzzles"):
        dataclasses.replace(CFG, mixer="cells")
    with pytest.raises(ConfigError, match="set --model-cells"):
        dataclasses.replace(CFG, mixer="cells", causal=False)
    with pytest.raises(ConfigError, match=r"data.seq_len 256: .* model.cells 16"):
        dataclasses.replace(RUN, model=dataclasses.replace(CFG, cells=16), data=DataConfig(seq_len=256))
    with pytest.raises(ConfigError, match="cannot generate text"):
        recursive.empty_cache(dataclasses.replace(CFG, causal=False), 1, 8, jnp.float32)


def gathers(cfg):
    """Count the all-gathers of the unrolled gradient on eight fsdp devices."""
    mesh = small.make_mesh(small.mesh_config(small.config(), 1, 8, 1).mesh)
    with jax.set_mesh(mesh):
        model = with_shardings(abstract_model(cfg), mesh)
        tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32, sharding=named_sharding(mesh, "batch", "time"))
        loss = lambda m, t: jnp.sum(m.hidden(t, None, Execution(unroll=True))[0])
        return jax.jit(jax.grad(loss)).lower(model, tokens).compile().as_text().count(" all-gather(")


@pytest.mark.long
def test_weights_are_gathered_once_per_step():
    few = dataclasses.replace(CFG, layers=1, inner_cycles=1, outer_cycles=1)
    counts = [gathers(cfg) for cfg in (few, dataclasses.replace(few, outer_cycles=2, gradient_cycles=2))]
    assert counts[0] == counts[1] > 0


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    train = dataclasses.replace(RUN.train, total_steps=40, eval_interval=20, checkpoint_interval=20, log_interval=1)
    # One layer and one cycle without a gradient are enough for these tests.
    model = dataclasses.replace(CFG, layers=1, inner_cycles=1, outer_cycles=2)
    data, optim = dataclasses.replace(RUN.data, seq_len=16), dataclasses.replace(RUN.optim, learning_rate=3e-3)
    cfg = dataclasses.replace(RUN, model=model, data=data, optim=optim, train=train)
    return cfg, at(tmp_path_factory.mktemp("recursive") / "run", cfg)


def test_a_run_learns(learned):
    assert learned[1].evaluation["eval/loss"] < 3.6  # 5.5 before


@pytest.mark.long  # test_puzzle_objective compares a mesh with one device, too
def test_a_mesh_learns_the_same(learned, tmp_path):
    cfg, unbroken = learned
    copy = shutil.copytree(unbroken.folder, tmp_path / "mesh")
    shutil.rmtree(copy / "checkpoints" / "40")
    meshed = dataclasses.replace(cfg, mesh=MeshConfig(data=2, fsdp=2, tp=2))
    at(copy, meshed, evaluated=False, total_steps=24)
    measured = [[(row["loss"], row["grad_norm"]) for row in rows(folder)[20:24]] for folder in (copy, unbroken.folder)]
    assert len(measured[0]) == 4
    np.testing.assert_allclose(*measured, rtol=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(learned, tmp_path):
    cfg, unbroken = learned
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "40")
    assert_equal_states(at(copy, cfg).state, unbroken.state)


@pytest.mark.long
def test_nothing_is_learned_from_random_tokens(learned, tmp_path):
    """A model that sees the next token would learn random tokens."""
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnop"), size=(400, 60))
    (tmp_path / "random.txt").write_text("\n\n".join("".join(row) for row in letters))
    cfg = learned[0]
    data = dataclasses.replace(cfg.data, dataset=str(tmp_path / "random.txt"), validation_fraction=0.2)
    # Long enough to notice: without the causal mask, such a run ends at half of this loss.
    seldom = dict.fromkeys(("total_steps", "eval_interval", "checkpoint_interval", "log_interval"), 400)
    optim, train = dataclasses.replace(cfg.optim, learning_rate=1e-2), dataclasses.replace(cfg.train, **seldom)
    ended = at(tmp_path / "run", dataclasses.replace(cfg, data=data, optim=optim, train=train))
    assert ended.evaluation["eval/loss"] > math.log(16) - 0.05
