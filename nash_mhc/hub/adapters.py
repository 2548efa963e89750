"""Adapters as PEFT writes them (adapter_config.json, adapter_model.safetensors), from ours and into ours."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.config.schema import ConfigError, LoraConfig, ModelConfig
from nash_mhc.hub import nash_tensors, stored
from nash_mhc.hub.config_json import family_of
from nash_mhc.hub.importing import texts_beside, write_model
from nash_mhc.hub.load import Loaded, config_of
from nash_mhc.hub.tensors import tensors
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.lora import adapters_of, alpha_of
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.errors import reason
from nash_mhc.storage.new_folder import check_free, new_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT can do beside plain LoRA, and ours does not: settings that must have one of these values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "fan_in_fan_out": (False, None), "modules_to_save": (None, []),
    "use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "layers_to_transform": (None,),
    "lora_bias": (False, None), "use_qalora": (False, None), "layer_replication": (None,), "target_parameters": (None, []),
    "trainable_token_indices": (None,), "alora_invocation_tokens": (None,),
}  # fmt: skip


def _modules(cfg: ModelConfig) -> dict[str, str]:
    """Our matrices that PEFT can correct: parameter -> the name of the module, with {i} for the layer's number."""
    if family_of(cfg) is None:
        return nash_tensors.projections()
    found = [tensor for tensor in tensors(cfg) if "{i}" in tensor.name and tensor.inputs]
    return {tensor.parameter: tensor.name.removesuffix(".weight") for tensor in found}


def _name(module: str, i: int, which: str) -> str:
    return f"base_model.model.{module.format(i=i)}.lora_{which.upper()}.weight"


def export_adapters(loaded: Loaded, out: Path, base: str) -> list[Path]:
    """The files of the new folder. `base`: the model that they belong to, as PEFT is to look for it. ConfigError."""
    from safetensors.numpy import save_file

    cfg, lora = loaded.config.model, loaded.config.lora
    assert isinstance(cfg, ModelConfig)
    modules = _modules(cfg)
    leaves = named_leaves(adapters_of(loaded.model))
    parameters = sorted({name.rpartition(".")[0] for name in leaves})
    if other := [name for name in parameters if name not in modules]:
        raise ConfigError(f"{other[0]} has an adapter that PEFT has no place for; make one model of both with hub merge")

    def written() -> Iterator[tuple[str, np.ndarray]]:
        for parameter in parameters:
            a, b = (np.asarray(leaves[f"{parameter}.lora_{which}"], np.float32) for which in "ab")
            for i in range(cfg.layers):
                yield _name(modules[parameter], i, "a"), np.ascontiguousarray(a[i].reshape(-1, lora.rank).T)
                yield _name(modules[parameter], i, "b"), np.ascontiguousarray(b[i].reshape(lora.rank, -1).T)

    alpha = alpha_of(lora)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": sorted({modules[parameter].rpartition(".")[2] for parameter in parameters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    with new_folder(out) as part:
        save_file(dict(written()), part / WEIGHTS, metadata={"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # the library lets nobody else read it
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(out.iterdir())


def import_adapters(folder: Path, base: str, out: Path, say: Callable[[str], None]) -> int:
    """Makes `out`, a folder of ours with adapters on top of `base`; how many parameters they have. ConfigError."""
    check_free(out)
    run = config_of(base)
    if not isinstance(run.model, ModelConfig):
        raise ConfigError(f"--base {base}: a model of the kind {run.model.architecture!r} takes no adapters of PEFT's")
    lora, found = _read(folder)
    modules = _modules(run.model)
    ours = {module.rpartition(".")[2] for module in modules.values()}
    there = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in found})
    if strange := [name for name in there if name not in ours]:
        raise ConfigError(f"{folder}: corrects {strange[0]}, which {base} does not have")
    config = dataclasses.replace(run, lora=dataclasses.replace(lora, targets=",".join(there)))
    shapes = adapters_of(stored.adapted_shape(config))

    def taken(name: str, shape: Any) -> jax.Array:
        parameter, _, which = name.rpartition(".lora_")
        rows = []
        for i in range(run.model.layers):  # type: ignore[attr-defined]
            theirs = _name(modules[parameter], i, which)
            flat = (math.prod(shape.shape[1:-1]), lora.rank) if which == "a" else (lora.rank, math.prod(shape.shape[2:]))
            if theirs not in found:
                raise ConfigError(f"{folder}: the tensor {theirs} is missing")
            array = found.pop(theirs)
            if array.shape != flat[::-1]:
                raise ConfigError(f"{folder}: {theirs} is {list(array.shape)}, and {base} asks for {list(flat[::-1])}")
            rows.append(array.T.reshape(shape.shape[1:]))
        return jnp.asarray(np.stack(rows), jnp.float32)

    leaves = {name: taken(name, shape) for name, shape in named_leaves(shapes).items()}
    if found:
        raise ConfigError(f"{folder}: holds {next(iter(found))}, for which {base} has no place")
    say(f"hashing {base} ...")
    record = stored.find("--base", base, None, hashed=True, say=say)
    model = jax.tree.unflatten(jax.tree.structure(shapes), list(leaves.values()))
    with new_folder(out) as part:
        for name, text in texts_beside(Path(base)).items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        known = {"imported": folder.name, "parameters": count_parameters(run.model)}
        write_model(part, model, config.to_dict(), base=record, **known)
    return sum(leaf.size for leaf in leaves.values())


def _read(folder: Path) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """What such a folder says and holds; ConfigError for what is no plain LoRA."""
    from safetensors.numpy import load_file

    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for name, plain in _PLAIN.items():
            if name in config and config[name] not in plain:
                raise ConfigError(
                    f"{folder / CONFIG}: {name} {json.dumps(config[name])} is more than plain LoRA; merge it with PEFT"
                )
        lora = LoraConfig(
            rank=config["r"], alpha=float(config["lora_alpha"]), dropout=float(config.get("lora_dropout", 0.0)),
            rslora=bool(config.get("use_rslora", False)),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / CONFIG}: cannot be understood ({type(error).__name__}: {error})") from None
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder}: has no {WEIGHTS}; save the adapters with safe_serialization")
    try:
        return lora, load_file(folder / WEIGHTS)
    except Exception as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{folder / WEIGHTS}: cannot be read ({why})") from None
