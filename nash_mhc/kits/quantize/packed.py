"""Packed models: folders that store quantized weights in their 2 to 4 bits. `python -m nash_mhc.hub pack` writes them.

`packed.safetensors` has for each quantized weight NAME its codes in NAME.codes, u8 [layers, outputs, ceil(inputs x bits
/ 8)], lowest bits first, and float16 scales in NAME.scale, or NAME.scale_a and NAME.scale_b. A trained table is in
NAME.levels. All other arrays have their own names. `packed.json` has the configuration and the bits of each weight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, local_path, module_command, run_path
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.tokenizer import HuggingFaceTokenizer
from nash_mhc.kits.quantize import ops
from nash_mhc.kits.quantize.settings import QuantizeConfig
from nash_mhc.kits.quantize.weights import Exported, Quantized, is_quantized
from nash_mhc.loading.formats import ModelFormat, cast, format_of, load_tensors, save_tensors
from nash_mhc.loading.load import Loaded, load
from nash_mhc.loading.weights import base_record, model_shape, on_devices, read_record
from nash_mhc.model.lora import adapters_of, on_base
from nash_mhc.model.weights import has_derived
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.files import MALFORMED, check_types, read_json, reading
from nash_mhc.storage.folders import check_is_new, new_folder

ABOUT, WEIGHTS = "packed.json", "packed.safetensors"
_VERSION = 1
_REMEDY = "pack it again"


class Size(NamedTuple):
    """Storage of one kind of weights."""

    name: str
    numbers: int
    bytes: int


def main(argv: Sequence[str]) -> int:
    """Run `python -m nash_mhc.hub pack`."""
    parser = OneLineParser(prog="python -m nash_mhc.hub pack", allow_abbrev=False)
    parser.add_argument(
        "folder",
        type=run_path,
        metavar="DIR",
        help="directory of a run trained with --quantize, or of a LoRA run on top of one",
    )
    parser.add_argument("--out", type=local_path, metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument("--step", type=int, metavar="INT", help="checkpoint to use (default: the run's final one)")
    about = "dtype of the weights that are not quantized; float32 reproduces the trained model exactly [float32]"
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help=about)
    logs.add_flag(parser)
    args = parser.parse_strictly(argv, "the folder to create is --out {word}")
    logs.configure(args.log_level)
    check_is_new(Path(args.out))
    loaded = load_quantized(args.folder, args.step)
    sizes = write_packed(loaded, Path(args.out), args.dtype)
    numbers, total = (sum(values) for values in zip(*(size[1:] for size in sizes), strict=True))
    print(f"  {'':<12} {'numbers':>15} {'bytes':>15} {'bits each':>10}")
    for size in sizes:
        print(f"  {size.name:<12} {size.numbers:>15,} {size.bytes:>15,} {8 * size.bytes / size.numbers:>10.2f}")
    print(f"  {'all':<12} {numbers:>15,} {total:>15,} {8 * total / numbers:>10.2f}   ({total / numbers / 2:.0%} of float16)")
    print(f"{args.out}: generate text with {module_command('nash_mhc.generate', args.out, '--prompt', 'Once upon a time')}")
    return 0


def load_quantized(folder: str, step: int | None = None) -> Loaded:
    """Load a run with its quantized weights. May raise ConfigError.

    For a LoRA run whose base is quantized, load that base and the adapters.
    """
    loaded = load(folder, step)
    if loaded.config.lora.rank and format_of(folder) is None:  # `load` reads the base as plain arrays
        record = base_record(RunFolder(folder), loaded.step)
        cfg = None if record.get("hub") else RunFolder(record["folder"]).config()
        shape = cfg and model_shape(cfg.model, cfg.of_kits)
        if has_derived(shape):
            base = read_record(record, shape, functools.partial(on_devices, mesh=None))
            return dataclasses.replace(loaded, model=on_base(adapters_of(loaded.model), base))
    if not has_derived(loaded.model):
        raise ConfigError(f"{folder}: was not trained with --quantize; export it with python -m nash_mhc.hub export")
    return loaded


def write_packed(loaded: Loaded, out: Path, dtype: str = "float32") -> list[Size]:
    """Write a model with quantized weights. An interrupted write leaves no folder."""
    tensors: dict[str, np.ndarray] = {}
    weights: dict[str, dict[str, Any]] = {}
    sizes: dict[str, Size] = {}

    def add(kind: str, numbers: int, arrays: dict[str, np.ndarray]) -> None:
        tensors.update({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        before = sizes.get(kind, Size(kind, 0, 0))
        sizes[kind] = Size(kind, before.numbers + numbers, before.bytes + sum(array.nbytes for array in arrays.values()))

    for path, leaf in jax.tree_util.tree_flatten_with_path(loaded.model, is_leaf=is_quantized)[0]:
        name = jax.tree_util.keystr(path).lstrip(".")
        if is_quantized(leaf):
            weights[name] = {"bits": leaf.bits, "inputs": leaf.inputs}
            add(leaf.storage, leaf.base.size, _tensors(name, leaf))
            continue
        array = np.asarray(leaf)
        if array.ndim > 1 and dtype != "float32":
            array = cast(name, array, dtype, "float32")
        is_adapter = name.rpartition(".")[2] in ("lora_a", "lora_b")
        add("adapters" if is_adapter else "others", array.size, {name: array})
    config = dataclasses.replace(loaded.config, train=dataclasses.replace(loaded.config.train, init_from=None))
    values = config.recorded()
    with new_folder(out) as part:
        if isinstance(loaded.tokenizer, HuggingFaceTokenizer):
            loaded.tokenizer.save(part)
            values["data"]["tokenizer"] = "."
        save_tensors(tensors, part / WEIGHTS)
        about = {"version": _VERSION, "weights": weights, "config": values}
        (part / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [sizes[kind] for kind in sorted(sizes)]


def _tensors(name: str, weight: Quantized) -> dict[str, np.ndarray]:
    """Return the arrays that a packed file stores of a quantized weight."""
    stored = jax.device_get(jax.jit(Quantized.exported)(weight))
    stack = stored.codes.shape[:1] if weight.is_stack else ()
    outputs = math.prod(stored.codes.shape[len(stack) + weight.inputs :])
    rows = stored.codes.reshape(*stack, -1, outputs).swapaxes(-1, -2)
    codes = ops.packed(rows.reshape(-1, rows.shape[-1]), weight.bits)
    arrays = {f"{name}.codes": codes.reshape(*rows.shape[:-1], -1)}
    arrays |= {f"{name}.{key}": a for key in ("scale", "scale_a", "scale_b") if (a := getattr(stored, key)) is not None}
    return arrays if weight.steps_K is None else arrays | {f"{name}.levels": stored.levels_L}


def _about(folder: Path) -> dict[str, Any]:
    about = read_json(folder / ABOUT, _REMEDY)
    with reading(folder / ABOUT, _REMEDY):
        if about["version"] != _VERSION:
            raise ConfigError(
                f"{folder / ABOUT}: has version {about['version']}, but only version {_VERSION} is supported; {_REMEDY}"
            )
        check_types(about, weights=dict, config=dict)
        for weight in about["weights"].values():
            check_types(weight, bits=int, inputs=int)
    return about


def read_config(folder: Path) -> RunConfig:
    """Return the configuration without quantization, since the weights are read as plain arrays."""
    about = _about(folder)
    with reading(folder / ABOUT, _REMEDY):
        cfg = RunConfig.from_dict(about["config"])
    tokenizer = str(folder) if cfg.data.tokenizer == "." else cfg.data.tokenizer
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, tokenizer=tokenizer)).with_section(QuantizeConfig())


def read_packed(folder: Path, like: Any) -> Any:
    """Return the model with the arrays that training computed with, in the shapes and shardings of `like`."""
    weights = _about(folder)["weights"]
    tensors = load_tensors(folder / WEIGHTS, f"; {_REMEDY}")
    leaves = []
    for name, leaf in named_leaves(like).items():
        try:
            about = weights.get(name)
            array = tensors[name].astype(np.float32) if about is None else _dequantize(name, about, tensors, leaf.shape)
            leaves.append(jax.device_put(np.asarray(array).reshape(leaf.shape).astype(leaf.dtype), leaf.sharding))
        except MALFORMED as error:
            raise ConfigError(f"{folder / WEIGHTS}: {name} does not match {ABOUT} ({error}); {_REMEDY}") from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _dequantize(name: str, about: dict[str, Any], tensors: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight NAME, dequantized, in that shape."""
    bits, input_axes = about["bits"], about["inputs"]
    packed = tensors[f"{name}.codes"]
    stack = shape[: packed.ndim - 2]
    n_inputs = math.prod(shape[len(stack) :][:input_axes])
    rows = ops.unpacked(packed.reshape(-1, packed.shape[-1]), bits, n_inputs)
    codes = rows.reshape(*stack, -1, n_inputs).swapaxes(-1, -2).reshape(shape)
    levels = tensors.get(f"{name}.levels", np.broadcast_to(ops.uniform_levels(bits), (*stack, 2**bits)))
    scales = (tensors.get(f"{name}.{key}") for key in ("scale", "scale_a", "scale_b"))
    stored = Exported(
        jnp.asarray(np.ascontiguousarray(codes)), jnp.asarray(levels), *(None if a is None else jnp.asarray(a) for a in scales)
    )
    dequantize = functools.partial(Exported.array, inputs=input_axes)
    return np.asarray(jax.jit(jax.vmap(dequantize) if stack else dequantize)(stored))


FORMAT = ModelFormat(config=read_config, read=read_packed, instead="use the run that was packed")
