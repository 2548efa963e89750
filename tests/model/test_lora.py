"""Adapters: nothing changes before they have learned, nothing else is trained, kept or saved, on any mesh."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, drawn_run, rows

from nash_mhc.checkpoint.store import array_metadata
from nash_mhc.config.schema import ConfigError, LoraConfig, ModelConfig, RunConfig
from nash_mhc.loading.load import load
from nash_mhc.model.lora import Lora, adapted, base_of, has_dropout, merged, with_dropout
from nash_mhc.optim.schedule import rates
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.state import abstract_state

LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.25)


@pytest.fixture(scope="module")
def plain():
    """The whole architecture, with several scales."""
    return small.generic_model(small.nash_config().model)


with_adapters = jax.jit(lambda model: adapted(model, LORA, jax.random.key(1)))


def taught(model):
    """With a B that is not zero any more."""
    rng = np.random.default_rng(1)
    draw = lambda leaf: (0.1 * rng.normal(size=leaf.shape)).astype(np.float32)
    leaves = [draw(leaf) if name.endswith("lora_b") else leaf for name, leaf in named_leaves(model).items()]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def test_fresh_adapters_change_nothing_and_merged_ones_are_those_on_top(plain):
    tokens_BT = jax.random.randint(jax.random.key(3), (2, 16), 0, 257)
    fresh = with_adapters(plain)
    want = forward(plain, tokens_BT)
    np.testing.assert_array_equal(forward(fresh, tokens_BT), want)  # dropout is off where no step is trained
    model = taught(fresh)
    on_top = forward(model, tokens_BT)
    assert float(jnp.max(jnp.abs(on_top - want))) > 0.01
    whole = jax.jit(merged)(model)
    assert set(named_leaves(whole)) == set(named_leaves(plain))
    np.testing.assert_allclose(forward(whole, tokens_BT), on_top, atol=1e-5)
    assert_equal_states(base_of(model), plain)


def test_what_is_dropped_is_another_part_in_every_layer_and_part_and_the_same_for_the_same_key(plain):
    model = with_adapters(plain)
    assert has_dropout(model) and not has_dropout(
        jax.eval_shape(lambda: adapted(plain, dataclasses.replace(LORA, dropout=0.0), jax.random.key(1)))
    )
    keys = lambda seed: named_leaves(with_dropout(model, jax.random.key(seed)))
    drawn = np.concatenate([np.asarray(leaf) for name, leaf in keys(0).items() if name.endswith("key_2")])
    assert len(np.unique(drawn, axis=0)) == len(drawn) == 7 * 2  # projections, layers
    x = jnp.ones((64, 32))
    lora = Lora(jnp.zeros((32, 8)), jnp.eye(32)[:, :8], jnp.eye(8), jnp.asarray(drawn[0]), dropout=0.25)
    seen = np.asarray(lora.project(x, None))
    np.testing.assert_allclose(np.unique(seen), [0, 1 / 0.75], rtol=1e-6)
    assert abs((seen == 0).mean() - 0.25) < 0.06
    np.testing.assert_array_equal(seen, lora.project(x, None))
    assert (np.asarray(dataclasses.replace(lora, key_2=jnp.asarray(drawn[1])).project(x, None)) != seen).any()


def test_they_learn_at_the_very_rate_that_is_given(plain):
    factors = named_leaves(rates(with_adapters(plain)))
    assert {value for name, value in factors.items() if "lora_" in name} == {1.0}
    assert factors["layers.ffn.up_DF.base"] == 640 / 64


def trained_parameters(cfg):
    trained, _ = Training.of(cfg).split(abstract_state(cfg).model)
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def test_a_known_model_has_as_many_of_them_as_elsewhere():
    model = ModelConfig(
        width=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab_size=151936, scales=1, window=None,
        conv_taps=0, residual="plain", qkv_bias=True, tied_embeddings=True,
    )  # fmt: skip
    cfg = lambda **lora: RunConfig(model=model, lora=LoraConfig(**lora))
    assert [trained_parameters(cfg(rank=rank)) for rank in (32, 16)] == [17_596_416, 8_798_208]
    parts = [trained_parameters(cfg(rank=16, targets=name)) for name in ("attention", "mlp")]
    assert sum(parts) == 8_798_208
    assert trained_parameters(cfg(rank=16, targets="q_proj,layers.attention.v_DKH")) == 24 * 16 * (896 * 2 + 896 + 128)


@pytest.mark.parametrize(("settings", "said"), [
    ({"lora": LoraConfig(rank=4, targets="q_prj")}, "--lora-targets q_prj .*did you mean q_proj"),
    ({"lora": LoraConfig(rank=4, targets="embed_VD")}, "--lora-targets embed_VD "),
])  # fmt: skip
def test_targets_that_are_none_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        abstract_state(dataclasses.replace(small.config(), **settings))


def test_what_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave out --train-only"):
        dataclasses.replace(small.config(optim__train_only="layers"), lora=LORA)
    with pytest.raises(ConfigError, match=r"--lora-rank .*--init-from"):
        at(tmp_path / "run", dataclasses.replace(RUN, lora=LORA))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return drawn_run(tmp_path_factory.mktemp("lora") / "base", RUN)


def tuned(base, **changes):
    """In two parts a step, with dropout, which compiles long: so of a layer's seven matrices only one of each shape."""
    cfg = dataclasses.replace(RUN, lora=dataclasses.replace(LORA, targets="q_proj,o_proj,up_proj,down_proj"))
    optim, data = dataclasses.replace(RUN.optim, learning_rate=3e-3), dataclasses.replace(RUN.data, batch_size=4)
    train = dataclasses.replace(cfg.train, init_from=str(base), grad_accum=2, **changes)
    return dataclasses.replace(cfg, optim=optim, data=data, train=train)


