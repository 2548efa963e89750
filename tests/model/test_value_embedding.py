"""Value embeddings and the ReLU^2 MLP: causal, packed = alone, decoding = full pass, meshes, memory estimates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from sampled import long

from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.kits.hub.config_json import portable
from nash_mhc.model.lm import LM
from nash_mhc.optim.schedule import group_of
from nash_mhc.parallel.params import map_declared

T = 32
DENSE = ModelConfig(
    vocab_size=64, width=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64, window=16, ratio=4, full_every=4,
    value_embeddings=2, ffn_kind="relu2", tied_embeddings=False, scales=1, residual="plain",
)  # fmt: skip
NASH = dataclasses.replace(DENSE, scales=2, residual="mhc-layer", streams=2)


@pytest.fixture(scope="module", params=[DENSE, NASH], ids=["dense", "nash"])
def model(request) -> LM:
    return jax.jit(lambda: LM.init(request.param, key=jax.random.key(0)))()


TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 64, (2, T)))
logits = jax.jit(lambda model, tokens, segments=None: model(tokens, segments))


def test_every_second_layer_has_a_table_and_the_last_is_one_of_them(model) -> None:
    assert [kind.values for kind in model.cfg.group] == [False, True, False, True]
    assert model.values.table_VE.shape == (2, 128, 16)
    groups = map_declared(model, lambda declared, _: group_of(declared, tied=False)).values
    assert (groups.table_VE, groups.gate_JK) == ("value", "gate")


def test_tables_change_the_logits_and_the_past_does_not_see_the_future(model) -> None:
    without = jax.tree.map(jnp.zeros_like, model.values)
    changed = logits(dataclasses.replace(model, values=without), TOKENS)
    assert jnp.abs(changed - logits(model, TOKENS)).max() > 1e-3
    other = TOKENS.at[:, 20:].add(1) % 64
    np.testing.assert_array_equal(logits(model, TOKENS)[:, :20], logits(model, other)[:, :20])


def test_packed_documents_equal_documents_alone(model) -> None:
    segments = jnp.concatenate([jnp.full((2, 12), 1), jnp.full((2, T - 12), 2)], axis=1)
    packed = logits(model, TOKENS, segments)
    # Alone at the start of a row of the same length, so that the program is the same, before other text.
    first = logits(model, TOKENS.at[:, 12:].add(1) % 64, segments)
    np.testing.assert_allclose(packed[:, :12], first[:, :12], atol=2e-5)
    second = logits(model, jnp.roll(TOKENS, -12, axis=1), jnp.where(jnp.arange(T) < T - 12, jnp.ones_like(segments), 2))
    np.testing.assert_allclose(packed[:, 12:], second[:, : T - 12], atol=2e-5)


def test_decoding_equals_the_full_pass(model) -> None:
    cache, rows = LM.empty_cache(model.cfg, 2, T), []
    decode = jax.jit(lambda model, cache, tokens: model.decode(cache, tokens))
    for t in range(T):
        row, cache = decode(model, cache, TOKENS[:, t])
        rows.append(row)
    np.testing.assert_allclose(jnp.stack(rows, 1), logits(model, TOKENS), atol=2e-5)


def test_a_model_with_tables_cannot_be_exported() -> None:
    with pytest.raises(ConfigError, match="value_embeddings"):
        portable(DENSE)
    with pytest.raises(ConfigError, match="relu2"):
        portable(dataclasses.replace(DENSE, value_embeddings=0))


def test_groups_that_do_not_divide_the_layers_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers 4 .*12.*value_embeddings 3"):
        dataclasses.replace(DENSE, value_embeddings=3)


def run_of(shape: tuple[int, int, int], **optim):
    changes = {f"optim__{name}": value for name, value in optim.items()}
    cfg = small.mesh_config(small.config(**changes), *shape)
    model = dataclasses.replace(cfg.model, value_embeddings=2, ffn_kind="relu2", tied_embeddings=False)
    cfg = dataclasses.replace(cfg, model=model)
    return small.train(cfg, [small.random_rows(cfg, seed) for seed in range(3)])


@pytest.mark.parametrize("optimizer", [*long("adamw"), "normuon"])
def test_a_mesh_of_eight_devices_equals_one(optimizer) -> None:
    small.assert_same_run(*(run_of(shape, optimizer=optimizer, eps=1e-4) for shape in ((2, 2, 2), (1, 1, 1))))
