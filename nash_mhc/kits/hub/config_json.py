"""Convert between config.json and ModelConfig, for Llama, Qwen2, Qwen3 and exported Nash-MHC models."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config.model import RopeScaling
from nash_mhc.config.schema import ConfigError, DataConfig, ModelConfig

CODE = Path(__file__).with_name("modeling_nash_mhc.py")  # copied into every exported Nash-MHC model
_NASH = "nash_mhc"  # model_type
_AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.NashMhcConfig",
    "AutoModel": f"{CODE.stem}.NashMhcModel",
    "AutoModelForCausalLM": f"{CODE.stem}.NashMhcForCausalLM",
}
_SCALING = "rope_scaling_text"  # key of our config.json: the rope scaling that its multipliers and amplitude come from
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Field of ModelConfig -> key of a config.json of Llama or Qwen.
_KEYS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
# Kind of rope scaling -> field of RopeScaling -> key of config.json.
_ROPE_KEYS = {"linear": {"factor": "factor"}}
_ROPE_KEYS["llama3"] = _ROPE_KEYS["linear"] | {
    "original": "original_max_position_embeddings", "low": "low_freq_factor", "high": "high_freq_factor",
}  # fmt: skip
_ROPE_KEYS["yarn"] = _ROPE_KEYS["linear"] | {
    "original": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow", "amplitude": "attention_factor",
    "whole": "truncate",
}  # fmt: skip

# The defaults of transformers' config classes, for keys that a config.json omits.
_SHARED: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_parameters": None, "is_encoder_decoder": False,
}  # fmt: skip
_QWEN = _SHARED | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "eos_token_id": None,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
        "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    _NASH: {},
}  # fmt: skip
# Keys that change neither a weight nor a logit.
IGNORED = {
    "attention_dropout", "initializer_range", "pretraining_tp", "chunk_size_feed_forward", "use_cache", "return_dict",
    "output_hidden_states", "dtype", "transformers_version", "architectures", "id2label", "label2id", "problem_type",
    "bos_token_id", "pad_token_id",
}  # fmt: skip
_MAY_BE_NULL = {"num_key_value_heads", "sliding_window"}


class Imported(NamedTuple):
    """A parsed config.json."""

    family: str
    model: ModelConfig
    positions: int  # sequence length that the model was trained for


def shown(value: Any) -> str:
    """Return a value from a file for an error: printable, on one line, at most 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:70]} ..."


def family_of(cfg: ModelConfig) -> str | None:
    """Return the Hugging Face family with this architecture; None if only Nash-MHC has it."""
    if cfg.scales > 1 or cfg.residual != "plain" or cfg.conv_taps or set(cfg.windows) != {cfg.window}:
        return None
    if cfg.qk_norm and cfg.qkv_bias:
        return None
    if cfg.window is not None and not (cfg.qk_norm or cfg.qkv_bias):
        return None  # Llama has no sliding window
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"


def is_tied(cfg: ModelConfig) -> bool:
    """Return whether the exported model can share one table: Hugging Face models do not scale embeddings on input."""
    return cfg.tied_embeddings and cfg.embed_scale == "table"


def read_config(values: dict[str, Any], where: str) -> Imported:
    """Parse a config.json; raise ConfigError naming the first unsupported setting."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise ConfigError(
            f"{where}: models of type {shown(family)} (model_type) cannot be imported; supported types: {', '.join(DEFAULTS)}"
        )
    try:
        if family == _NASH:
            return _read_nash(values)
        values = DEFAULTS[family] | values
        _check_types(values, DEFAULTS[family])
        _refuse_unsupported(values)
        return Imported(family, _model(values, family), values["max_position_embeddings"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_types(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check that every value has the type of its default."""
    for name, default in defaults.items():
        value = values[name]
        if value is None and (default is None or name in _MAY_BE_NULL):
            continue
        if isinstance(default, bool):
            is_valid, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, float):
            is_valid, expected = isinstance(value, float) and 0 < value < math.inf, "a fraction above 0"
        elif (isinstance(default, int) and name != "eos_token_id") or name in ("num_key_value_heads", "head_dim"):
            low = 0 if name == "max_window_layers" else 1
            is_valid, expected = type(value) is int and value >= low, f"an integer of at least {low}"
        else:
            continue
        if not is_valid:
            raise ConfigError(f"{name} is {shown(value)}; it must be {expected}")


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if values.get("auto_map"):
        raise ConfigError(
            f"auto_map names code in the folder ({shown(values['auto_map'])}), which is never run; if the model is a "
            f"plain {values['model_type']}, remove auto_map from the file"
        )
    unsupported = {
        "quantized weights (quantization_config)": values.get("quantization_config"),
        f"the activation {shown(values['hidden_act'])} (hidden_act)": values["hidden_act"] not in ("silu", "swish"),
        "MLP biases (mlp_bias)": values.get("mlp_bias"),
        # Qwen2 does not have the key: it has biases on queries, keys and values only.
        "an attention output bias (attention_bias)": values["model_type"] != "qwen2" and values.get("attention_bias"),
        "layers with their own settings (per_layer_config)": values.get("per_layer_config"),
        "an encoder (is_encoder_decoder)": values["is_encoder_decoder"],
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ConfigError(f"{name}: not supported, so the model cannot be imported")


def _model(values: dict[str, Any], family: str) -> ModelConfig:
    fields = {field: values.get(key) for field, key in _KEYS.items()}
    heads, width = values["num_attention_heads"], values["hidden_size"]
    if family == "llama" and width % heads:
        raise ConfigError(f"hidden_size {width} is not divisible by num_attention_heads {heads}")
    fields["kv_heads"] = fields["kv_heads"] or heads
    fields["head_dim"] = fields["head_dim"] or width // heads
    theta, scaling = _rope(values)
    return ModelConfig(
        **fields,  # type: ignore[arg-type]
        scales=1,
        conv_taps=0,
        residual="plain",
        window=_window(values, family),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        embed_scale="table",
    )


def _window(values: dict[str, Any], family: str) -> int | None:
    layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    window = values["sliding_window"] if values.get("use_sliding_window") and family != "llama" else None
    if kinds is None:
        full = values.get("max_window_layers", 0)  # the first layers, without a window
        if window is None or full >= layers:
            return None
        if full > 0:
            raise ConfigError(f"max_window_layers {full} of {layers}: only models with one layer type are supported")
        return window
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"layer_types is {shown(kinds)}; it must name the kind of each of {layers} layers")
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ConfigError(f"layer_types {shown(sorted(set(kinds)))}: only models with one layer type are supported")
    if window is None:
        raise ConfigError("layer_types is sliding_attention, but use_sliding_window or sliding_window is not set")
    return window


