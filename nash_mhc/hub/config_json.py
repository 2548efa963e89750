"""config.json of Llama, Qwen2 and Qwen3 models <-> our plain decoder; what we do not have is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from nash_mhc.config.rope_scaling import RopeScaling
from nash_mhc.config.schema import ConfigError, DataConfig, ModelConfig
from nash_mhc.hub import nash_tensors

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE = ("linear", "llama3", "yarn")

# What a config.json means that leaves a key out: the defaults of transformers' classes, field by field.
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
    nash_tensors.TYPE: {},
}  # fmt: skip
# Fields that change neither a weight nor a logit: of training, of the output's form, of other tasks, of other files.
MEANINGLESS = {
    "attention_dropout", "initializer_range", "pretraining_tp", "chunk_size_feed_forward", "use_cache", "return_dict",
    "output_hidden_states", "dtype", "transformers_version", "architectures", "id2label", "label2id", "problem_type",
    "bos_token_id", "pad_token_id",
}  # fmt: skip
_TURNS = {"fast": 32.0, "slow": 1.0}  # yarn's beta_fast and beta_slow
_MAY_BE_NULL = {"num_key_value_heads", "sliding_window"}


class Imported(NamedTuple):
    """What a config.json says."""

    family: str
    model: ModelConfig
    positions: int  # that it was trained for, as it says itself


def family_of(cfg: ModelConfig) -> str | None:
    """Whose architecture this is; None: nobody's but ours."""
    if cfg.scales > 1 or cfg.residual != "plain" or cfg.conv_taps or set(cfg.windows) != {cfg.window}:
        return None
    if cfg.qk_norm and cfg.qkv_bias:
        return None
    if cfg.window is not None and not (cfg.qk_norm or cfg.qkv_bias):
        return None  # Llama has no windows
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"


