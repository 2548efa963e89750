"""Adapters as PEFT writes them (adapter_config.json, adapter_model.safetensors), from ours and into ours."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from nash_mhc.config.schema import ConfigError, LoraConfig, ModelConfig, RunConfig
from nash_mhc.hub import nash_tensors, stored
from nash_mhc.hub.adapter_config import FILE, REMEDY, AdapterConfig, read_adapter_config
from nash_mhc.hub.config_json import family_of
from nash_mhc.hub.importing import contents_beside, write_model
from nash_mhc.hub.load import Loaded, config_of
from nash_mhc.hub.tensors import tensors
from nash_mhc.model.architectures import abstract_model, count_parameters
from nash_mhc.model.lora import adapters_of, alpha_of, factor_of
from nash_mhc.model.weights import PROJECTIONS
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.errors import reason
from nash_mhc.storage.folders import check_is_new, new_folder

WEIGHTS = "adapter_model.safetensors"
DTYPES = "adapter_dtypes"  # of run.json: tensor -> dtype, of those that did not come as float32
_PREFIX = "base_model.model."
_ADAPTED = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?[AB](?:\.weight)?")  # groups: the module
_DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


class _Pair(NamedTuple):
    """The adapter of one matrix, as PEFT has it: it adds scale B A."""

    a_RI: np.ndarray
    b_OR: np.ndarray
    scale: float


def _modules(cfg: ModelConfig) -> dict[str, str]:
    """Matrices that can have an adapter: parameter -> PEFT's name of the module, with {i} for the layer's number."""
    if family_of(cfg) is None:
        has = named_leaves(abstract_model(cfg))
        return {parameter: module for parameter, module in nash_tensors.projections().items() if parameter in has}
    found = [tensor for tensor in tensors(cfg) if "{i}" in tensor.name and tensor.inputs]
    return {tensor.parameter: tensor.name.removesuffix(".weight") for tensor in found}


def _name(module: str, which: str) -> str:
    return f"{_PREFIX}{module}.lora_{which.upper()}.weight"


def export_adapters(loaded: Loaded, out: Path, base: str, dtypes: Mapping[str, str]) -> list[Path]:
    """The files of the new folder. ConfigError.

    `base`: the model that they belong to, for PEFT. `dtypes`: what tensors came in that were not float32.
    """
    from safetensors.numpy import save_file

    cfg, lora = loaded.config.model, loaded.config.lora
    assert isinstance(cfg, ModelConfig)
    modules = _modules(cfg)
    leaves = named_leaves(adapters_of(loaded.model))
    parameters = sorted({name.rpartition(".")[0] for name in leaves})
    if other := [name for name in parameters if name not in modules]:
        raise ConfigError(f"{other[0]} has an adapter that PEFT has no place for; make one model of both with hub merge")
    written: dict[str, np.ndarray] = {}
    named: list[str] = []
    for parameter in parameters:
        a, b = (np.asarray(leaves[f"{parameter}.lora_{which}"], np.float32) for which in "ab")
        for i in range(cfg.layers):
            if not (a[i].any() or b[i].any()):  # imported, and of other layers only
                continue
            module = modules[parameter].format(i=i)
            named.append(module)
            written[_name(module, "a")] = a[i].reshape(-1, lora.rank).T
            written[_name(module, "b")] = b[i].reshape(lora.rank, -1).T
    alpha = alpha_of(lora)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted(_ends(named) if len(named) == len(parameters) * cfg.layers else named),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    with new_folder(out) as part:
        as_they_came = {name: _in_dtype(array, dtypes.get(name)) for name, array in written.items()}
        save_file(as_they_came, part / WEIGHTS, metadata={"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # the library lets nobody else read it
        (part / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(out.iterdir())


def _ends(modules: Iterable[str]) -> set[str]:
    """q_proj of model.layers.0.self_attn.q_proj."""
    return {module.rpartition(".")[2] for module in modules}


def _in_dtype(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """In the dtype that it came in, unless import had to scale or extend it to other values."""
    narrow = np.ascontiguousarray(array if dtype is None else array.astype(dtype))
    return narrow if np.array_equal(narrow.astype(np.float32), array) else np.ascontiguousarray(array)


def import_adapters(folder: Path, base: str, out: Path, say: Callable[[str], None]) -> int:
    """Makes `out`, a folder of ours with adapters on top of `base`; how many parameters they have. ConfigError."""
    check_is_new(out)
    run = config_of(base, "--base")
    if not isinstance(run.model, ModelConfig):
        raise ConfigError(f"--base {base}: a model of the kind {run.model.architecture!r} takes no adapters of PEFT's")
    theirs, tensors = read_adapter_config(folder / FILE), _read(folder / WEIGHTS)
    pairs = _pairs(theirs, tensors, run, folder / WEIGHTS, base)
    say(f"hashing {base} ...")
    record = stored.find("--base", base, None, hashed=True, say=say)
    if theirs.init is not None:
        say(f"reading {base}, whose weights {theirs.init} changed at the start ...")
        weights = named_leaves(stored.read(record, abstract_model(run.model), _on_first_device, say, verified=True))
        for (parameter, i), pair in pairs.items():
            pairs[parameter, i] = _on_unchanged_base(pair, np.asarray(weights[parameter][i], np.float32), theirs.init)
    lora = _lora_config(theirs, pairs)
    config = dataclasses.replace(run, lora=lora)
    shapes = adapters_of(stored.adapted_shape(config))
    leaves = [_stack(name, leaf.shape, pairs, lora) for name, leaf in named_leaves(shapes).items()]
    model = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    with new_folder(out) as part:
        for name, content in contents_beside(Path(base)).items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(content)
        dtypes = {name: array.dtype.name for name, array in tensors.items() if array.dtype != np.float32}
        known = {"imported": folder.name, "parameters": count_parameters(run.model), DTYPES: dtypes}
        write_model(part, model, config.to_dict(), base=record, **known)
    return sum(pair.a_RI.size + pair.b_OR.size for pair in pairs.values())


def _read(file: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    if not file.is_file():
        raise ConfigError(f"{file.parent}: has no {file.name}; save the adapters with safe_serialization")
    try:
        found: dict[str, np.ndarray] = load_file(file)
    except Exception as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{file}: cannot be read ({why})") from None
    for name, array in found.items():
        if array.dtype not in _DTYPES:
            raise ConfigError(f"{file}: {name} is {array.dtype}; save it as float32, float16 or bfloat16")
    return found


def _pairs(
    theirs: AdapterConfig, tensors: Mapping[str, np.ndarray], run: RunConfig, file: Path, base: str
) -> dict[tuple[str, int], _Pair]:
    """(parameter, layer) -> its adapter. ConfigError where file, its configuration and the model disagree."""
    one = dataclasses.replace(run, lora=LoraConfig(rank=1))  # every adapter that there can be, for the sizes
    sizes = {name: leaf.shape for name, leaf in named_leaves(adapters_of(stored.adapted_shape(one))).items()}
    modules, rest = _modules(run.model), dict(tensors)  # type: ignore[arg-type]
    found: dict[tuple[str, int], _Pair] = {}
    for parameter, i in itertools.product(modules, range(run.model.layers)):  # type: ignore[attr-defined]
        module = modules[parameter].format(i=i)
        names, excluded = [_name(module, which) for which in "ab"], theirs.excluded_by(module)
        if not any(name in rest for name in names) and (excluded or theirs.target_modules is None):
            continue
        if excluded:
            raise ConfigError(f"{file}: {module} has an adapter, but {excluded} in {FILE} does not choose it")
        if lost := [name for name in names if name not in rest]:
            raise ConfigError(f"{file}: the tensor {lost[0]} is missing")
        inputs = math.prod(sizes[f"{parameter}.lora_a"][1:-1])
        outputs, rank = math.prod(sizes[f"{parameter}.lora_b"][2:]), theirs.rank_of(module)
        pair = _Pair(rest.pop(names[0]), rest.pop(names[1]), theirs.scale_of(module))
        for name, array, wanted in zip(names, pair[:2], ((rank, inputs), (outputs, rank)), strict=True):
            if array.shape != wanted:
                raise ConfigError(
                    f"{file}: {name} is {list(array.shape)}, but r {rank} in {FILE} and {base} need {list(wanted)}"
                )
        found[parameter, i] = pair
    if rest:
        raise ConfigError(f"{file}: {_left_over(rest, modules.values(), run.model, base)}")
    if not found:
        raise ConfigError(f"{file}: holds no adapters")
    return found


def _left_over(names: Iterable[str], modules: Iterable[str], cfg: Any, base: str) -> str:
    """Why such a tensor cannot be imported."""
    adapted = [match[1] for name in names if (match := _ADAPTED.fullmatch(name))]
    if not adapted:
        return f"{next(iter(names))} is not a tensor of plain LoRA{REMEDY}"
    ends, layer = _ends(modules), re.search(r"\.layers\.(\d+)\.", adapted[0])
    if adapted[0].rpartition(".")[2] not in ends:
        return f"has an adapter on {adapted[0]}; only adapters on {', '.join(sorted(ends))} can be imported{REMEDY}"
    if layer and int(layer[1]) >= cfg.layers:
        return f"has an adapter on {adapted[0]}, but {base} has {cfg.layers} layers; choose the adapters' own base"
    return f"has an adapter on {adapted[0]}, which {base} does not have; choose the adapters' own base"


def _on_first_device(model: Any) -> Any:
    at = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), model)


def _on_unchanged_base(pair: _Pair, weight: np.ndarray, init: str) -> _Pair:
    """The same model on the base that the run began with, from which the initialization subtracted `scale` B0 A0.

    W - scale B0 A0 + scale B A is plain LoRA of twice the rank. PEFT computes B0 and A0 of W at every loading, too.
    """
    rank, inputs = pair.a_RI.shape
    weight_OI = weight.reshape(inputs, -1).T
    if init == "pissa":  # the largest singular values, with the root on each side
        left, values, right = np.linalg.svd(weight_OI, full_matrices=False)
        roots = np.sqrt(values[:rank] / pair.scale).astype(np.float32)
        first_a, first_b = roots[:, None] * right[:rank], left[:, :rank] * roots
    else:  # olora
        left, right = np.linalg.qr(weight_OI)
        first_a, first_b = right[:rank], left[:, :rank]
    return _Pair(np.concatenate([pair.a_RI, first_a]), np.concatenate([pair.b_OR, -first_b], axis=1), pair.scale)


def _lora_config(theirs: AdapterConfig, pairs: Mapping[tuple[str, int], _Pair]) -> LoraConfig:
    """Ours has one rank and one scale: the largest rank, and theirs of modules that no pattern names."""
    named = {parameter.rpartition(".")[2] for parameter, _ in pairs}
    targets = ",".join(name for name, ours in PROJECTIONS.items() if ours in named)
    common = LoraConfig(theirs.rank, theirs.alpha, theirs.dropout, targets, theirs.rslora)
    if theirs.is_uniform:
        return common
    rank = max(len(pair.a_RI) for pair in pairs.values())
    return dataclasses.replace(common, rank=rank, alpha=factor_of(common) * rank, rslora=False)


def _stack(name: str, shape: tuple[int, ...], pairs: Mapping[tuple[str, int], _Pair], lora: LoraConfig) -> jax.Array:
    """`lora_a` or `lora_b` of all layers; zeros where a layer has no adapter, or one of a smaller rank."""
    parameter, _, which = name.rpartition(".lora_")
    stack = np.zeros((shape[0], lora.rank, math.prod(shape) // shape[0] // lora.rank), np.float32)
    for i, pair in ((i, pair) for (other, i), pair in pairs.items() if other == parameter):
        rows = pair.a_RI if which == "a" else pair.b_OR.T.astype(np.float32) * np.float32(pair.scale / factor_of(lora))
        stack[i, : len(rows)] = rows
    return jnp.asarray((stack.swapaxes(1, 2) if which == "a" else stack).reshape(shape))
