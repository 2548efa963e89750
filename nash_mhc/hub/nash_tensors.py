"""Our parameters under the names, and in the layouts, of `modeling_nash_mhc.py`, one tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nash_mhc.config.rope_scaling import RopeScaling
from nash_mhc.config.schema import ConfigError, ModelConfig

CODE = Path(__file__).with_name("modeling_nash_mhc.py")  # goes with the folder

Layout = Callable[[np.ndarray], np.ndarray]

_as_it_is: Layout = lambda x: x
_one_input: Layout = lambda x_DNH: x_DNH.reshape(len(x_DNH), -1).T  # -> [outputs, inputs], as torch has matrices
_one_output: Layout = lambda x_NHD: x_NHD.reshape(-1, x_NHD.shape[-1]).T
_in_a_row: Layout = lambda x_NH: x_NH.reshape(-1)

# Our leaf of a layer, its name there, and how it is laid out there. A model has those that its configuration asks for.
_RESIDUAL: dict[str, tuple[str, Layout]] = {
    "phi_RDM": ("weight", _one_output),  # all streams of a token in one vector
    "bias_M": ("bias", _as_it_is),
    "alpha_3": ("gain", _as_it_is),
}
_ATTENTION: dict[str, tuple[str, Layout]] = {
    "q_DNH": ("q_proj.weight", _one_input),
    "k_DKH": ("k_proj.weight", _one_input),
    "v_DKH": ("v_proj.weight", _one_input),
    "out_NHD": ("o_proj.weight", _one_output),
    "q_bias_NH": ("q_proj.bias", _in_a_row),
    "k_bias_KH": ("k_proj.bias", _in_a_row),
    "v_bias_KH": ("v_proj.bias", _in_a_row),
    "q_norm.scale_D": ("q_norm.weight", _as_it_is),
    "k_norm.scale_D": ("k_norm.weight", _as_it_is),
}
_SCALES = {"pool_k_CJKH": "pool_k", "pool_v_CJKH": "pool_v", "offset_CN": "offset", "tau_N": "tau"}
_FFN = {"gate_DF": "gate_proj.weight", "up_DF": "up_proj.weight", "down_FD": "down_proj.weight"}

_LAYER: dict[str, tuple[str, Layout]] = {
    **{f"attention_residual.{ours}": (f"attention_residual.{name}", layout) for ours, (name, layout) in _RESIDUAL.items()},
    "attention_norm.scale_D": ("attention_norm.weight", _as_it_is),
    "attention_conv.taps_JD": ("attention_conv.taps", _as_it_is),
    **{f"attention.{ours}": (f"attention.{name}", layout) for ours, (name, layout) in _ATTENTION.items()},
    # With several scales, the projections are inside of the module that has the scales.
    **{f"attention.base.{ours}": (f"attention.{name}", layout) for ours, (name, layout) in _ATTENTION.items()},
    **{f"attention.{ours}": (f"attention.{name}", _as_it_is) for ours, name in _SCALES.items()},
    **{f"ffn_residual.{ours}": (f"ffn_residual.{name}", layout) for ours, (name, layout) in _RESIDUAL.items()},
    "ffn_norm.scale_D": ("ffn_norm.weight", _as_it_is),
    **{f"ffn.{ours}": (f"ffn.{name}", _one_output) for ours, name in _FFN.items()},
}
_OUTSIDE = {"embed_VD": "model.embed_tokens.weight", "norm.scale_D": "model.norm.weight", "output_VD": "lm_head.weight"}


def projections() -> dict[str, str]:
    """Our matrices that are linear modules there: parameter -> the module's name, with {i} for the layer's number."""
    return {
        f"layers.{ours}": f"model.layers.{{i}}.{name.removesuffix('.weight')}"
        for ours, (name, _) in _LAYER.items()
        if name.endswith("_proj.weight")
    }


def tensors(named: Mapping[str, Any], cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor of the folder, made when it is asked for. `named`: leaves by `named_leaves`' names.

    Tables lose the rows that only pad the vocabulary; a tied model has one table.
    """
    layer_leaves = [name for name in _LAYER if f"layers.{name}" in named]
    known = {f"layers.{name}" for name in layer_leaves} | set(_OUTSIDE)
    if unknown := sorted(set(named) - known):
        raise ConfigError(f"{', '.join(unknown)} has no place in an exported model; merge adapters into their weights first")
    table = lambda ours: (_OUTSIDE[ours], np.asarray(named[ours][: cfg.vocab_size]))
    yield table("embed_VD")
    for i in range(cfg.layers):
        for ours in layer_leaves:
            name, layout = _LAYER[ours]
            yield f"model.layers.{i}.{name}", np.ascontiguousarray(layout(np.asarray(named[f"layers.{ours}"][i])))
    yield _OUTSIDE["norm.scale_D"], np.asarray(named["norm.scale_D"])
    if not cfg.tied_embeddings:
        yield table("output_VD")


def config_json(cfg: ModelConfig, **more: Any) -> dict[str, Any]:
    """What config.json says, beside which `modeling_nash_mhc.py` has to lie: the model, and whose code reads it.

    `more` are other fields of `NashMhcConfig`: special tokens, the length of rows, the dtype of the tensors.
    """
    file, values = CODE.stem, dataclasses.asdict(cfg)
    scaling = values.pop("rope_scaling")  # under this name transformers expects something else
    if scaling is not None:
        found = RopeScaling.parse(scaling)
        multipliers = found.multipliers(cfg.rope_theta, cfg.head_dim)
        values |= {"rope_multipliers": list(multipliers), "rope_amplitude": found.cos_and_sin}
    return {
        "architectures": ["NashMhcForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{file}.NashMhcConfig",
            "AutoModel": f"{file}.NashMhcModel",
            "AutoModelForCausalLM": f"{file}.NashMhcForCausalLM",
        },
        "model_type": "nash_mhc",
        **values,
        **more,
    }
