"""`python -m nash_mhc.hub import | export | merge | check`: convert models from and to Hugging Face formats."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, chosen_command, local_path, module_command, run_path
from nash_mhc.config.kits import HubCommand, Registry
from nash_mhc.config.kits import load as load_reference
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.folders import check_is_new, check_model_folder

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)
ABOUT = {
    "import": "Convert a Hugging Face folder or PEFT adapters to a run directory. (`train --init-from` also reads them "
    "directly.)",
    "export": "Export a run to a folder for transformers, or its adapters to a folder for PEFT.",
    "merge": "Merge the adapters of a run into their base model and export it to a folder for transformers.",
    "check": "Compare the logits of two models on the same text.",
}
_TEXT = "The old lighthouse keeper counted the ships as they came in, and wrote the number of each into a small green book. "


def _parser(command: str) -> OneLineParser:
    return OneLineParser(prog=f"python -m nash_mhc.hub {command}", allow_abbrev=False, description=ABOUT[command])


def _parsed(parser: OneLineParser, argv: Sequence[str], stray: str) -> argparse.Namespace:
    logs.add_flag(parser)
    args = parser.parse_strictly(argv, stray)
    logs.configure(args.log_level)
    return args


def _generate_command(folder: str) -> str:
    return module_command("nash_mhc.generate", folder, "--prompt", "Once upon a time")


def _import(argv: Sequence[str]) -> int:
    parser = _parser("import")
    parser.add_argument(
        "folder",
        type=local_path,
        metavar="FOLDER",
        help="folder with config.json, safetensors and a tokenizer, or PEFT adapters",
    )
    parser.add_argument("--out", type=local_path, metavar="DIR", required=True, help="folder to create")
    parser.add_argument(
        "--base", type=local_path, metavar="FOLDER", help="base model of the adapters: a run directory or Hugging Face folder"
    )
    args = _parsed(parser, argv, "the folder to create is --out {word}")
    folder = Path(args.folder).expanduser()
    if (folder / "adapter_config.json").is_file():
        return _import_adapters(folder, args)
    if args.base is not None:
        raise ConfigError(
            f"--base {args.base}: {folder} contains no adapters (adapter_config.json is missing); leave out --base"
        )
    check_model_folder("", args.folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no config.json, so it is not a Hugging Face model")
    from nash_mhc.kits.hub.writing import import_folder
    from nash_mhc.model.architectures import count_parameters

    loaded = import_folder(folder, Path(args.out))
    count = count_parameters(loaded.config.model)
    print(f"{args.out}: {count / 1e6:,.1f} million parameters; train it with --init-from {args.out}, or generate text with")
    print(f"  {_generate_command(args.out)}")
    return 0


def _import_adapters(folder: Path, args: argparse.Namespace) -> int:
    if args.base is None:
        raise ConfigError(f"{folder}: contains adapters; give their base model with --base FOLDER")
    from nash_mhc.kits.hub.adapters import import_adapters

    count = import_adapters(folder, args.base, Path(args.out))
    print(f"{args.out}: adapters of {count:,} parameters on {args.base}; generate text with them, or merge them:")
    print(f"  {_generate_command(args.out)}")
    print(f"  {module_command('nash_mhc.hub', 'merge', args.out, '--out', f'{args.out}-merged')}")
    return 0


def _parse_and_load(command: str, argv: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """Parse the flags of `export` or `merge` and load the model."""
    parser = _parser(command)
    parser.add_argument("folder", type=run_path, metavar="DIR", help="run directory or imported model")
    parser.add_argument("--out", type=local_path, metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument("--step", type=int, metavar="INT", help="checkpoint to use (default: the run's final one)")
    kinds = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=kinds, default="auto", help="dtype of the weights [auto: as imported, else float32]")
    parser.add_argument("--shard-size", type=float, default=4.0, metavar="GB", help="largest file size [4]")
    args = _parsed(parser, argv, "the folder to create is --out {word}")
    if not (args.shard_size > 0 and math.isfinite(args.shard_size)):
        raise ConfigError(f"--shard-size {args.shard_size}: must be above 0")
    from nash_mhc.loading.load import load

    check_is_new(Path(args.out))
    return args, load(args.folder, args.step)


def _export(argv: Sequence[str]) -> int:
    args, loaded = _parse_and_load("export", argv)
    if not loaded.config.lora.rank:
        return _write(args, loaded)
    from nash_mhc.checkpoint.run_folder import RunFolder
    from nash_mhc.kits.hub.adapters import IMPORTED_DTYPES, export_adapters
    from nash_mhc.loading.formats import format_of
    from nash_mhc.loading.weights import base_record

    if format_of(args.folder) is not None:
        raise ConfigError(
            f"{args.folder}: is not a run, so its adapters cannot be exported; to merge them with their base, use hub merge"
        )
    if args.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"--dtype {args.dtype}: adapters are exported as imported (auto) or as float32; hub merge writes the merged model "
            "in any dtype"
        )
    run = RunFolder(args.folder)
    dtypes = run.info().get(IMPORTED_DTYPES, {}) if args.dtype == "auto" else {}
    _list_files(export_adapters(loaded, Path(args.out), base_record(run, loaded.step)["folder"], dtypes))
    print(f"{args.out}: adapters for PEFT; hub merge writes one model with its base")
    return 0


def _merge(argv: Sequence[str]) -> int:
    args, loaded = _parse_and_load("merge", argv)
    if not loaded.config.lora.rank:
        raise ConfigError(f"{args.folder}: has no adapters; use hub export")
    from nash_mhc.config.schema import LoraConfig
    from nash_mhc.model.lora import merged

    config = dataclasses.replace(loaded.config, lora=LoraConfig())
    return _write(args, dataclasses.replace(loaded, model=merged(loaded.model), config=config))


def _write(args: argparse.Namespace, loaded: Any) -> int:
    """Write a whole model as a Hugging Face folder."""
    from nash_mhc.kits.hub.writing import export, model_card

    dtype = None if args.dtype == "auto" else args.dtype
    card = model_card(loaded, Path(args.folder).resolve().name, _figures(args.folder, loaded.step))
    _list_files(export(loaded, Path(args.out), dtype=dtype, shard_bytes=int(args.shard_size * 1e9), card=card))
    print(f"{args.out}: compare the two with {module_command('nash_mhc.hub', 'check', args.folder, args.out)}")
    return 0


def _list_files(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"  {path.stat().st_size:>15,}  {path.name}")


def _figures(folder: str, step: int) -> dict[str, Any]:
    """Return the rows of the model card's table."""
    from nash_mhc.checkpoint.run_folder import EVALUATIONS, RunFolder
    from nash_mhc.loading.formats import format_of

    if format_of(folder) is not None:
        return {}
    run = RunFolder(folder)
    rows = [row for row in run.rows() if row["step"] <= step]
    evaluations = [row for row in run.rows(EVALUATIONS) if row["step"] <= step and "eval/loss" in row]
    figures: dict[str, Any] = {"parameters": f"{run.info()['parameters']:,}", "steps": step}
    if rows and "tokens_seen" in rows[-1]:
        figures["tokens"] = f"{int(rows[-1]['tokens_seen']):,}"
    if evaluations:
        last = evaluations[-1]
        figures[f"held-out loss at step {int(last['step'])}, nats/token"] = f"{last['eval/loss']:.4f}"
    return figures


