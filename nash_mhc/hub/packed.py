"""A model with weights of few bits as a folder that holds no more than those bits.

`packed.safetensors`: of every quantized weight NAME its codes, NAME.codes, u8 [layers, outputs, ceil(inputs x bits /
8)], the lowest bits first, and its scales in float16, NAME.scale or NAME.scale_a and NAME.scale_b, with NAME.levels
where its table was trained; every other array, of adapters too, under its own name. `packed.json`: the configuration,
and the bits of each weight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.schema import ConfigError, QuantizeConfig, RunConfig
from nash_mhc.data.tokenizer import HuggingFaceTokenizer
from nash_mhc.hub.narrowed import narrowed
from nash_mhc.model.quantized import Exported, Quantized, is_quantized
from nash_mhc.ops import quantize as ops
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.folders import new_folder
from nash_mhc.storage.json_files import MALFORMED, check_types, read_json, reading

ABOUT, WEIGHTS = "packed.json", "packed.safetensors"
_VERSION = 1


class Size(NamedTuple):
    name: str
    numbers: int
    bytes: int


def is_packed(folder: str) -> bool:
    return (Path(folder).expanduser() / ABOUT).is_file()


def write_packed(loaded: Any, out: Path, dtype: str = "float32") -> list[Size]:
    """Of a `Loaded` whose model has quantized weights. The folder appears when it is whole, or not at all."""
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    weights: dict[str, dict[str, Any]] = {}
    counted: dict[str, list[int]] = {}

    def hold(kind: str, numbers: int, **arrays: np.ndarray) -> None:
        tensors.update({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        before = counted.setdefault(kind, [0, 0])
        before[0] += numbers
        before[1] += sum(array.nbytes for array in arrays.values())

    for path, leaf in jax.tree_util.tree_flatten_with_path(loaded.model, is_leaf=is_quantized)[0]:
        name = jax.tree_util.keystr(path).lstrip(".")
        if not is_quantized(leaf):
            array = np.asarray(leaf)
            if array.ndim > 1 and dtype != "float32":
                array = narrowed(name, array, dtype, "float32")
            is_adapter = name.rpartition(".")[2] in ("lora_a", "lora_b")
            hold("adapters" if is_adapter else "others", array.size, **{name: array})
            continue
        found = jax.device_get(jax.jit(Quantized.exported)(leaf))
        weights[name] = {"bits": leaf.bits, "inputs": leaf.inputs}
        held = {f"{name}.codes": _packed(found.codes, leaf)}
        held |= {f"{name}.{part}": a for part in ("scale", "scale_a", "scale_b") if (a := getattr(found, part)) is not None}
        if leaf.steps_K is not None:
            held[f"{name}.levels"] = found.levels_L
        hold(f"{leaf.bits} bits", leaf.base.size, **held)
    config = dataclasses.replace(loaded.config, train=dataclasses.replace(loaded.config.train, init_from=None))
    values = config.to_dict()
    with new_folder(out) as part:
        if isinstance(loaded.tokenizer, HuggingFaceTokenizer):
            loaded.tokenizer.save(part)
            values["data"]["tokenizer"] = "."
        save_file(tensors, part / WEIGHTS)
        (part / WEIGHTS).chmod(0o644)
        about = {"version": _VERSION, "weights": weights, "config": values}
        (part / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [Size(kind, *counted[kind]) for kind in sorted(counted)]


def _packed(codes: np.ndarray, weight: Quantized) -> np.ndarray:
    """[layers, outputs, bytes], or without layers."""
    first = 1 if weight.is_stack else 0
    outputs = math.prod(codes.shape[first + weight.inputs :])
    rows = codes.reshape(*codes.shape[:first], -1, outputs).swapaxes(-1, -2)
    held = ops.packed(rows.reshape(-1, rows.shape[-1]), weight.bits)
    return held.reshape(*rows.shape[:-1], -1)


def _about(folder: Path) -> dict[str, Any]:
    about = read_json(folder / ABOUT, "pack it again")
    with reading(folder / ABOUT, "pack it again"):
        if about["version"] != _VERSION:
            raise ConfigError(f"{folder / ABOUT}: form {about['version']}, this version reads {_VERSION}; pack it again")
        check_types(about, weights=dict, config=dict)
        for weight in about["weights"].values():
            check_types(weight, bits=int, inputs=int)
    return about


def read_packed_config(folder: Path) -> RunConfig:
    """With its tokenizer where it lies now, and nothing of what was done to its weights: they are arrays again."""
    about = _about(folder)
    with reading(folder / ABOUT, "pack it again"):
        cfg = RunConfig.from_dict(about["config"])
    name = str(folder) if cfg.data.tokenizer == "." else cfg.data.tokenizer
    data = dataclasses.replace(cfg.data, tokenizer=name)
    return dataclasses.replace(cfg, data=data, quantize=QuantizeConfig())


def read_packed(folder: Path, like: Any) -> Any:
    """The model with the arrays that were computed with in training, in the places of `like`. ConfigError."""
    from safetensors.numpy import load_file

    weights = _about(folder)["weights"]
    try:
        tensors = load_file(folder / WEIGHTS)
    except Exception as error:  # the library has errors of its own
        raise ConfigError(f"{folder / WEIGHTS}: cannot be read ({error}); pack it again") from None
    leaves = []
    for name, place in named_leaves(like).items():
        try:
            about = weights.get(name)
            array = tensors[name].astype(np.float32) if about is None else _array(name, about, tensors, place.shape)
            leaves.append(jax.device_put(np.asarray(array).reshape(place.shape).astype(place.dtype), place.sharding))
        except MALFORMED as error:
            raise ConfigError(f"{folder / WEIGHTS}: does not hold {name} as {ABOUT} says ({error}); pack it again") from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _array(name: str, about: dict[str, Any], tensors: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    bits, inputs = about["bits"], about["inputs"]
    held = tensors[f"{name}.codes"]
    stack = shape[: held.ndim - 2]
    of_layer = shape[len(stack) :]
    count = math.prod(of_layer[:inputs])
    rows = ops.unpacked(held.reshape(-1, held.shape[-1]), bits, count)
    codes = rows.reshape(*stack, -1, count).swapaxes(-1, -2).reshape(shape)
    levels = tensors.get(f"{name}.levels", np.broadcast_to(ops.uniform_levels(bits), (*stack, 2**bits)))
    held_scales = (tensors.get(f"{name}.{part}") for part in ("scale", "scale_a", "scale_b"))
    scales = (None if a is None else jnp.asarray(a) for a in held_scales)
    found = Exported(jnp.asarray(np.ascontiguousarray(codes)), jnp.asarray(levels), *scales)
    one = functools.partial(Exported.array, inputs=inputs)
    return np.asarray(jax.jit(jax.vmap(one) if stack else one)(found))
