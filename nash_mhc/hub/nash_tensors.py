"""Our parameters under the names, and in the layouts, of `modeling_nash_mhc.py`, and its config.json."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from nash_mhc.config.rope_scaling import RopeScaling
from nash_mhc.config.schema import ConfigError, ModelConfig

CODE = Path(__file__).with_name("modeling_nash_mhc.py")  # goes with the folder
TYPE = "nash_mhc"
_AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.NashMhcConfig",
    "AutoModel": f"{CODE.stem}.NashMhcModel",
    "AutoModelForCausalLM": f"{CODE.stem}.NashMhcForCausalLM",
}

_SCALING = "rope_scaling_text"  # of config.json: what its multipliers and its amplitude were made from

# A layout: how many of the axes of one layer's parameter are inputs of a matrix, which torch has as [outputs, inputs].
_ONE_INPUT, _ONE_OUTPUT, _IN_A_ROW, _AS_IT_IS = "one input", "one output", "in a row", "as it is"
Layout = str

# Our leaf of a layer, its name there, and how it is laid out there. A model has those that its configuration asks for.
_RESIDUAL: dict[str, tuple[str, Layout]] = {
    "phi_RDM": ("weight", _ONE_OUTPUT),  # all streams of a token in one vector
    "bias_M": ("bias", _AS_IT_IS),
    "alpha_3": ("gain", _AS_IT_IS),
}
_ATTENTION: dict[str, tuple[str, Layout]] = {
    "q_DNH": ("q_proj.weight", _ONE_INPUT),
    "k_DKH": ("k_proj.weight", _ONE_INPUT),
    "v_DKH": ("v_proj.weight", _ONE_INPUT),
    "out_NHD": ("o_proj.weight", _ONE_OUTPUT),
    "q_bias_NH": ("q_proj.bias", _IN_A_ROW),
    "k_bias_KH": ("k_proj.bias", _IN_A_ROW),
    "v_bias_KH": ("v_proj.bias", _IN_A_ROW),
    "q_norm.scale_D": ("q_norm.weight", _AS_IT_IS),
    "k_norm.scale_D": ("k_norm.weight", _AS_IT_IS),
}
_SCALES = {"pool_k_CJKH": "pool_k", "pool_v_CJKH": "pool_v", "offset_CN": "offset", "tau_N": "tau"}
_FFN = {"gate_DF": "gate_proj.weight", "up_DF": "up_proj.weight", "down_FD": "down_proj.weight"}

_LAYER: dict[str, tuple[str, Layout]] = {
    **{f"attention_residual.{ours}": (f"attention_residual.{name}", layout) for ours, (name, layout) in _RESIDUAL.items()},
    "attention_norm.scale_D": ("attention_norm.weight", _AS_IT_IS),
    "attention_conv.taps_JD": ("attention_conv.taps", _AS_IT_IS),
    **{f"attention.{ours}": (f"attention.{name}", layout) for ours, (name, layout) in _ATTENTION.items()},
    # With several scales, the projections are inside of the module that has the scales.
    **{f"attention.base.{ours}": (f"attention.{name}", layout) for ours, (name, layout) in _ATTENTION.items()},
    **{f"attention.{ours}": (f"attention.{name}", _AS_IT_IS) for ours, name in _SCALES.items()},
    **{f"ffn_residual.{ours}": (f"ffn_residual.{name}", layout) for ours, (name, layout) in _RESIDUAL.items()},
    "ffn_norm.scale_D": ("ffn_norm.weight", _AS_IT_IS),
    **{f"ffn.{ours}": (f"ffn.{name}", _ONE_OUTPUT) for ours, name in _FFN.items()},
}


def projections() -> dict[str, str]:
    """Our matrices that are linear modules there: parameter -> the module's name, with {i} for the layer's number."""
    return {
        f"layers.{ours}": f"model.layers.{{i}}.{name.removesuffix('.weight')}"
        for ours, (name, _) in _LAYER.items()
        if name.endswith("_proj.weight")
    }


def place_of(parameter: str, rank: int) -> tuple[str, int, bool] | None:
    """Where a layer's parameter, with so many axes, is in a folder: (name, with {i} for the layer's number; how many of
    its axes are inputs; whether they stay apart). None: nowhere."""
    if (found := _LAYER.get(parameter.removeprefix("layers."))) is None:
        return None
    name, layout = found
    inputs = {_ONE_INPUT: 1, _ONE_OUTPUT: rank - 1}.get(layout, 0)
    return f"model.layers.{{i}}.{name}", inputs, layout == _AS_IT_IS


_NOT_EXPORTED = {"mixer": None, "ffn_kind": "swiglu", "pattern": None}  # keys that the exported code does not have


def portable(cfg: ModelConfig) -> ModelConfig:
    """Return the same model described by the keys that the exported code has; ConfigError if it cannot be."""
    blocks = {(kind.mixer, kind.ffn, cfg.residual) for kind in cfg.group}
    mixer, windows = "attention" if cfg.scales == 1 else "multiscale", cfg.windows
    ours = {(mixer, "swiglu", residual) for residual in ("mhc", "mhc-layer", "plain")}
    one_full = (*(cfg.window,) * (len(windows) - 1), None)
    if strange := sorted({name for block in blocks - ours for name in block} - {name for block in ours for name in block}):
        raise ConfigError(f"{', '.join(strange)}: the exported model code has no such block, so this model cannot be exported")
    if blocks - ours or (set(windows) != {cfg.window} and windows != one_full):
        raise ConfigError(f"model.pattern {cfg.pattern}: the exported model code has no such pattern of layers")
    full_every = len(windows) if windows == one_full and cfg.window is not None else 0
    return dataclasses.replace(cfg, full_every=full_every, **_NOT_EXPORTED)  # type: ignore[arg-type]


def config_json(cfg: ModelConfig, **more: Any) -> dict[str, Any]:
    """What config.json says, beside which `modeling_nash_mhc.py` has to lie: the model, and whose code reads it.

    `more` are other fields of `NashMhcConfig`: special tokens, the length of rows, the dtype of the tensors.
    """
    values = {name: value for name, value in dataclasses.asdict(portable(cfg)).items() if name not in _NOT_EXPORTED}
    scaling = values.pop("rope_scaling")  # under this name transformers expects something else
    if scaling is not None:
        found = RopeScaling.parse(scaling)
        multipliers = found.multipliers(cfg.rope_theta, cfg.head_dim)
        values |= {"rope_multipliers": list(multipliers), "rope_amplitude": found.cos_and_sin, _SCALING: scaling}
    return {
        "architectures": ["NashMhcForCausalLM"],
        "auto_map": _AUTO_MAP,
        "model_type": TYPE,
        **values,
        **more,
    }


def has_only_our_code(folder: Path, values: dict[str, Any]) -> bool:
    """Return whether a config.json names no code but the packaged file, of which the folder holds an exact copy."""
    copy = folder / CODE.name
    return values.get("auto_map") == _AUTO_MAP and copy.is_file() and copy.read_bytes() == CODE.read_bytes()


def read_config(values: dict[str, Any]) -> ModelConfig:
    """The model of such a config.json, whether we or transformers wrote it; ConfigError."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "rope_scaling"]
    # transformers has names of its own for some; where it has saved the model again, the file may have those.
    theirs = {"tied_embeddings": values.get("tie_word_embeddings", True)}
    cfg = ModelConfig(**theirs | {name: values[name] for name in names if name in values}, rope_scaling=values.get(_SCALING))
    multipliers, amplitude = values.get("rope_multipliers"), values.get("rope_amplitude", 1.0)
    if cfg.rope_scaling is None:
        if (multipliers, amplitude) != (None, 1.0):
            raise ConfigError(f"rope_multipliers without {_SCALING}: an older version wrote it; export the run once more")
        return cfg
    scaling = RopeScaling.parse(cfg.rope_scaling)
    made = [scaling.cos_and_sin, *scaling.multipliers(cfg.rope_theta, cfg.head_dim)]
    try:
        said = [amplitude, *(multipliers or ())]
        same = all(math.isclose(a, b) for a, b in zip(said, made, strict=True))
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ConfigError(f"rope_multipliers or rope_amplitude are not those of {_SCALING} {cfg.rope_scaling!r}")
    return cfg
