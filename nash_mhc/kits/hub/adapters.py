"""Import and export adapters in PEFT's format (adapter_config.json, adapter_model.safetensors)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ConfigError, LoraConfig, ModelConfig, RunConfig
from nash_mhc.kits.hub.adapter_config import FILE, REMEDY, AdapterConfig, read_adapter_config
from nash_mhc.kits.hub.config_json import shown
from nash_mhc.kits.hub.tensors import DTYPES, projections
from nash_mhc.kits.hub.writing import write_run
from nash_mhc.loading.formats import ModelFormat, load_tensors, save_tensors
from nash_mhc.loading.load import Loaded, config_of, stop_tokens
from nash_mhc.loading.weights import find_record, model_shape, on_devices, read_record
from nash_mhc.model.architectures import abstract_model, count_parameters
from nash_mhc.model.lora import adapters_of, alpha_of, base_of, on_base, scaling_of
from nash_mhc.model.weights import PROJECTIONS
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.files import read_json
from nash_mhc.storage.folders import check_is_new, new_folder

log = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
IMPORTED_DTYPES = "adapter_dtypes"  # key of run.json: tensor -> dtype it was imported from, if not float32
_ADAPTED = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?[AB](?:\.weight)?")  # group: the module


class _Pair(NamedTuple):
    """The adapter of one matrix in PEFT's layout: it adds scale B A."""

    a_RI: np.ndarray
    b_OR: np.ndarray
    scale: float


def _tensor_name(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which.upper()}.weight"


