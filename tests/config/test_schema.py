"""The schema: every key is declared completely, checked when built, frozen, and survives to_dict and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import typing

import pytest

from nash_mhc.config import presets
from nash_mhc.config.fields import type_name
from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    TelemetryConfig,
    TrainConfig,
    accepted_types,
    nearest_multiple,
)

SECTIONS = (ModelConfig, DataConfig, MeshConfig, OptimConfig, TrainConfig, ObjectiveConfig, TelemetryConfig)


def load_plain_schema():
    """schema.py as a user's script imports it:
    without the runtime type checks of this suite, which would speak first."""
    names = [f"nash_mhc.config.{name}" for name in ("fields", "sections", "optim", "model", "schema")]
    checked = {name: sys.modules[name] for name in names}
    try:
        for name in names:
            spec = importlib.util.spec_from_file_location(name, checked[name].__file__)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[names[-1]]
    finally:
        sys.modules.update(checked)


plain = load_plain_schema()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plain.DataConfig(batch_size=0), "data.batch_size must be at least 1, not 0"),
        (lambda: plain.DataConfig(batch_size="8"), "data.batch_size must be an integer, not '8'"),
        (lambda: plain.DataConfig(batch_size=8.0), "data.batch_size must be an integer, not 8.0"),
        (lambda: plain.DataConfig(batch_size=True), "data.batch_size must be an integer, not True"),
        (lambda: plain.DataConfig(batch_size=None), "data.batch_size must be an integer, not None"),
        (lambda: plain.DataConfig(dataset=""), "data.dataset must not be empty"),
        (lambda: plain.DataConfig(num_workers=257), "data.num_workers must be at most 256, not 257"),
        (lambda: plain.OptimConfig(learning_rate=0), "optim.learning_rate must be above 0, not 0.0"),
        (lambda: plain.OptimConfig(learning_rate=True), "optim.learning_rate must be a number, not True"),
        (lambda: plain.OptimConfig(learning_rate=float("nan")), "optim.learning_rate must be a finite number, not nan"),
        (lambda: plain.OptimConfig(learning_rate=float("inf")), "optim.learning_rate must be a finite number, not inf"),
        (lambda: plain.OptimConfig(b1=1.5), "optim.b1 must be at most 1, not 1.5"),
        (lambda: plain.ModelConfig(qk_norm=1), "model.qk_norm must be true or false, not 1"),
        (lambda: plain.ModelConfig(window=0), "model.window must be at least 1, not 0"),
        (lambda: plain.ModelConfig(window="x"), "model.window must be an integer or none, not 'x'"),
        (lambda: plain.TrainConfig(remat="all"), "train.remat must be one of auto, none, dots, full, not 'all'"),
        (
            lambda: plain.ModelConfig(heads=12, kv_heads=5),
            "model.kv_heads 5 does not divide model.heads 12; the nearest that does is 4",
        ),
        (lambda: plain.ModelConfig(head_dim=15), "model.head_dim 15 must be even for the rotary embedding; try 16"),
        (lambda: plain.ModelConfig(scales=0), "model.scales must be at least 1, not 0"),
        (lambda: plain.ModelConfig(scales=9), "model.scales must be at most 8, not 9"),
        (lambda: plain.ModelConfig(ratio=1), "model.ratio must be at least 2, not 1"),
        (lambda: plain.ModelConfig(ratio=65), "model.ratio must be at most 64, not 65"),
        (lambda: plain.ModelConfig(nash_iterations=0), "model.nash_iterations must be at least 1, not 0"),
        (lambda: plain.ModelConfig(streams=1), "model.streams must be at least 2, not 1"),
        (lambda: plain.ModelConfig(streams=17), "model.streams must be at most 8, not 17"),
        (lambda: plain.ModelConfig(nash_iterations=0), "model.nash_iterations must be at least 1, not 0"),
        (lambda: plain.ModelConfig(aggregation="sum"), "model.aggregation must be one of nash, convex, mean, not 'sum'"),
        (lambda: plain.ModelConfig(residual="hc"), "model.residual must be one of mhc, mhc-layer, plain, not 'hc'"),
        (lambda: plain.OptimConfig(sparsity=-0.5), "optim.sparsity must be at least 0, not -0.5"),
        (
            lambda: plain.ModelConfig(window=100, ratio=3, scales=4),
            "model.window 100 must be a multiple of the coarsest stride 27 (model.ratio 3, model.scales 4); the nearest is 108",
        ),
        (
            lambda: plain.ModelConfig(window=1, ratio=2, scales=4),
            "model.window 1 must be a multiple of the coarsest stride 8 (model.ratio 2, model.scales 4); the nearest is 8",
        ),
        (
            lambda: plain.RunConfig(model=plain.ModelConfig(ratio=2, scales=4), data=plain.DataConfig(seq_len=99)),
            "data.seq_len 99 must be a multiple of the coarsest stride 8 (model.ratio 2, model.scales 4); the nearest is 96",
        ),
        (lambda: plain.MeshConfig(tp=0), "mesh.tp must be a positive number of devices, or -1 for all remaining ones, not 0"),
        (lambda: plain.MeshConfig(tp=-2), "mesh.tp must be at least -1, not -2"),
        (
            lambda: plain.MeshConfig(data=-1, tp=-1),
            "only one mesh axis may be -1 (all remaining devices), not mesh.data and mesh.tp",
        ),
        (lambda: plain.RunConfig(model_size=3), "model_size must be text, not 3"),
        (
            lambda: plain.RunConfig(optim=plain.OptimConfig(warmup_steps=9), train=plain.TrainConfig(total_steps=8)),
            "optim.warmup_steps 9 is more than train.total_steps 8; lower --warmup-steps or raise --total-steps",
        ),
        (
            lambda: plain.RunConfig.from_dict({"dat": {}}),
            "unknown section 'dat': if it is of a kit, the kit is missing (restore nash_mhc/kits/dat, or give its folder with "
            "--kit); choose from model_size, kit, model, data, mesh, optim, train, objective, lora, "
            "precision, telemetry, distill, quantize",
        ),
        (lambda: plain.RunConfig.from_dict({"data": 3}), "data must contain keys and values, not 3"),
        (lambda: plain.RunConfig.from_dict({"data": {"seq_len": 1}}), "data.seq_len must be at least 2, not 1"),
    ],
)
def test_messages(build, message):
    with pytest.raises(plain.ConfigError) as caught:
        build()
    assert str(caught.value) == message


def test_from_dict_names_an_unknown_key():
    with pytest.raises(ConfigError, match=r"^unknown key data\.seqlen; choose from batch_size, .*seq_len") as caught:
        RunConfig.from_dict({"data": {"seqlen": 3}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", presets.sizes())
def test_round_trip(size):
    config = presets.run(size)
    assert config.model_size == size
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_dict_fills_in_defaults_and_makes_floats():
    config = plain.RunConfig.from_dict({"optim": {"learning_rate": 1}})
    assert config == dataclasses.replace(plain.RunConfig(), optim=plain.OptimConfig(learning_rate=1.0))
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
    assert type(getattr(RunConfig(), kind.section)) is kind
    for f in dataclasses.fields(kind):
        assert f.metadata["help"] and "\n" not in f.metadata["help"]
        assert set(accepted_types(hints[f.name])) <= {int, float, bool, str, type(None)}, "a leaf holds a plain value"
        if f.metadata["choices"] and not (f.default is None and type(None) in accepted_types(hints[f.name])):
            assert f.default in f.metadata["choices"]


def test_unknown_size_lists_the_sizes():
    with pytest.raises(ConfigError, match="unknown size 'huge'") as caught:
        presets.run("huge")
    assert all(size in str(caught.value) for size in presets.sizes())


def test_one_scale_takes_any_window_and_any_length():
    assert plain.ModelConfig(scales=1, window=13).coarsest_stride == 1
    assert plain.RunConfig(model=plain.ModelConfig(scales=1), data=plain.DataConfig(seq_len=99)).data.seq_len == 99


def test_strides_are_the_powers_of_the_ratio():
    assert ModelConfig(scales=4, ratio=2).strides == (1, 2, 4, 8)
    assert ModelConfig(scales=3, ratio=3).strides == (1, 3, 9)


def test_helpers():
    assert accepted_types(int | None) == (int, type(None))
    assert accepted_types(typing.Optional[float]) == (float, type(None))  # noqa: UP045 - the older spelling must work too
    assert type_name(float | None) == "a number or none"
    assert [nearest_multiple(v, 8) for v in (1, 11, 13, 16)] == [8, 8, 16, 16]
    assert [ModelConfig(vocab_size=v).padded_vocab for v in (2, 128, 129)] == [128, 128, 256]
