"""`python -m nash_mhc.bench`: benchmarks of speed, memory and model quality."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from nash_mhc.config import logs
from nash_mhc.config.commands import chosen_command, file_to_write, local_path, one_line_errors
from nash_mhc.config.kits import deferred
from nash_mhc.config.parsing import keys, parse, shown
from nash_mhc.config.schema import ConfigError

ABOUT = {
    "step": "time the train step on this machine",
    "parts": "time every part of the step separately, against a lower bound",
    "kernels": "compare every GPU kernel with its reference (XLA) implementation, on the inputs of a real step",
    "compile": "compile the step for a TPU, without having one, and print the memory it needs",
    "quality": "train variants of the model on the same data and compare their held-out losses",
    "corpus": "download two reproducible text corpora for comparing models",
}
USAGE = f"python -m nash_mhc.bench {' | '.join(ABOUT)} [flags of train]"
_VARIANTS = "nash-mhc,dense,dense-mhc,dense-conv-mhc"  # of those in quality.py, which imports JAX
_TABLES = {"quality": "findings", "parts": "parts", "kernels": "kernels"}  # modules with a table of their own
_REMOVED = dict.fromkeys(("data", "telemetry"), "instead, see data_wait_ms, step_ms and goodput in metrics.jsonl of a run")


def _own_flags(command: str, group: argparse._ArgumentGroup) -> None:
    """Add the flags of a benchmark, which are arguments of its function."""
    add = group.add_argument
    if command == "step":
        add("--steps", type=int, default=10, help="number of steps to time [10]")
        add("--warmup", type=int, default=3, help="number of untimed steps before them [3]")
        add("--against", choices=["torch"], help="also time the same dense decoder in transformers (PyTorch)")
    elif command == "parts":
        add("--parts", dest="only", metavar="A,B,...", help="parts to time, such as mixer,mhc-write [all]")
        text = "time of the whole step [measured; for a deep model, extrapolated from a few layers]"
        add("--step-ms", dest="whole_step_ms", type=float, metavar="MS", help=text)
        add("--seconds", type=float, default=0.2, help="seconds to time each program [0.2]")
    elif command == "compile":
        add("--topology", default="v6e:2x4", help="TPU topology to compile for, or cpu for emulated devices [v6e:2x4]")
    elif command == "quality":
        add("--seeds", type=int, default=3, help="number of runs per variant, with seeds --seed, --seed + 1, ... [3]")
        add("--variants", metavar="A,B,...", default=_VARIANTS, help=f"variants to compare [{_VARIANTS}]")
        add("--eval-rows", type=int, metavar="ROWS", help="held-out sequences [4 x eval-batches x batch-size]")
        text = "learning rates to try with the first seed; each variant uses its best one [--learning-rate]"
        add("--learning-rates", metavar="A,B,...", help=text)
    add("--json", type=local_path, metavar="FILE", help="also write the results to this file ('-': write only JSON, to stdout)")


def _module(name: str) -> Any:
    """Import a module of this package; it imports JAX, so only after parsing the flags."""
    return importlib.import_module(f"nash_mhc.bench.{name}")


def _show(figures: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value))
    Console().print(table)


# These import JAX, so only after parsing the flags.
_infer = deferred("nash_mhc.train.inferred_settings:infer_settings")
_infer_without_tokenizer = deferred("nash_mhc.train.inferred_settings:infer_without_tokenizer")
_recorded = deferred("nash_mhc.train.inferred_settings:recorded_settings")


def _check_flags(command: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag of `train` that the benchmark would ignore."""
    from nash_mhc.objectives.registry import OBJECTIVES

    if command == "quality":
        for path in ("train.init_from", "train.resume_from", "train.checkpoint_dir"):
            if given.get(path):
                raise ConfigError(f"{keys()[path].flag}: `bench quality` starts from random weights; leave it out")
    name = given.get("objective.name")
    if name is not None and name in OBJECTIVES and OBJECTIVES[name].feed is not None:
        raise ConfigError(f"--objective {name}: `bench {command}` cannot create batches for it; leave out the flag")


def main() -> int:
    if remark := _REMOVED.get("".join(sys.argv[1:2])):
        raise ConfigError(f"bench {sys.argv[1]} was removed; {remark}")
    if (chosen := chosen_command(ABOUT, USAGE, "benchmark")) is None:
        return 0
    command, argv = chosen
    if command == "corpus":
        return int(_module("corpus").command(argv))
    options: dict[str, Any] = {"found": _infer_without_tokenizer, "folder": "train.checkpoint_dir", "recorded": _recorded}
    if command == "quality":  # trains on the user's data
        options = {"found": _infer}
    own_flags = lambda group: _own_flags(command, group)
    examples = ("--model-size small --batch-size 32", "--config run.yaml --json results.json")
    parsed = parse(argv, prog=f"python -m nash_mhc.bench {command}", own=own_flags, examples=examples, **options)
    if shown(parsed):
        return 0
    logs.configure(parsed.config.telemetry.log_level)
    _check_flags(command, parsed.given)
    own = vars(parsed.own)
    json_name = own.pop("json")
    json_file = file_to_write("--json", json_name) if json_name != "-" else None
    figures = getattr(_module("step" if command == "compile" else command), f"bench_{command}")(parsed.config, **own)
    if json_name == "-":
        print(json.dumps(figures, indent=2))
    else:
        (_module(_TABLES[command]).show if command in _TABLES else _show)(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