def _rope(values: dict[str, Any]) -> tuple[float, str | None]:
    """Return theta and the rope scaling, from rope_parameters or the older rope_theta and rope_scaling."""
    section = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(section) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{section} is {shown(rope)}; it must be an object")
    rope = {"rope_theta": values.get("rope_theta", 10_000.0)} | rope
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(f"{section}: per-layer RoPE parameters are not supported")
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1:
        raise ConfigError("partial_rotary_factor: only full rotary embeddings are supported; it must be 1")
    kind = rope.get("rope_type", rope.get("type", "default"))

    def number(name: str, default: float | None = None) -> float:
        value = rope.get(name, default)
        if name not in rope and default is None:
            raise ConfigError(f"{section} of type {kind} has no {name}; add it")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{section}: {name} is {shown(value)}; it must be a number")
        return float(value)

    theta = number("rope_theta")
    if kind == "default":
        return theta, None
    is_known = isinstance(kind, str) and kind in _ROPE_KEYS
    if not is_known or (rope.get("mscale") and rope.get("mscale_all_dim")):
        unsupported = "yarn with mscale" if is_known else shown(kind)
        raise ConfigError(f"{section} of type {unsupported} is not supported; use default, {', '.join(_ROPE_KEYS)}")
    positions, original = values["max_position_embeddings"], "original_max_position_embeddings"
    if values.get(original) is not None:  # takes precedence over the one in the section, as in transformers
        rope[original] = values[original]
    omitted: set[str] = set()
    if kind == "yarn":
        if "factor" not in rope:
            raise ConfigError(
                f"{section} of type yarn has no factor, which transformers requires; add it, for instance "
                f"max_position_embeddings / original = {positions / number(original, positions):g}"
            )
        if rope["factor"] is None:
            rope["factor"] = positions / number(original, positions)
        rope["truncate"] = float(bool(rope.get("truncate", True)))
        omitted = {name for name in ("beta_fast", "beta_slow") if not rope.get(name)}
        omitted |= {"attention_factor"} if rope.get("attention_factor") is None else set()
    fields = {
        field: number(key, positions if field == "original" else None)
        for field, key in _ROPE_KEYS[kind].items()
        if key not in omitted
    }
    return theta, str(RopeScaling(kind, **fields))


def _rope_values(cfg: ModelConfig) -> dict[str, Any]:
    if cfg.rope_scaling is None:
        return {"rope_type": "default"}
    scaling = RopeScaling.parse(cfg.rope_scaling)
    values = {key: getattr(scaling, field) for field, key in _ROPE_KEYS[scaling.kind].items()}
    if (original := values.get("original_max_position_embeddings")) is not None and original.is_integer():
        values["original_max_position_embeddings"] = int(original)
    if "truncate" in values:
        values["truncate"] = bool(values["truncate"])
    return {"rope_type": scaling.kind} | {key: value for key, value in values.items() if value is not None}


