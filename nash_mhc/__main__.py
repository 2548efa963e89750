"""`nash-mhc COMMAND ...`, or `python -m nash_mhc COMMAND ...`: run a command; without one, list all commands."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import NoReturn

from nash_mhc import __version__
from nash_mhc.config import kits
from nash_mhc.config.commands import chosen_command, one_line_errors

ABOUT = {
    "train": "train a model or resume a run",
    "generate": "generate text with a trained model",
    "evaluate": "evaluate a model on lm-evaluation-harness tasks or held-out text",
    "data": "prepare and inspect data, train tokenizers",
    "checkpoint": "list, verify and inspect the checkpoints of a run",
    "plan": "estimate which meshes fit a machine, their speed and their cost",
    "report": "write an HTML page about a run",
    "doctor": "check whether this machine is ready to train",
    "bench": "measure speed, quality, memory and the input pipeline",
}


def main() -> int:
    if not sys.argv[1:]:
        sys.argv.append("--help")
    if sys.argv[1:] == ["--help"] or sys.argv[1:] == ["-h"]:
        print(f"nash_mhc {__version__}: pretrains language models over a data x fsdp x tp mesh\n")
    started = "nash-mhc" if Path(sys.argv[0]).name == "nash-mhc" else "python -m nash_mhc"
    of_kits = {name: command.about for name, command in kits.COMMANDS.items()}
    if (chosen := chosen_command(ABOUT | of_kits, f"{started} COMMAND [flags]")) is None:
        return 0
    command, argv = chosen
    if command in of_kits:
        sys.argv = ["-m", *argv]
        return kits.run_command(command)
    sys.modules.pop(f"nash_mhc.{command}.__main__", None)  # runpy warns if it is imported already
    sys.argv = ["-m", *argv]  # as Python itself would start it: a training run listens for signals from then on
    runpy.run_module(f"nash_mhc.{command}", run_name="__main__", alter_sys=True)
    return 0


def console() -> NoReturn:
    """The console script `nash-mhc`."""
    sys.exit(one_line_errors(main))


if __name__ == "__main__":
    console()
