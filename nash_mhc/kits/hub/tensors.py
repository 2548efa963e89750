"""Map each tensor of a Hugging Face folder to one of our parameters, for reading and writing.

Their matrices are [outputs, inputs], one tensor per layer. Ours have the inputs first, separate head axes, and all
layers stacked. A device that holds a slice of a parameter reads only that slice of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.kits.hub.config_json import family_of, is_tied, portable
from nash_mhc.model.architectures import abstract_model
from nash_mhc.parallel.params import named_leaves

Slices = tuple[slice, ...]
Reader = Callable[[Slices], np.ndarray]  # reads a slice of a tensor from its file

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# By name in safetensors.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
}  # fmt: skip

# Which axes of a layer's parameter are the inputs of a torch matrix [outputs, inputs].
_FIRST_IS_INPUT, _LAST_IS_OUTPUT, _FLAT, _UNCHANGED = "first is input", "last is output", "flat", "unchanged"
_RESIDUAL = {
    "phi_RDM": ("weight", _LAST_IS_OUTPUT),  # reads all streams of a token as one vector
    "bias_M": ("bias", _UNCHANGED),
    "alpha_3": ("gain", _UNCHANGED),
}
_NORM = {"scale_D": ("weight", _UNCHANGED)}
# Module of a layer -> parameter -> (name in modeling_nash_mhc.py, axes).
# `_PLAIN` has the modules' names in Llama and Qwen.
_LAYER = {
    "attention_residual": _RESIDUAL,
    "attention_norm": _NORM,
    "attention_conv": {"taps_JD": ("taps", _UNCHANGED)},
    "attention": {
        "q_DNH": ("q_proj.weight", _FIRST_IS_INPUT),
        "k_DKH": ("k_proj.weight", _FIRST_IS_INPUT),
        "v_DKH": ("v_proj.weight", _FIRST_IS_INPUT),
        "out_NHD": ("o_proj.weight", _LAST_IS_OUTPUT),
        "q_bias_NH": ("q_proj.bias", _FLAT),
        "k_bias_KH": ("k_proj.bias", _FLAT),
        "v_bias_KH": ("v_proj.bias", _FLAT),
        "q_norm.scale_D": ("q_norm.weight", _UNCHANGED),
        "k_norm.scale_D": ("k_norm.weight", _UNCHANGED),
        "pool_k_CJKH": ("pool_k", _UNCHANGED),
        "pool_v_CJKH": ("pool_v", _UNCHANGED),
        "offset_CN": ("offset", _UNCHANGED),
        "tau_N": ("tau", _UNCHANGED),
    },
    "ffn_residual": _RESIDUAL,
    "ffn_norm": _NORM,
    "ffn": {
        "gate_DF": ("gate_proj.weight", _LAST_IS_OUTPUT),
        "up_DF": ("up_proj.weight", _LAST_IS_OUTPUT),
        "down_FD": ("down_proj.weight", _LAST_IS_OUTPUT),
    },
}
_PLAIN = {
    "attention_norm": "input_layernorm", "attention": "self_attn", "ffn_norm": "post_attention_layernorm", "ffn": "mlp",
}  # fmt: skip


class Tensor(NamedTuple):
    """A tensor of a folder, and the parameter (of one layer) that it holds."""

    name: str  # with {i} for the layer
    parameter: str  # as in parameters.txt
    inputs: tuple[int, ...]  # axes of our parameter
    outputs: tuple[int, ...]
    is_table: bool = False  # one row per token, not transposed; ours may have padding rows at the end
    multiplier: float = 1.0  # theirs / ours
    is_unchanged: bool = False  # has our shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        if self.is_unchanged or self.is_table:
            return (*self.inputs, *self.outputs)
        groups = (self.outputs, self.inputs) if self.inputs else (self.outputs,)
        return tuple(math.prod(group) for group in groups)

    def read(self, reader: Reader, index: Slices, shape: Sequence[int]) -> np.ndarray:
        """Return the slice `index` of our parameter of that shape."""
        index = tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))
        sizes = tuple(part.stop - part.start for part in index)
        if self.is_table:
            rows = min(index[0].stop, self.shape[0])
            table = reader((slice(min(index[0].start, rows), rows), index[1]))
            return np.concatenate([table, np.zeros((sizes[0] - len(table), sizes[1]), table.dtype)])
        if self.is_unchanged:
            return reader(index)
        count = len(self.inputs)
        inputs, outputs = _flat(index[:count], self.inputs), _flat(index[count:], self.outputs)
        if inputs is None or outputs is None:  # not contiguous: slice a view of the whole tensor
            whole = reader((slice(None), slice(None))).T
            return whole.reshape(*self.inputs, *self.outputs)[index]
        return (reader((outputs, inputs)).T if self.inputs else reader((outputs,))).reshape(sizes)

    def write(self, ours: np.ndarray) -> np.ndarray:
        """Return the whole tensor, from our whole parameter."""
        theirs = ours * np.float32(self.multiplier) if self.multiplier != 1 else ours
        if self.is_unchanged:
            return theirs
        if self.is_table:
            return theirs[: self.shape[0]]
        return theirs.reshape(-1, math.prod(self.outputs)).T if self.inputs else theirs.reshape(-1)


def _flat(index: Sequence[slice], sizes: Sequence[int]) -> slice | None:
    """Return the same slice after these axes are flattened; None if any axis but the first is split."""
    inner = math.prod(sizes[1:])
    if any(part != slice(0, size, 1) for part, size in zip(index[1:], sizes[1:], strict=True)):
        return None
    return slice(index[0].start * inner, index[0].stop * inner) if index else slice(0, 1)


def tensors(cfg: ModelConfig) -> list[Tensor]:
    """Return the tensors of a folder with such a model, those of a layer once.

    Raise ConfigError if it cannot be exported.
    """
    cfg = portable(cfg)
    return tensors_of(cfg, is_plain=family_of(cfg) is not None)


def tensors_of(cfg: ModelConfig, *, is_plain: bool) -> list[Tensor]:
    """Return the tensors under the names of Llama and Qwen (`is_plain`), or of `modeling_nash_mhc.py`."""
    table, multiplier = ((cfg.vocab_size,), (cfg.width,), True), cfg.embed_multiplier if is_plain else 1.0
    found = [Tensor(EMBEDDING, "embed_VD", *table, multiplier), Tensor("model.norm.weight", "norm.scale_D", (), (cfg.width,))]
    if not cfg.tied_embeddings:
        found.append(Tensor(OUTPUT, "output_VD", *table))
    elif is_plain and not is_tied(cfg):
        found.append(Tensor(OUTPUT, "embed_VD", *table))
    for parameter, leaf in named_leaves(abstract_model(cfg)).items():
        # With several scales, the projections are in the submodule `base`.
        module, _, rest = parameter.removeprefix("layers.").replace("attention.base.", "attention.").partition(".")
        if parameter.startswith("layers.") and rest in _LAYER.get(module, {}):
            (name, axes), shape = _LAYER[module][rest], leaf.shape[1:]
            count = {_FIRST_IS_INPUT: 1, _LAST_IS_OUTPUT: len(shape) - 1}.get(axes, 0)
            name = f"model.layers.{{i}}.{_PLAIN[module] if is_plain else module}.{name}"
            found.append(Tensor(name, parameter, shape[:count], shape[count:], is_unchanged=axes == _UNCHANGED))
    return found


def projections(cfg: ModelConfig) -> dict[str, str]:
    """Return the matrices that can have an adapter: parameter -> name of the torch module, with {i} for the layer."""
    found = {tensor.parameter: tensor.name.removesuffix(".weight") for tensor in tensors(cfg)}
    return {parameter: module for parameter, module in found.items() if module.endswith("_proj")}


def export_tensors(leaves: Mapping[str, Any], layers: int, known: Sequence[Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of every tensor of the folder, one at a time. `leaves`: our parameters by name."""
    if unknown := sorted(set(leaves) - {tensor.parameter for tensor in known}):
        raise ConfigError(f"{', '.join(unknown)} cannot be exported; merge adapters into their weights first")
    per_layer = [tensor for tensor in known if "{i}" in tensor.name]
    for tensor in known:
        if tensor not in per_layer:
            yield tensor.name, np.ascontiguousarray(tensor.write(np.asarray(leaves[tensor.parameter])))
    for i in range(layers):
        for tensor in per_layer:
            layer = np.asarray(leaves[tensor.parameter][i])
            yield tensor.name.format(i=i), np.ascontiguousarray(tensor.write(layer))


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of such a folder, by name."""
    return {
        tensor.name.format(i=i): tensor.shape
        for tensor in tensors(cfg)
        for i in (range(cfg.layers) if "{i}" in tensor.name else [0])
    }