def _check(argv: Sequence[str]) -> int:
    parser = _parser("check")
    parser.add_argument("one", type=run_path, metavar="A", help="run directory or Hugging Face folder")
    parser.add_argument("other", type=run_path, metavar="B", help="run directory or Hugging Face folder to compare it with")
    parser.add_argument(
        "--text", type=local_path, metavar="FILE", help="text to run both models on (default: a repeated sentence)"
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="INT", help="number of tokens to compare [256]")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code from a Hugging Face folder to run")
    args = _parsed(parser, argv, "give two folders to compare")
    if args.tokens < 2:
        raise ConfigError(f"--tokens {args.tokens}: must be at least 2")
    import numpy as np
    from scipy.special import log_softmax

    from nash_mhc.data.tokenizer import with_begin
    from nash_mhc.loading.load import tokenizer_of

    tokenizer = tokenizer_of(args.one)
    tokens = np.array(with_begin(tokenizer, tokenizer.encode(_text(args))[: args.tokens - 1].tolist()), np.int32)
    (a_TV, a_by), (b_TV, b_by) = (_logits(folder, tokens, args.trust_remote_code) for folder in (args.one, args.other))
    if a_TV.shape != b_TV.shape:
        raise ConfigError(f"cannot compare models with vocabularies of {a_TV.shape[1]} and {b_TV.shape[1]} tokens")
    log_p, log_q = (log_softmax(x_TV.astype(np.float64), axis=-1) for x_TV in (a_TV, b_TV))
    print(f"{args.one} (by {a_by}) and {args.other} (by {b_by}), {len(tokens)} tokens:")
    for name, value in (
        ("largest difference", np.abs(a_TV - b_TV).max()),
        ("mean KL, nats", (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        ("same choice", (a_TV.argmax(-1) == b_TV.argmax(-1)).mean()),
    ):
        print(f"  {name:<20} {value:.3g}")
    return 0


def _text(args: argparse.Namespace) -> str:
    if args.text is None:
        return _TEXT * (1 + 4 * args.tokens // len(_TEXT))
    try:
        return Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: cannot be read as text ({error})") from None


def _logits(folder: str, tokens: np.ndarray, trusted: bool) -> tuple[np.ndarray, str]:
    """Return float32 logits [T, V] and the library used: transformers for Hugging Face folders, if torch is there."""
    import jax
    import numpy as np

    from nash_mhc.kits.hub.folder import FORMAT
    from nash_mhc.loading.formats import format_of
    from nash_mhc.loading.load import load

    if format_of(folder) is FORMAT:
        if importlib.util.find_spec("torch") is not None:
            return _logits_by_torch(folder, tokens, trusted), "transformers"
        log.info(f"{folder}: torch is not installed; running it with nash_mhc")
    logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))(load(folder).model, tokens[None])
    return np.asarray(logits[0]), "nash_mhc"


def _logits_by_torch(folder: str, tokens: np.ndarray, trusted: bool) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    from nash_mhc.kits.hub.config_json import has_only_our_code

    values = json.loads((Path(folder) / "config.json").read_text())
    trusted = trusted or has_only_our_code(Path(folder), values)
    if "auto_map" in values and not trusted:
        raise ConfigError(f"{folder}: the model needs to run code from the folder; allow it with --trust-remote-code")
    log.info(f"reading {folder} with transformers ...")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusted).eval()
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(tokens[None]).long()).logits[0].float().numpy()
    return logits


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "import": _import, "export": _export, "merge": _merge, "check": _check,
}  # fmt: skip


def main() -> int:
    of_kits: Registry[HubCommand] = Registry("hub_commands", {})
    about = ABOUT | {name: command.about for name, command in of_kits.items()}
    usage = f"python -m nash_mhc.hub {' | '.join(about)} ..."
    if not sys.argv[1:]:
        raise ConfigError(f"no command given; usage: {usage}")
    if (chosen := chosen_command(about, usage)) is None:
        return 0
    command, argv = chosen
    run = _COMMANDS[command] if command in _COMMANDS else load_reference(of_kits[command].main)
    return run(argv)