@pytest.fixture(scope="module")
def unbroken(base, tmp_path_factory):
    return at(tmp_path_factory.mktemp("lora") / "run", tuned(base, total_steps=50, checkpoint_interval=25, eval_interval=25))


def test_the_base_stays_bit_for_bit_and_only_adapters_are_saved(base, unbroken):
    assert_equal_states(base_of(unbroken.state.model), load(base).model)
    b = [np.asarray(leaf) for name, leaf in named_leaves(unbroken.state.model).items() if name.endswith("lora_b")]
    assert len(b) == 4 and all(np.abs(leaf).min() > 0 for leaf in b)
    moments = [name for name in named_leaves(unbroken.state.opt_state) if "layers" in name]
    assert moments and all(name.endswith(("lora_a", "lora_b")) for name in moments)
    saved = array_metadata(unbroken.folder / "checkpoints" / "50")
    assert all(name.endswith(("lora_a", "lora_b")) for name in saved if "layers" in name)
    assert not any("embed_VD" in name for name in saved)
    scored = [row["eval/loss"] for row in rows(unbroken.folder, "eval.jsonl")]
    assert scored[-1] < scored[0]


def test_a_stopped_run_resumes_bit_for_bit(base, unbroken, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(unbroken.folder, copy)
    shutil.rmtree(copy / "checkpoints" / "50")
    gone_on = at(copy, tuned(base, total_steps=50, checkpoint_interval=25, eval_interval=25))
    assert_equal_states(gone_on.state, unbroken.state)
    assert rows(copy, "eval.jsonl") == rows(unbroken.folder, "eval.jsonl")


@pytest.mark.long  # test_invariants compares eight devices with one; adapters only change a layer's matrices
def test_adapters_train_on_a_mesh_as_on_one_device(base, unbroken, tmp_path):
    copy = shutil.copytree(unbroken.folder, tmp_path / "run")
    (copy / "run.json").unlink()  # every checkpoint knows its base, too
    shutil.rmtree(copy / "checkpoints" / "50")
    cfg, ends = tuned(base, total_steps=28, checkpoint_interval=0, log_interval=1), []
    for name, way in (("mesh", small.mesh_config(cfg, 2, 2, 2)), ("one", cfg)):
        run = at(shutil.copytree(copy, tmp_path / name), way, evaluated=False)
        told = [
            {k: v for k, v in row.items() if k.startswith(("loss", "grad_norm", "health/"))} for row in rows(run.folder)[-3:]
        ]
        ends.append((jax.device_get(run.state), told, None))
    assert {"loss", "grad_norm"} < set(told[0])
    small.assert_same_run(*ends)
    assert_equal_states(ends[0][0], ends[1][0], atol=2e-5)


def test_the_base_may_move_and_must_be_the_same(base, unbroken, tmp_path):
    moved, run = tmp_path / "moved", tmp_path / "run"
    shutil.copytree(base, moved)
    shutil.copytree(unbroken.folder, run)
    info = json.loads((run / "run.json").read_text())
    info["init_from"]["folder"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="the base of a run's adapters, is missing"):
        load(run)
    done = tuned(moved, total_steps=50, checkpoint_interval=25, eval_interval=25)
    assert_equal_states(at(run, done).state, unbroken.state)
    assert_equal_states(load(run).model, unbroken.state.model)  # where it lies now is written down
    longer = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, seq_len=64))
    other = drawn_run(tmp_path / "other", longer)
    values = other / "checkpoints" / "0" / "manifest.json"
    values.write_text(values.read_text().replace("\n", "\n "))
    with pytest.raises(ConfigError, match="hash differs"):
        at(run, tuned(other, total_steps=51))


def test_another_run_begins_with_what_adapters_and_base_make(base, unbroken, tmp_path):
    cfg = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, init_from=str(unbroken.folder)))
    began = at(tmp_path / "full", cfg, total_steps=1, evaluated=False)
    assert "lora_a" not in " ".join(named_leaves(began.state.model))
    again = at(tmp_path / "second", tuned(unbroken.folder, total_steps=1), evaluated=False)
    assert_equal_states(base_of(again.state.model), merged(unbroken.state.model), atol=1e-7)
    assert_equal_states(base_of(load(tmp_path / "second").model), base_of(again.state.model))


def test_the_base_may_be_kept_in_half_the_memory(base, tmp_path):
    cfg = dataclasses.replace(
        tuned(base, total_steps=2), lora=dataclasses.replace(LORA, dropout=0.0, targets="up_proj", base_dtype="bfloat16")
    )
    state = at(tmp_path / "run", cfg, evaluated=False).state
    kinds = {name: str(leaf.dtype) for name, leaf in named_leaves(state.model).items()}
    assert kinds["embed_VD"] == kinds["layers.ffn.up_DF.base"] == "bfloat16"
    assert {kinds[name] for name in kinds if "lora" in name or "norm" in name} == {"float32"}
    assert_equal_states(load(tmp_path / "run").model, state.model)