def read_config(values: dict[str, Any], where: str) -> Imported:
    """ConfigError names the first thing that our decoder does not have."""
    family = values.get("model_type")
    if family == nash_tensors.TYPE:
        return _of_ours(values, where)
    if not isinstance(family, str) or family not in _CLASSES:
        raise ConfigError(
            f"{where}: a model of type {_shown(family)} (model_type) cannot be imported; these can: {', '.join(DEFAULTS)}"
        )
    whole = DEFAULTS[family] | values
    try:
        _check_kinds(whole, DEFAULTS[family])
        _refuse(whole)
        return Imported(family, _model(whole, family), whole["max_position_embeddings"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _of_ours(values: dict[str, Any], where: str) -> Imported:
    """What `hub export` wrote. The code that goes with it is not needed here, and not run."""
    positions = values.get("max_position_embeddings") or DataConfig().seq_len
    try:
        cfg = nash_tensors.read_config(values)
        if family_of(cfg) is not None or type(positions) is not int:
            raise ConfigError(f"is no Nash-MHC model as hub export writes it (max_position_embeddings {_shown(positions)})")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Imported(nash_tensors.TYPE, cfg, positions)


def _check_kinds(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Every value is of its default's kind."""
    for name, default in defaults.items():
        value = values[name]
        if value is None and (default is None or name in _MAY_BE_NULL):
            continue
        if isinstance(default, bool):
            right, kind = isinstance(value, bool), "true or false"
        elif isinstance(default, float):
            right, kind = isinstance(value, float) and 0 < value < math.inf, "a fraction above 0"
        elif (isinstance(default, int) and name != "eos_token_id") or name in ("num_key_value_heads", "head_dim"):
            low = 0 if name == "max_window_layers" else 1
            right, kind = type(value) is int and value >= low, "a whole number" + " above 0" * low
        else:
            continue
        if not right:
            raise ConfigError(f"{name} is {_shown(value)}, and must be {kind}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:70] + " ..."


def _model(values: dict[str, Any], family: str) -> ModelConfig:
    heads, width = values["num_attention_heads"], values["hidden_size"]
    if family == "llama" and width % heads:
        raise ConfigError(f"hidden_size {width} is no multiple of num_attention_heads {heads}, as transformers asks for")
    theta, scaling = _rope(values)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        width=width,
        layers=values["num_hidden_layers"],
        heads=heads,
        kv_heads=values["num_key_value_heads"] or heads,
        head_dim=values.get("head_dim") or width // heads,
        ffn=values["intermediate_size"],
        scales=1,
        conv_taps=0,
        residual="plain",
        window=_window(values, family),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=values["rms_norm_eps"],
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tied_embeddings=values["tie_word_embeddings"],
        embed_scale="table",
    )


def _refuse(values: dict[str, Any]) -> None:
    if values.get("auto_map"):
        raise ConfigError(
            f"auto_map names code of the folder's own ({_shown(values['auto_map'])}), which is never run; if the model is a "
            f"plain {values['model_type']}, take auto_map out of the file"
        )
    wrong = {
        "quantized weights (quantization_config)": values.get("quantization_config"),
        f"the activation {_shown(values['hidden_act'])} (hidden_act)": values["hidden_act"] not in ("silu", "swish"),
        "biases in the feed-forward layer (mlp_bias)": values.get("mlp_bias"),
        # Qwen2's classes do not know the key: their biases are on queries, keys and values alone.
        "a bias on the attention's output (attention_bias)": values["model_type"] != "qwen2" and values.get("attention_bias"),
        "layers that differ (per_layer_config)": values.get("per_layer_config"),
        "an encoder (is_encoder_decoder)": values["is_encoder_decoder"],
    }
    for what, is_there in wrong.items():
        if is_there:
            raise ConfigError(f"{what}, which our decoder does not have; such a model cannot be imported")


def _window(values: dict[str, Any], family: str) -> int | None:
    layers, kinds = values["num_hidden_layers"], values.get("layer_types")
    limit = values["sliding_window"] if values.get("use_sliding_window") and family != "llama" else None
    if kinds is None:
        first = values.get("max_window_layers", 0)  # the layers before it see everything
        if limit is None or first >= layers:
            return None
        if first > 0:
            raise ConfigError(f"layers of several kinds (max_window_layers {first} of {layers}); ours are all of one kind")
        return limit
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"layer_types is {_shown(kinds)}, and must name the kind of each of {layers} layers")
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ConfigError(f"layers of several kinds (layer_types {_shown(sorted(set(kinds)))}); ours are all of one kind")
    if limit is None:
        raise ConfigError("layer_types says sliding_attention, without use_sliding_window and a sliding_window")
    return limit


def _rope(values: dict[str, Any]) -> tuple[float, str | None]:
    """Of all the forms that there were: rope_parameters, or rope_scaling before it, beside rope_theta."""
    named = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    said = values.get(named) or {}
    if not isinstance(said, dict):
        raise ConfigError(f"{named} is {_shown(said)}, and must be settings of rotary positions")
    said = {"rope_theta": values.get("rope_theta", 10_000.0)} | said
    if any(isinstance(value, dict) for value in said.values()):
        raise ConfigError(f"rotary positions that differ between layers ({named}); ours are the same in all of them")
    if said.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1:
        raise ConfigError("a part of each head that does not rotate (partial_rotary_factor); ours rotates whole heads")
    kind = said.get("rope_type", said.get("type", "default"))

    def number(name: str, default: float | None = None) -> float:
        found = said.get(name, default)
        if name not in said and default is None:
            raise ConfigError(f"{named} of the kind {kind} has no {name}, without which it says nothing; add it")
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not math.isfinite(found):
            raise ConfigError(f"{named}: {name} is {_shown(found)}, and must be a number")
        return float(found)

    theta = number("rope_theta")
    if kind == "default":
        return theta, None
    if kind not in _ROPE or (said.get("mscale") and said.get("mscale_all_dim")):
        what = _shown(kind) if kind not in _ROPE else "yarn with mscale"
        raise ConfigError(f"rotary positions of the kind {what} ({named}); ours are default, {', '.join(_ROPE)}")
    if kind == "linear":
        return theta, str(RopeScaling(kind, number("factor")))
    positions = values["max_position_embeddings"]
    if values.get("original_max_position_embeddings") is not None:  # beside them, it goes before the one among them
        said["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    original = number("original_max_position_embeddings", positions)
    if kind == "llama3":
        return theta, str(RopeScaling(kind, number("factor"), original, number("low_freq_factor"), number("high_freq_factor")))
    if "factor" not in said:
        raise ConfigError(
            f"{named} of the kind yarn has no factor, without which transformers does not read it; add how many times "
            f"further its positions reach, such as max_position_embeddings over the original = {positions / original:g}"
        )
    factor = positions / original if said["factor"] is None else number("factor")
    bounds = {side: number(f"beta_{side}", turns) if said.get(f"beta_{side}") else turns for side, turns in _TURNS.items()}
    amplitude = None if said.get("attention_factor") is None else number("attention_factor")
    return theta, str(
        RopeScaling(kind, factor, original, **bounds, amplitude=amplitude, whole=bool(said.get("truncate", True)))
    )


def _rope_values(cfg: ModelConfig) -> dict[str, Any]:
    whole = lambda x: int(x) if float(x).is_integer() else x
    if cfg.rope_scaling is None:
        return {"rope_type": "default"}
    found = RopeScaling.parse(cfg.rope_scaling)
    said: dict[str, Any] = {"rope_type": found.kind, "factor": found.factor}
    if found.kind != "linear":
        said["original_max_position_embeddings"] = whole(found.original)
    if found.kind == "llama3":
        said |= {"low_freq_factor": found.low, "high_freq_factor": found.high}
    if found.kind == "yarn":
        said |= {"beta_fast": found.fast, "beta_slow": found.slow, "truncate": bool(found.whole)}
        said |= {} if found.amplitude is None else {"attention_factor": found.amplitude}
    return said


def written_config(cfg: ModelConfig, family: str, positions: int) -> dict[str, Any]:
    """config.json of such a model, for the libraries of before and after rope_parameters.

    Our own tables enter times sqrt(width), which theirs do not: a tied table then becomes two.
    """
    rope = _rope_values(cfg)
    values: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": is_tied(cfg),
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None if cfg.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": cfg.rope_theta, **rope},
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if family == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    if family == "qwen3":
        values |= {"attention_bias": False}
    if family != "llama":
        values |= {"use_sliding_window": cfg.window is not None, "sliding_window": cfg.window}
        values |= {"max_window_layers": 0 if cfg.window is not None else cfg.layers}
        kind = "full_attention" if cfg.window is None else "sliding_attention"
        values |= {"layer_types": [kind] * cfg.layers}
    return values


def is_tied(cfg: ModelConfig) -> bool:
    """Whether one table can serve both ends in their terms."""
    return cfg.tied_embeddings and cfg.embed_scale == "table"