def family_config(cfg: ModelConfig, family: str, positions: int) -> dict[str, Any]:
    """Return the config.json of a Llama or Qwen model, for transformers before and after rope_parameters."""
    rope, has_window = _rope_values(cfg), cfg.window is not None
    values: dict[str, Any] = {"architectures": [_CLASSES[family]], "model_type": family}
    values |= {key: getattr(cfg, field) for field, key in _KEYS.items()}
    values |= {
        "tie_word_embeddings": is_tied(cfg),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None if cfg.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": cfg.rope_theta, **rope},
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if family != "qwen2":
        values |= {"attention_bias": False}
    if family == "llama":
        return values | {"mlp_bias": False}
    kind = "sliding_attention" if has_window else "full_attention"
    values |= {"use_sliding_window": has_window, "sliding_window": cfg.window, "layer_types": [kind] * cfg.layers}
    return values | {"max_window_layers": 0 if has_window else cfg.layers}


# Keys that the exported code does not have.
_NOT_EXPORTED = {"mixer": None, "ffn_kind": "swiglu", "pattern": None, "value_embeddings": 0}


def portable(cfg: ModelConfig) -> ModelConfig:
    """Return the same model described by the keys that the exported code has; raise ConfigError if it cannot be."""
    blocks = {(kind.mixer, kind.ffn, cfg.residual) for kind in cfg.group}
    mixer, windows = "attention" if cfg.scales == 1 else "multiscale", cfg.windows
    exported = {(mixer, "swiglu", residual) for residual in ("mhc", "mhc-layer", "plain")}
    if cfg.value_embeddings:
        raise ConfigError("model.value_embeddings: the exported model code does not support them, so it cannot be exported")
    one_full = (*(cfg.window,) * (len(windows) - 1), None)
    if unknown := sorted({name for block in blocks for name in block} - {name for block in exported for name in block}):
        raise ConfigError(
            f"{', '.join(unknown)}: the exported model code does not support this block, so the model cannot be exported"
        )
    if blocks - exported or (set(windows) != {cfg.window} and windows != one_full):
        raise ConfigError(f"model.pattern {cfg.pattern}: the exported model code does not support this layer pattern")
    full_every = len(windows) if windows == one_full and cfg.window is not None else 0
    return dataclasses.replace(cfg, full_every=full_every, **_NOT_EXPORTED)  # type: ignore[arg-type]


def nash_config(cfg: ModelConfig, **extra: Any) -> dict[str, Any]:
    """Return the config.json of a Nash-MHC model, which needs `CODE` in the same folder.

    `extra` holds other fields of `NashMhcConfig`: special tokens, sequence length, dtype.
    """
    values = {name: value for name, value in dataclasses.asdict(portable(cfg)).items() if name not in _NOT_EXPORTED}
    text = values.pop("rope_scaling")  # transformers has another format for this key
    if text is not None:
        scaling = RopeScaling.parse(text)
        multipliers = list(scaling.multipliers(cfg.rope_theta, cfg.head_dim))
        values |= {"rope_multipliers": multipliers, "rope_amplitude": scaling.cos_sin_amplitude, _SCALING: text}
    return {"architectures": ["NashMhcForCausalLM"], "auto_map": _AUTO_MAP, "model_type": _NASH, **values, **extra}


def has_only_our_code(folder: Path, values: dict[str, Any]) -> bool:
    """Return whether a config.json names no code but the packaged file, of which the folder holds an exact copy."""
    copy = folder / CODE.name
    return values.get("auto_map") == _AUTO_MAP and copy.is_file() and copy.read_bytes() == CODE.read_bytes()


def _read_nash(values: dict[str, Any]) -> Imported:
    """Parse the config.json of an exported Nash-MHC model, as we or transformers wrote it. Its code is not run."""
    positions = values.get("max_position_embeddings") or DataConfig().seq_len
    fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "rope_scaling"]
    # transformers saves this key under its own name.
    renamed = {"tied_embeddings": values.get("tie_word_embeddings", True)}
    cfg = ModelConfig(**renamed | {name: values[name] for name in fields if name in values}, rope_scaling=values.get(_SCALING))
    _check_scaling(cfg, values.get("rope_multipliers"), values.get("rope_amplitude", 1.0))
    if type(positions) is not int:
        raise ConfigError(f"max_position_embeddings is {shown(positions)}; it must be an integer")
    if family_of(cfg) is not None:
        raise ConfigError("not a Nash-MHC model written by hub export: the settings describe a plain decoder")
    return Imported(_NASH, cfg, positions)


def _check_scaling(cfg: ModelConfig, multipliers: Any, amplitude: Any) -> None:
    """Check that the file's multipliers and amplitude, which the torch code uses, match its rope scaling."""
    if cfg.rope_scaling is None:
        if (multipliers, amplitude) != (None, 1.0):
            raise ConfigError(f"rope_multipliers without {_SCALING}: written by an older version; export the run again")
        return
    scaling = RopeScaling.parse(cfg.rope_scaling)
    expected = [scaling.cos_sin_amplitude, *scaling.multipliers(cfg.rope_theta, cfg.head_dim)]
    try:
        matches = all(math.isclose(a, b) for a, b in zip([amplitude, *(multipliers or ())], expected, strict=True))
    except (TypeError, ValueError):
        matches = False
    if not matches:
        raise ConfigError(f"rope_multipliers or rope_amplitude do not match {_SCALING} {cfg.rope_scaling!r}")
