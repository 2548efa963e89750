"""Which tensor of a Hugging Face folder is which parameter of ours, and how the one is cut out of the other.

Their matrices are [outputs, inputs], one tensor a layer; ours have the inputs first, heads apart, all layers in one
array. A device that holds a part of a parameter reads no more than that part of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.hub import nash_tensors
from nash_mhc.hub.config_json import family_of, is_tied
from nash_mhc.model.architectures import abstract_model
from nash_mhc.parallel.params import named_leaves

Slices = tuple[slice, ...]
Reader = Callable[[Slices], np.ndarray]  # a part of a tensor, as it stands in the file


class Tensor(NamedTuple):
    """A tensor, and the parameter (of one layer) that it is."""

    name: str  # with {i} in place of the layer's number
    parameter: str  # as in parameters.txt
    inputs: tuple[int, ...]  # ours
    outputs: tuple[int, ...]
    is_table: bool = False  # a row a token: not turned round, and of ours the last rows may be padding
    times: float = 1.0  # ours times this is theirs
    is_apart: bool = False  # its axes are not made one, but stay as they are

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        if self.is_apart:
            return self.outputs
        sizes = (self.outputs, self.inputs) if self.inputs and not self.is_table else (self.inputs + self.outputs,)
        return (*self.inputs, *self.outputs) if self.is_table else tuple(math.prod(group) for group in sizes)

    def read(self, reader: Reader, index: Slices, shape: Sequence[int]) -> np.ndarray:
        """The part `index` of our parameter, which has this shape."""
        parts = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        wanted = tuple(part.stop - part.start for part in parts)
        if self.is_table:
            rows = min(parts[0].stop, self.shape[0])
            found = reader((slice(min(parts[0].start, rows), rows), parts[1]))
            return np.concatenate([found, np.zeros((wanted[0] - len(found), wanted[1]), found.dtype)])
        if self.is_apart:
            return reader(tuple(parts))
        count = len(self.inputs)
        inputs, outputs = _flat(parts[:count], self.inputs), _flat(parts[count:], self.outputs)
        if inputs is None or outputs is None:  # not in one piece: that part of a view of the whole
            whole = reader((slice(None), slice(None))).T
            return whole.reshape(*self.inputs, *self.outputs)[tuple(parts)]
        found = reader((outputs, inputs)).T if self.inputs else reader((outputs,))
        return found.reshape(wanted)

    def write(self, ours: np.ndarray) -> np.ndarray:
        """The whole tensor, from our whole parameter."""
        theirs = ours * np.float32(self.times) if self.times != 1 else ours
        if self.is_apart:
            return theirs
        if self.is_table:
            return theirs[: self.shape[0]]
        flat = theirs.reshape(*([math.prod(self.inputs)] if self.inputs else []), math.prod(self.outputs))
        return flat.T if self.inputs else flat


def _flat(parts: Sequence[slice], sizes: Sequence[int]) -> slice | None:
    """The same part of these axes made one, where only the first of them is split; None: another is."""
    inner = math.prod(sizes[1:])
    if any(part != slice(0, size, 1) for part, size in zip(parts[1:], sizes[1:], strict=True)):
        return None
    return slice(parts[0].start * inner, parts[0].stop * inner) if parts else slice(0, 1)


def tensors(cfg: ModelConfig) -> list[Tensor]:
    """Return the tensors of a folder with such a model, those of a layer once. ConfigError if it cannot be exported."""
    cfg = nash_tensors.portable(cfg)
    return of_nash(cfg) if family_of(cfg) is None else _of_plain(cfg)


def of_nash(cfg: ModelConfig) -> list[Tensor]:
    """As `modeling_nash_mhc.py` names them, whatever the model."""
    table = lambda name, parameter: Tensor(name, parameter, (cfg.vocab_size,), (cfg.width,), is_table=True)
    found = [table("model.embed_tokens.weight", "embed_VD"), Tensor("model.norm.weight", "norm.scale_D", (), (cfg.width,))]
    found += [] if cfg.tied_embeddings else [table("lm_head.weight", "output_VD")]
    for parameter, leaf in named_leaves(abstract_model(cfg)).items():
        shape = leaf.shape[1:]
        if parameter.startswith("layers.") and (place := nash_tensors.place_of(parameter, len(shape))) is not None:
            name, inputs, is_apart = place
            found.append(Tensor(name, parameter, shape[:inputs], shape[inputs:], is_apart=is_apart))
    return found


def _of_plain(cfg: ModelConfig) -> list[Tensor]:
    D, N, K, H, F, V = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.ffn, cfg.vocab_size
    layer, attention = "model.layers.{i}.", "model.layers.{i}.self_attn."
    ours = "layers.attention."
    found = [
        Tensor("model.embed_tokens.weight", "embed_VD", (V,), (D,), is_table=True, times=cfg.embed_multiplier),
        Tensor(attention + "q_proj.weight", ours + "q_DNH", (D,), (N, H)),
        Tensor(attention + "k_proj.weight", ours + "k_DKH", (D,), (K, H)),
        Tensor(attention + "v_proj.weight", ours + "v_DKH", (D,), (K, H)),
        Tensor(attention + "o_proj.weight", ours + "out_NHD", (N, H), (D,)),
        Tensor(layer + "input_layernorm.weight", "layers.attention_norm.scale_D", (), (D,)),
        Tensor(layer + "post_attention_layernorm.weight", "layers.ffn_norm.scale_D", (), (D,)),
        Tensor(layer + "mlp.gate_proj.weight", "layers.ffn.gate_DF", (D,), (F,)),
        Tensor(layer + "mlp.up_proj.weight", "layers.ffn.up_DF", (D,), (F,)),
        Tensor(layer + "mlp.down_proj.weight", "layers.ffn.down_FD", (F,), (D,)),
        Tensor("model.norm.weight", "norm.scale_D", (), (D,)),
    ]
    if cfg.qkv_bias:
        found += [
            Tensor(attention + "q_proj.bias", ours + "q_bias_NH", (), (N, H)),
            Tensor(attention + "k_proj.bias", ours + "k_bias_KH", (), (K, H)),
            Tensor(attention + "v_proj.bias", ours + "v_bias_KH", (), (K, H)),
        ]
    if cfg.qk_norm:
        found += [
            Tensor(attention + "q_norm.weight", ours + "q_norm.scale_D", (), (H,)),
            Tensor(attention + "k_norm.weight", ours + "k_norm.scale_D", (), (H,)),
        ]
    if not is_tied(cfg):
        source = "embed_VD" if cfg.tied_embeddings else "output_VD"  # our one table becomes two of theirs
        found.append(Tensor("lm_head.weight", source, (V,), (D,), is_table=True))
    return found


def written(leaves: Mapping[str, Any], layers: int, known: Sequence[Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor of the folder, made when it is asked for. `leaves`: by `named_leaves`' names."""
    if strange := sorted(set(leaves) - {tensor.parameter for tensor in known}):
        raise ConfigError(f"{', '.join(strange)} has no place in an exported model; merge adapters into their weights first")
    of_layers = [tensor for tensor in known if "{i}" in tensor.name]
    for tensor in known:
        if "{i}" not in tensor.name:
            yield tensor.name, np.ascontiguousarray(tensor.write(np.asarray(leaves[tensor.parameter])))
    for i in range(layers):
        for tensor in of_layers:
            layer = np.asarray(leaves[tensor.parameter][i])
            yield tensor.name.format(i=i), np.ascontiguousarray(tensor.write(layer))


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a folder, by name."""
    return {
        tensor.name.format(i=i): tensor.shape
        for tensor in tensors(cfg)
        for i in (range(cfg.layers) if "{i}" in tensor.name else [0])
    }
