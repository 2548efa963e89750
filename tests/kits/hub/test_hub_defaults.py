"""A config.json has the same meaning as in transformers: every field of the supported classes, and every default."""

import dataclasses
import inspect
import json

import numpy as np
import pytest

from nash_mhc.config import ConfigError
from nash_mhc.config.schema import ModelConfig
from nash_mhc.kits.hub.config_json import DEFAULTS, IGNORED, read_config

CLASSES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 300}


def their_class(family):
    pytest.importorskip("torch", reason="transformers' classes of models need torch")
    import transformers

    return getattr(transformers, CLASSES[family])


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_of_transformers_is_read_refused_or_ignored(family):
    """A field that a new version of transformers adds fails this test: read it, refuse it by name, or list it."""
    theirs = {field.name: field.default for field in dataclasses.fields(their_class(family))}
    assert set(theirs) - set(DEFAULTS[family]) - IGNORED == set(), "new fields: what do they mean to a model?"
    assert set(DEFAULTS[family]) - set(theirs) == set(), "fields that are gone"
    assert not set(DEFAULTS[family]) & IGNORED
    for name, default in DEFAULTS[family].items():
        assert theirs[name] == default and type(theirs[name]) is type(default), name


# Another value of each field that is read, for a model that has a window where its family has any.
OTHER = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "hidden_act": "gelu", "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "is_encoder_decoder": True,
    "vocab_size": 301, "intermediate_size": 49, "num_key_value_heads": 2, "max_position_embeddings": 77, "head_dim": 10,
    "attention_bias": True, "mlp_bias": True, "use_sliding_window": False, "sliding_window": 7, "max_window_layers": 2,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_that_is_read_has_an_effect(family):
    windowed = {} if family == "llama" else {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
    values = SMALL | {"model_type": family, "num_key_value_heads": 4} | windowed
    before = read_config(values, "")
    for name in set(DEFAULTS[family]) - {"eos_token_id"}:  # which HubFolder.stops reads
        try:
            assert read_config(values | {name: OTHER[name]}, "") != before, name
        except ConfigError as error:
            assert name in str(error) or name in ("num_hidden_layers", "num_attention_heads")
    for name in IGNORED:
        assert read_config(values | {name: 7}, "") == before


def drawn(rng, family):
    """Draw some of the keys, with mostly consistent values."""
    pick = lambda *values: values[rng.integers(len(values))]
    chosen = {
        **SMALL,
        "num_key_value_heads": pick(1, 2, 4, None),
        "head_dim": pick(8, 16) if family != "llama" else pick(8, 16, None),
        "rms_norm_eps": pick(1e-5, 1e-6),
        "tie_word_embeddings": pick(True, False),
        "max_position_embeddings": pick(128, 4096),
        "rope_theta": pick(5e5, 10_000.0),
        "use_sliding_window": pick(True, False, True),
        "sliding_window": pick(16, None, 8),
        "max_window_layers": pick(0, 1, 2, 28),
        "layer_types": pick(None, None, ["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"]),
        "hidden_act": pick("silu", "silu", "gelu"),
        "original_max_position_embeddings": pick(None, None, 32),
    }
    rope = {
        "rope_type": pick("default", "linear", "yarn", "yarn", "llama3"),
        "factor": pick(2.0, 4.0, None),
        "original_max_position_embeddings": pick(64, 32),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": pick(300.0, 10_000.0),
        "beta_fast": pick(16.0, 32),
        "attention_factor": pick(1.25, None),
    }
    of_kind = {
        "default": (), "linear": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "attention_factor"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }[rope["rope_type"]]  # fmt: skip
    rope = {name: value for name, value in rope.items() if name in (*of_kind, "rope_type", "rope_theta")}
    chosen[pick("rope_scaling", "rope_parameters")] = {k: v for k, v in rope.items() if rng.random() < 0.9}
    return {k: v for k, v in chosen.items() if k in SMALL or rng.random() < 0.6}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.long)], ids=["few", "many"])
def test_omitted_keys_have_the_defaults_of_transformers(family, seeds):
    """A file gives the same model with the defaults filled in by transformers. What transformers refuses, we refuse,
    because its tokenizer loader reads config.json, too, and would fail with its own error."""
    theirs, read = their_class(family), 0
    for seed in seeds:
        values = drawn(np.random.default_rng(seed), family)
        try:
            whole = json.loads(theirs(**json.loads(json.dumps(values))).to_json_string(use_diff=False))
        except Exception:  # of many kinds
            whole = None
        try:
            ours = read_config(values | {"model_type": family}, "")
        except ConfigError:
            continue
        assert whole is not None, values
        if "layer_types" not in values and ours.model.window is None:
            whole.pop("layer_types", None)
        assert read_config(whole | {"model_type": family}, "") == ours, values
        heads = ours.model.heads
        assert whole.get("head_dim") in (None, ours.model.head_dim) and whole["num_attention_heads"] == heads
        read += 1
    assert read > len(seeds) // 5


@pytest.mark.parametrize(("values", "key", "expected"), [
    ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 24}, "window", None),
    ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 24, "max_window_layers": 0}, "window", 4096),
    ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}, "head_dim", 128),
    ({"model_type": "qwen3", "num_attention_heads": 64}, "kv_heads", 32),
    ({"model_type": "llama", "num_attention_heads": 8}, "kv_heads", 8),
    ({"model_type": "llama", "use_sliding_window": True, "sliding_window": 16}, "window", None),  # it has no such field
])  # fmt: skip
def test_defaults_that_differ_between_families(values, key, expected):
    assert getattr(read_config(values, "").model, key) == expected


def test_layers_of_two_kinds_by_default_are_refused():
    with pytest.raises(ConfigError, match="max_window_layers 28 of 36"):
        read_config({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 36}, "")


def test_nash_mhc_config_has_the_fields_and_defaults_of_model_config():
    pytest.importorskip("torch", reason="the exported model is a torch file")
    from nash_mhc.kits.hub.modeling_nash_mhc import NashMhcConfig

    theirs = {name: p.default for name, p in inspect.signature(NashMhcConfig.__init__).parameters.items()}
    ours = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    assert {name: theirs.get(name) for name in ours if name != "rope_scaling"} == {
        name: default for name, default in ours.items() if name != "rope_scaling"
    }
    assert set(theirs) - set(ours) == {
        "self", "kwargs", "rope_multipliers", "rope_amplitude", "rope_scaling_text", "max_position_embeddings", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id",
    }  # fmt: skip
