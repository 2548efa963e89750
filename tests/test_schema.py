"""The schema: every key is declared completely, checked when built, frozen, and survives to_dict and back."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from nash_mhc.config import presets
from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    accepted_types,
    nearest_multiple,
    type_name,
)

SECTIONS = (ModelConfig, DataConfig, MeshConfig, OptimConfig, TrainConfig)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataConfig(batch_size=0), "data.batch_size must be at least 1, not 0"),
        (lambda: DataConfig(batch_size="8"), "data.batch_size must be an integer, not '8'"),
        (lambda: DataConfig(batch_size=8.0), "data.batch_size must be an integer, not 8.0"),
        (lambda: DataConfig(batch_size=True), "data.batch_size must be an integer, not True"),
        (lambda: DataConfig(batch_size=None), "data.batch_size must be an integer, not None"),
        (lambda: DataConfig(dataset=""), "data.dataset must not be empty"),
        (lambda: DataConfig(num_workers=257), "data.num_workers must be at most 256, not 257"),
        (lambda: OptimConfig(learning_rate=0), "optim.learning_rate must be above 0, not 0.0"),
        (lambda: OptimConfig(learning_rate=True), "optim.learning_rate must be a number, not True"),
        (lambda: OptimConfig(learning_rate=float("nan")), "optim.learning_rate must be a finite number, not nan"),
        (lambda: OptimConfig(learning_rate=float("inf")), "optim.learning_rate must be a finite number, not inf"),
        (lambda: OptimConfig(b1=1.5), "optim.b1 must be at most 1, not 1.5"),
        (lambda: ModelConfig(qk_norm=1), "model.qk_norm must be true or false, not 1"),
        (lambda: ModelConfig(window=0), "model.window must be at least 1, not 0"),
        (lambda: ModelConfig(window="x"), "model.window must be an integer or none, not 'x'"),
        (lambda: TrainConfig(remat="all"), "train.remat must be one of none, dots, full, not 'all'"),
        (
            lambda: ModelConfig(heads=12, kv_heads=5),
            "model.kv_heads 5 does not divide model.heads 12; the nearest that does is 4",
        ),
        (lambda: ModelConfig(head_dim=15), "model.head_dim 15 must be even for the rotary embedding; try 16"),
        (lambda: MeshConfig(tp=0), "mesh.tp must be a positive number of devices or -1 for the rest, not 0"),
        (lambda: MeshConfig(tp=-2), "mesh.tp must be at least -1, not -2"),
        (lambda: MeshConfig(data=-1, tp=-1), "only one mesh axis may be -1 (the rest), not mesh.data and mesh.tp"),
        (lambda: RunConfig(model_size=3), "model_size must be text, not 3"),
        (
            lambda: RunConfig(optim=OptimConfig(warmup_steps=9), train=TrainConfig(total_steps=8)),
            "optim.warmup_steps 9 is more than train.total_steps 8; lower --warmup-steps or raise --total-steps",
        ),
        (
            lambda: RunConfig.from_dict({"dat": {}}),
            "unknown section 'dat'; there are model_size, model, data, mesh, optim, train",
        ),
        (lambda: RunConfig.from_dict({"data": 3}), "data must hold keys and values, not 3"),
        (lambda: RunConfig.from_dict({"data": {"seq_len": 1}}), "data.seq_len must be at least 2, not 1"),
    ],
)
def test_messages(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value) == message


def test_from_dict_names_an_unknown_key():
    with pytest.raises(ConfigError, match=r"^unknown key data\.seqlen; there are batch_size, .*seq_len") as caught:
        RunConfig.from_dict({"data": {"seqlen": 3}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", presets.sizes())
def test_round_trip(size):
    config = presets.run(size)
    assert config.model_size == size
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_fills_in_defaults_and_makes_floats():
    config = RunConfig.from_dict({"optim": {"learning_rate": 1}})
    assert config == dataclasses.replace(RunConfig(), optim=OptimConfig(learning_rate=1.0))
    assert type(config.optim.learning_rate) is float


@pytest.mark.parametrize("kind", [*SECTIONS, RunConfig])
def test_frozen_and_hashable(kind):
    config = kind()
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))
    assert hash(config) == hash(kind())


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_key_is_declared_with_help_and_a_valid_default(kind):
    hints = typing.get_type_hints(kind)
    assert typing.get_type_hints(RunConfig)[kind.section] is kind
    for f in dataclasses.fields(kind):
        assert f.metadata["help"] and "\n" not in f.metadata["help"]
        assert set(accepted_types(hints[f.name])) <= {int, float, bool, str, type(None)}, "a leaf holds a plain value"
        if f.metadata["choices"]:
            assert f.default in f.metadata["choices"]


def test_unknown_size_lists_the_sizes():
    with pytest.raises(ConfigError, match="unknown model size 'huge'") as caught:
        presets.run("huge")
    assert all(size in str(caught.value) for size in presets.sizes())


def test_helpers():
    assert accepted_types(int | None) == (int, type(None))
    assert accepted_types(typing.Optional[float]) == (float, type(None))  # noqa: UP045 - the older spelling must work too
    assert type_name(float | None) == "a number or none"
    assert [nearest_multiple(v, 8) for v in (1, 11, 13, 16)] == [8, 8, 16, 16]
    assert [ModelConfig(vocab_size=v).padded_vocab for v in (2, 128, 129)] == [128, 128, 256]
