"""`python -m nash_mhc.bench step` times the train step here, `compile` compiles it for a TPU; both take train's flags."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nash_mhc.config.cli import parse
from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import ConfigError


def _own_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=int, default=10, help="steps to time")
    group.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    group.add_argument("--topology", default="v6e:2x4", help="TPU topology that 'bench compile' compiles for")
    group.add_argument("--json", metavar="FILE", default=None, help="write the figures here, too ('-': only JSON, to stdout)")


def _show(figures: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value))
    Console().print(table)


def main() -> int:
    command, *argv = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        command, argv = "step", ["--help"]
    if command not in ("step", "compile"):
        raise ConfigError(f"unknown benchmark {command!r}; there are: python -m nash_mhc.bench step | compile [flags of train]")
    parsed = parse(argv, prog=f"python -m nash_mhc.bench {command}", own=_own_flags)
    own = parsed.own
    if own.steps < 1 or own.warmup < 0:
        raise ConfigError("--steps must be at least 1 and --warmup at least 0")
    print("compiling ...", file=sys.stderr, flush=True)
    if command == "compile":
        from nash_mhc.bench.aot import bench_compile

        figures = bench_compile(parsed.config, own.topology)
    else:
        from nash_mhc.bench.step import bench_step

        figures = bench_step(parsed.config, steps=own.steps, warmup=own.warmup)
    if own.json == "-":
        print(json.dumps(figures, indent=2))
        return 0
    _show(figures)
    if own.json:
        Path(own.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