def export_adapters(loaded: Loaded, out: Path, base: str, dtypes: Mapping[str, str]) -> list[Path]:
    """Write a folder that PEFT loads and return its files.

    `base`: the model the adapters belong to. `dtypes`: tensor -> dtype it was imported from, if not float32.
    """
    cfg, lora = loaded.config.model, loaded.config.lora
    assert isinstance(cfg, ModelConfig)
    modules = projections(cfg)
    leaves = named_leaves(adapters_of(loaded.model))
    parameters = sorted({name.rpartition(".")[0] for name in leaves})
    if unknown := [name for name in parameters if name not in modules]:
        raise ConfigError(f"the adapter of {unknown[0]} cannot be written for PEFT; merge it into the model with hub merge")
    tensors: dict[str, np.ndarray] = {}
    adapted: list[str] = []
    for parameter in parameters:
        a, b = (np.asarray(leaves[f"{parameter}.lora_{which}"], np.float32) for which in "ab")
        for i in range(cfg.layers):
            if not (a[i].any() or b[i].any()):  # imported adapters may leave out layers
                continue
            module = modules[parameter].format(i=i)
            adapted.append(module)
            tensors[_tensor_name(module, "a")] = a[i].reshape(-1, lora.rank).T
            tensors[_tensor_name(module, "b")] = b[i].reshape(lora.rank, -1).T
    alpha = alpha_of(lora)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted(_ends(adapted) if len(adapted) == len(parameters) * cfg.layers else adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    with new_folder(out) as part:
        cast = {name: _in_dtype(array, dtypes.get(name)) for name, array in tensors.items()}
        save_tensors(cast, part / WEIGHTS, {"format": "pt"})
        (part / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(out.iterdir())


def _ends(modules: Iterable[str]) -> set[str]:
    """Return the last part of each name, such as q_proj of model.layers.0.self_attn.q_proj."""
    return {module.rpartition(".")[2] for module in modules}


def _in_dtype(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """Cast to the dtype it was imported from, unless import changed the values (scale or rank)."""
    narrow = np.ascontiguousarray(array if dtype is None else array.astype(dtype))
    return narrow if np.array_equal(narrow.astype(np.float32), array) else np.ascontiguousarray(array)


class _Converted(NamedTuple):
    config: RunConfig  # the base model's, with our LoRA settings
    adapters: Any  # the model's adapters alone
    base: dict[str, Any]  # the record of its weights
    dtypes: dict[str, str]  # tensor -> dtype it was imported from, if not float32
    parameters: int


def import_adapters(folder: Path, base: str, out: Path) -> int:
    """Convert PEFT adapters to a run directory on top of `base`; return their number of parameters."""
    check_is_new(out)
    found = _convert(folder, base, hashed=True)
    with new_folder(out) as part:
        count = count_parameters(found.config.model)
        metadata = {"imported": folder.name, "parameters": count, IMPORTED_DTYPES: found.dtypes}
        write_run(part, found.adapters, found.config.recorded(), copy_from=Path(base), base=found.base, **metadata)
    return found.parameters


def _convert(folder: Path, base: str, *, hashed: bool) -> _Converted:
    run = config_of(base, "--base")
    if not isinstance(run.model, ModelConfig):
        raise ConfigError(f"--base {base}: PEFT adapters cannot be applied to --model-kind {run.model.architecture}")
    peft, tensors = read_adapter_config(folder / FILE), _read(folder / WEIGHTS)
    pairs = _pairs(peft, tensors, run.model, folder / WEIGHTS, base)
    if hashed:
        log.info(f"hashing {base} ...")
    record = find_record("--base", base, None, hashed=hashed)
    if peft.init is not None:
        log.info(f"reading {base}, whose weights {peft.init} changed at the start ...")
        place = functools.partial(on_devices, mesh=None)
        weights = named_leaves(read_record(record, abstract_model(run.model), place, verified=True))
        for (parameter, i), pair in pairs.items():
            pairs[parameter, i] = _on_unchanged_base(pair, np.asarray(weights[parameter][i], np.float32), peft.init)
    lora = _lora_config(peft, pairs)
    shapes = adapters_of(model_shape(run.model, lora=lora))
    leaves = [_stack(name, leaf.shape, pairs, lora) for name, leaf in named_leaves(shapes).items()]
    adapters = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    dtypes = {name: array.dtype.name for name, array in tensors.items() if array.dtype != np.float32}
    parameters = sum(pair.a_RI.size + pair.b_OR.size for pair in pairs.values())
    return _Converted(dataclasses.replace(run, lora=lora), adapters, record, dtypes, parameters)


def _named_base(folder: Path) -> str:
    """Return the base model that adapter_config.json names; ConfigError if it is not on this machine."""
    name = read_json(folder / FILE).get("base_model_name_or_path")
    if not isinstance(name, str) or not Path(name).is_dir():
        command = module_command("nash_mhc.hub", "import", str(folder), "--base", "BASE", "--out", "RUN")
        raise ConfigError(
            f"{folder}: its base model, {shown(name)}, is not a folder on this machine; give that folder as BASE in {command}"
        )
    return name


def _read_on_base(folder: Path, like: Any) -> Any:
    found = _convert(folder, _named_base(folder), hashed=False)
    put = lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding)
    adapters = jax.tree.map(put, found.adapters, adapters_of(like))
    place = functools.partial(on_devices, mesh=getattr(jax.tree.leaves(like)[0].sharding, "mesh", None))
    return on_base(adapters, read_record(found.base, base_of(like), place, verified=True))


FORMAT = ModelFormat(
    config=lambda folder: _convert(folder, _named_base(folder), hashed=False).config,
    read=_read_on_base,
    stops=lambda folder: stop_tokens(_named_base(folder)),
    instead="convert it to a run with hub import, or merge it with hub merge",
)


def _read(file: Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise ConfigError(f"{file.parent}: has no {file.name}; save the adapters with safe_serialization")
    found = load_tensors(file)
    for name, array in found.items():
        if array.dtype not in DTYPES.values():
            raise ConfigError(f"{file}: {name} is {array.dtype}; save it as float32, float16 or bfloat16")
    return found


def _pairs(
    peft: AdapterConfig, tensors: Mapping[str, np.ndarray], cfg: ModelConfig, file: Path, base: str
) -> dict[tuple[str, int], _Pair]:
    """Return (parameter, layer) -> its adapter.

    Raise ConfigError if tensors, adapter_config.json and model disagree.
    """
    # Rank 1 on every matrix, for the sizes.
    everywhere = model_shape(cfg, lora=LoraConfig(rank=1))
    sizes = {name: leaf.shape for name, leaf in named_leaves(adapters_of(everywhere)).items()}
    modules, rest = projections(cfg), dict(tensors)
    found: dict[tuple[str, int], _Pair] = {}
    for parameter, i in itertools.product(modules, range(cfg.layers)):
        module = modules[parameter].format(i=i)
        names, excluded = [_tensor_name(module, which) for which in "ab"], peft.excluded_by(module)
        if not any(name in rest for name in names) and (excluded or peft.target_modules is None):
            continue
        if excluded:
            raise ConfigError(f"{file}: {module} has an adapter, but {excluded} in {FILE} excludes it")
        if missing := [name for name in names if name not in rest]:
            raise ConfigError(f"{file}: the tensor {missing[0]} is missing")
        inputs = math.prod(sizes[f"{parameter}.lora_a"][1:-1])
        outputs, rank = math.prod(sizes[f"{parameter}.lora_b"][2:]), peft.rank_of(module)
        pair = _Pair(rest.pop(names[0]), rest.pop(names[1]), peft.scale_of(module))
        for name, array, expected in zip(names, pair[:2], ((rank, inputs), (outputs, rank)), strict=True):
            if array.shape != expected:
                raise ConfigError(
                    f"{file}: {name} has shape {list(array.shape)}, but r {rank} in {FILE} and {base} need {list(expected)}"
                )
        found[parameter, i] = pair
    if rest:
        raise ConfigError(f"{file}: {_why_unsupported(rest, modules.values(), cfg.layers, base)}")
    if not found:
        raise ConfigError(f"{file}: contains no adapters")
    return found


def _why_unsupported(names: Iterable[str], modules: Iterable[str], layers: int, base: str) -> str:
    adapted = [match[1] for name in names if (match := _ADAPTED.fullmatch(name))]
    if not adapted:
        return f"{next(iter(names))} is not a tensor of plain LoRA{REMEDY}"
    ends, layer = _ends(modules), re.search(r"\.layers\.(\d+)\.", adapted[0])
    if adapted[0].rpartition(".")[2] not in ends:
        return f"has an adapter on {adapted[0]}; only adapters on {', '.join(sorted(ends))} can be imported{REMEDY}"
    if layer and int(layer[1]) >= layers:
        return f"has an adapter on {adapted[0]}, but {base} has {layers} layers; use the base the adapters were trained on"
    return f"has an adapter on {adapted[0]}, which {base} does not have; use the base the adapters were trained on"


def _on_unchanged_base(pair: _Pair, weight: np.ndarray, init: str) -> _Pair:
    """Return the equivalent adapter for the original base, from which the initialization subtracted scale B0 A0.

    W - scale B0 A0 + scale B A is plain LoRA of twice the rank. PEFT, too, computes B0 and A0 from W when it loads.
    """
    rank, inputs = pair.a_RI.shape
    weight_OI = weight.reshape(inputs, -1).T
    if init == "pissa":  # the largest singular values, with their square roots on both sides
        left, values, right = np.linalg.svd(weight_OI, full_matrices=False)
        roots = np.sqrt(values[:rank] / pair.scale).astype(np.float32)
        first_a, first_b = roots[:, None] * right[:rank], left[:, :rank] * roots
    else:  # olora
        left, right = np.linalg.qr(weight_OI)
        first_a, first_b = right[:rank], left[:, :rank]
    return _Pair(np.concatenate([pair.a_RI, first_a]), np.concatenate([pair.b_OR, -first_b], axis=1), pair.scale)


def _lora_config(peft: AdapterConfig, pairs: Mapping[tuple[str, int], _Pair]) -> LoraConfig:
    """Return our settings, with one rank and scale: the largest rank, and the scale of modules without a pattern."""
    names = {parameter.rpartition(".")[2] for parameter, _ in pairs}
    targets = ",".join(name for name, ours in PROJECTIONS.items() if ours in names)
    common = LoraConfig(peft.rank, peft.alpha, peft.dropout, targets, peft.rslora)
    if peft.is_uniform:
        return common
    rank = max(len(pair.a_RI) for pair in pairs.values())
    return dataclasses.replace(common, rank=rank, alpha=scaling_of(common) * rank, rslora=False)


def _stack(name: str, shape: tuple[int, ...], pairs: Mapping[tuple[str, int], _Pair], lora: LoraConfig) -> jax.Array:
    """Return `lora_a` or `lora_b` of all layers, zero-padded where a layer has no adapter or a smaller rank."""
    parameter, _, which = name.rpartition(".lora_")
    stack = np.zeros((shape[0], lora.rank, math.prod(shape) // shape[0] // lora.rank), np.float32)
    for i, pair in ((i, pair) for (other, i), pair in pairs.items() if other == parameter):
        rows = pair.a_RI if which == "a" else pair.b_OR.T.astype(np.float32) * np.float32(pair.scale / scaling_of(lora))
        stack[i, : len(rows)] = rows
    return jnp.asarray((stack.swapaxes(1, 2) if which == "a" else stack).reshape(shape))
