"""config.json of Llama, Qwen2 and Qwen3 models <-> our plain decoder; what we do not have is refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from nash_mhc.config.rope_scaling import RopeScaling
from nash_mhc.config.schema import ConfigError, ModelConfig

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ROPE = {"linear": {}, "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"}, "yarn": {}}


class Imported(NamedTuple):
    """What a config.json says."""

    family: str
    model: ModelConfig
    positions: int  # that it was trained for, as it says itself


def family_of(cfg: ModelConfig) -> str | None:
    """Whose architecture this is; None: nobody's but ours."""
    if cfg.scales > 1 or cfg.residual != "plain" or cfg.conv_taps or cfg.full_every:
        return None
    if cfg.qk_norm and cfg.qkv_bias:
        return None
    if cfg.window is not None and not (cfg.qk_norm or cfg.qkv_bias):
        return None  # Llama has no windows
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "llama"


def read_config(values: dict[str, Any], where: str) -> Imported:
    """ConfigError names the first thing that our decoder does not have."""
    family = values.get("model_type")
    if family not in _CLASSES:
        raise ConfigError(f"{where}: a model of type {family!r}; what can be imported are {', '.join(_CLASSES)}")
    if missing := [name for name in _NEEDED if not isinstance(values.get(name), int)]:
        raise ConfigError(f"{where}: says nothing about {missing[0]}")
    _refuse(values, family, where)
    try:
        return Imported(family, _model(values, family, where), int(values.get("max_position_embeddings", 2048)))
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a setting is missing or makes no sense ({type(error).__name__}: {error})") from None


def _model(values: dict[str, Any], family: str, where: str) -> ModelConfig:
    heads, width = values["num_attention_heads"], values["hidden_size"]
    theta, scaling = _rope(values, where)
    return ModelConfig(
        vocab_size=values["vocab_size"],
        width=width,
        layers=values["num_hidden_layers"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or width // heads,
        ffn=values["intermediate_size"],
        scales=1,
        conv_taps=0,
        residual="plain",
        window=_window(values, where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        embed_scale="table",
    )


def _refuse(values: dict[str, Any], family: str, where: str) -> None:
    wrong = {
        "quantized weights (quantization_config)": values.get("quantization_config"),
        f"the activation {values.get('hidden_act')!r}": values.get("hidden_act", "silu") not in ("silu", "swish"),
        "biases in the feed-forward layer (mlp_bias)": values.get("mlp_bias"),
        # In Qwen2's files they are not mentioned, and always there: on queries, keys and values alone.
        "a bias on the attention's output (attention_bias)": family != "qwen2" and values.get("attention_bias"),
    }
    for what, is_there in wrong.items():
        if is_there:
            raise ConfigError(f"{where}: {what}, which our decoder does not have; such a model cannot be imported")


def _window(values: dict[str, Any], where: str) -> int | None:
    kinds = set(values.get("layer_types") or ())
    sliding = "sliding_attention" in kinds if kinds else bool(values.get("use_sliding_window"))
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise ConfigError(f"{where}: layers of several kinds ({', '.join(sorted(kinds))}); ours are all of one kind")
    if not kinds and sliding and values.get("max_window_layers", 0) > 0:
        # Its first layers see everything. (Newer files spell that out in layer_types.)
        if values["max_window_layers"] >= values["num_hidden_layers"]:
            return None
        raise ConfigError(f"{where}: layers of several kinds (max_window_layers); ours are all of one kind")
    return values.get("sliding_window") if sliding else None


def _rope(values: dict[str, Any], where: str) -> tuple[float, str | None]:
    """Of all the forms that there were: rope_parameters, or rope_theta beside rope_scaling."""
    said = values.get("rope_parameters") or {}
    said = {"rope_theta": values.get("rope_theta", 10_000.0)} | (values.get("rope_scaling") or {}) | said
    if any(isinstance(value, dict) for value in said.values()):
        raise ConfigError(f"{where}: rotary positions that differ between layers; ours are the same in all of them")
    kind = said.get("rope_type", said.get("type", "default"))
    if said.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1:
        raise ConfigError(
            f"{where}: a part of each head that does not rotate (partial_rotary_factor); ours rotates whole heads"
        )
    theta = float(said["rope_theta"])
    if kind == "default":
        return theta, None
    if kind not in _ROPE or (said.get("mscale") and said.get("mscale_all_dim")):
        what = kind if kind not in _ROPE else "yarn with mscale"
        raise ConfigError(f"{where}: rotary positions of the kind {what!r}; ours are default, {', '.join(_ROPE)}")
    positions = values.get("max_position_embeddings", 2048)
    original = float(said.get("original_max_position_embeddings") or positions)
    factor = float(said.get("factor") or positions / original)
    if kind == "yarn":
        bounds = {"fast": float(said.get("beta_fast") or 32), "slow": float(said.get("beta_slow") or 1)}
        sharper = said.get("attention_factor")
        amplitude = None if sharper is None else float(sharper)
        found = RopeScaling(kind, factor, original, **bounds, amplitude=amplitude, whole=float(said.get("truncate", True)))
    elif kind == "llama3":
        found = RopeScaling(kind, factor, original, float(said["low_freq_factor"]), float(said["high_freq_factor"]))
    else:
        found = RopeScaling(kind, factor)
    return theta, str(found)


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
