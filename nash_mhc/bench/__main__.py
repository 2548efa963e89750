"""`python -m nash_mhc.bench`: speed, memory, model quality, input and telemetry benchmarks."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from nash_mhc.config import logs
from nash_mhc.config.commands import chosen_command, file_to_write, local_path, one_line_errors
from nash_mhc.config.parsing import Settings, keys, parse, shown
from nash_mhc.config.schema import ConfigError, RunConfig

log = logging.getLogger(__name__)
ABOUT = {
    "step": "time the train step on this machine",
    "parts": "time every part of the step separately, against a lower bound",
    "kernels": "compare every GPU kernel with its plain form, in a real step",
    "compile": "compile the step for an absent TPU and print its memory",
    "quality": "train variants of the model on the same data and compare their held-out losses",
    "corpus": "download two reproducible text corpora for comparing models",
    "data": "measure data preparation and reading: tokens/s, memory, and the step's wait for data",
    "telemetry": "measure the cost of metrics, pictures and samples, as a share of the step",
}
USAGE = f"python -m nash_mhc.bench {' | '.join(ABOUT)} [flags of train]"


def _own_flags(command: str, group: argparse._ArgumentGroup) -> None:
    if command == "step":
        group.add_argument("--steps", type=int, default=10, help="steps to time")
        group.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
        against = "also time the same dense decoder in transformers, on one device"
        group.add_argument("--against", choices=["torch"], help=against)
    elif command == "parts":
        group.add_argument("--parts", metavar="A,B,...", help="parts to time, such as mixer,mhc-write [all]")
        known = "time of the whole step [measured; extrapolated from few layers for a deep model]"
        group.add_argument("--step-ms", type=float, metavar="MS", help=known)
        group.add_argument("--seconds", type=float, default=0.2, help="seconds to time each program [0.2]")
    elif command == "compile":
        group.add_argument("--topology", default="v6e:2x4", help="TPU topology to compile for; cpu: emulated devices")
    elif command == "data":
        group.add_argument("--megabytes", type=int, default=32, help="megabytes of text to generate and prepare [32]")
        group.add_argument("--steps", type=int, default=40, help="steps of the training run [40]")
    elif command == "telemetry":
        group.add_argument("--steps", type=int, default=80, help="steps of the training run [80]")
    elif command == "quality":
        every = "nash-mhc,dense,dense-mhc,dense-conv-mhc"  # in quality.py, which imports JAX
        group.add_argument("--seeds", type=int, default=3, help="runs per variant, with seeds from --seed on [3]")
        group.add_argument("--variants", metavar="A,B,...", default=every, help=f"variants to compare [{every}]")
        group.add_argument("--eval-rows", type=int, metavar="ROWS", help="held-out sequences [4 x eval-batches x batch-size]")
        rates = "learning rates to sweep with the first seed; each variant uses its best [--learning-rate]"
        group.add_argument("--learning-rates", metavar="A,B,...", help=rates)
        tasks = "text: the run's dataset; recall: synthetic key-value recall [text]"
        group.add_argument("--task", choices=["text", "recall"], default="text", help=tasks)
        group.add_argument("--picture", type=local_path, metavar="FILE", help="SVG file with loss against tokens and seconds")
    group.add_argument(
        "--json",
        type=local_path,
        metavar="FILE",
        default=None,
        help="also write the results to this file ('-': only JSON, to stdout)",
    )


def _run(command: str, cfg: RunConfig, own: argparse.Namespace) -> dict[str, Any]:
    if command == "quality":
        from nash_mhc.bench.quality import bench_quality

        return bench_quality(
            cfg, variants=own.variants, seeds=own.seeds, eval_rows=own.eval_rows, learning_rates=own.learning_rates,
            task=own.task,
        )  # fmt: skip
    if command == "data":
        from nash_mhc.bench.data import bench_data

        return bench_data(cfg, megabytes=own.megabytes, steps=own.steps)
    if command == "telemetry":
        from nash_mhc.bench.telemetry import bench_telemetry

        return bench_telemetry(cfg, steps=own.steps)
    if command == "parts":
        from nash_mhc.bench.parts import bench_parts

        if own.seconds <= 0:
            raise ConfigError(f"--seconds {own.seconds:g} must be above 0")
        return bench_parts(cfg, only=own.parts, whole_step_ms=own.step_ms, seconds=own.seconds)
    if command == "step" and (own.steps < 1 or own.warmup < 0):
        raise ConfigError("--steps must be at least 1 and --warmup at least 0")
    if command == "step" and own.against:
        from nash_mhc.bench.torch_step import against_torch

        return against_torch(cfg, steps=own.steps, warmup=own.warmup)
    log.info("compiling ...")
    if command == "compile":
        from nash_mhc.bench.step import bench_compile

        return bench_compile(cfg, own.topology)
    if command == "kernels":
        from nash_mhc.bench.kernels import bench_kernels

        return bench_kernels(cfg)
    from nash_mhc.bench.step import bench_step

    return bench_step(cfg, steps=own.steps, warmup=own.warmup)


def _show(command: str, figures: dict[str, Any]) -> None:
    if command == "quality":
        from nash_mhc.bench.findings import show

        return show(figures)
    if command == "parts":
        from nash_mhc.bench.parts import show as show_parts

        return show_parts(figures)
    if command == "kernels":
        from nash_mhc.bench.kernels import show as show_kernels

        return show_kernels(figures)
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value))
    Console().print(table)


def _infer(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    from nash_mhc.train.inferred_settings import infer_settings  # imports JAX, so only after parsing the flags

    return infer_settings(given, values)


def _infer_without_tokenizer(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    from nash_mhc.train.inferred_settings import infer_without_tokenizer

    return infer_without_tokenizer(given, values)


def _recorded(folder: str, given: Mapping[str, Any]) -> Settings:
    from nash_mhc.train.inferred_settings import recorded_settings

    return recorded_settings(folder, given)


def _check_flags(command: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag of `train` that the benchmark would ignore."""
    from nash_mhc.objectives.registry import OBJECTIVES

    if command == "telemetry":  # a real run
        return
    folders = ("train.init_from", "train.resume_from", "train.checkpoint_dir")
    ignored = {
        "data": dict.fromkeys(("data.dataset", "data.tokenizer", *folders), "it generates its data"),
        "quality": dict.fromkeys(folders, "every variant starts from random weights"),
    }.get(command, {})
    for path, why in ignored.items():
        if given.get(path):
            raise ConfigError(f"{keys()[path].flag}: `bench {command}` ignores it, as {why}; leave it out")
    name = given.get("objective.name")
    if name is not None and name in OBJECTIVES and OBJECTIVES[name].feed is not None:
        raise ConfigError(f"--objective {name}: `bench {command}` cannot make its batches; leave out the flag")


def main() -> int:
    if (chosen := chosen_command(ABOUT, USAGE, "benchmark")) is None:
        return 0
    command, argv = chosen
    if command == "corpus":
        from nash_mhc.bench.corpus import command as corpus_command

        return corpus_command(argv)
    own = lambda group: _own_flags(command, group)
    options: dict[str, Any] = {"found": _infer_without_tokenizer, "folder": "train.checkpoint_dir", "recorded": _recorded}
    if command in ("quality", "telemetry"):  # these train on the user's data
        options = {"found": _infer}
    parsed = parse(argv, prog=f"python -m nash_mhc.bench {command}", own=own, **options)
    if shown(parsed):
        return 0
    logs.configure(parsed.config.telemetry.log_level)
    _check_flags(command, parsed.given)
    file = file_to_write("--json", parsed.own.json) if parsed.own.json != "-" else None
    picture_file = file_to_write("--picture", getattr(parsed.own, "picture", None))
    figures = _run(command, parsed.config, parsed.own)
    if picture_file:
        from nash_mhc.bench.findings import picture

        picture_file.write_text(picture(figures))
    if parsed.own.json == "-":
        print(json.dumps(figures, indent=2))
        return 1 if figures.get("wrong") else 0
    _show(command, figures)
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
