"""`nash-mhc plan`: which meshes fit a machine, how fast they are and what a run costs, before you rent it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from nash_mhc.config import logs
from nash_mhc.config.commands import file_to_write, local_path, module_command, one_line_errors
from nash_mhc.config.kits import deferred
from nash_mhc.config.parsing import as_flags, parse, shown
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.runtime import chips

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_AXES = ("data", "fsdp", "tp")


def own_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--chip", metavar="NAME", default=None, help="machine to plan for, such as v6e-8, h100-16 or cpu (required)")
    prices = "YAML file with data or prices of chips, which overrides the built-in table"
    add("--chips", type=local_path, metavar="FILE", default=None, help=prices)
    add("--tokens", metavar="N", default=None, help="number of training tokens, such as 100B, to estimate hours and dollars")
    add("--top", metavar="N", type=int, default=8, help="rows to show [8]")
    methods = "estimate (takes seconds), or compile the best three to verify them (takes minutes) [estimate]"
    add("--method", choices=["estimate", "compile"], default="estimate", help=methods)
    output = "also write all rows to this file ('-': write only JSON, to stdout)"
    add("--json", type=local_path, metavar="FILE", default=None, help=output)


def number_of_tokens(text: str) -> float:
    match = re.fullmatch(r"([\d_.]+(?:e\d+)?)([kmbt]?)", text.strip().lower())
    try:
        number = float(match[1]) * _UNITS[match[2]] if match is not None else math.nan
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"--tokens {text}: write a number, such as 100B or 2.5e10")
    if number <= 0:
        raise ConfigError(f"--tokens {text}: must be more than 0")
    return number


def _machine(own: argparse.Namespace, given: Mapping[str, Any]) -> tuple[chips.Machine, str | None]:
    """Return the machine to plan for, and a note if the given mesh needs a larger one than --chip."""
    known = chips.chips(own.chips)
    if own.chip is None:
        raise ConfigError(f"--chip is missing; give a machine, such as v6e-8; choose from cpu, {', '.join(known)}")
    named = chips.this_cpu() if own.chip.lower() == "cpu" else chips.machine(own.chip, known)
    sizes = [given.get(f"mesh.{axis}", 1) for axis in _AXES]
    axes_given = sum(f"mesh.{axis}" in given for axis in _AXES)
    need = math.prod(size for size in sizes if size != -1)
    if not axes_given or -1 in sizes or need == named.chips or (axes_given < 3 and named.chips % need == 0):
        return named, None
    shape = "x".join(map(str, sizes))
    for larger in chips.next_larger(named):
        if larger.chips == need:
            count = f"{named.chips} chip{'s' * (named.chips > 1)}"
            return larger, f"{named.name} is {count}, and mesh {shape} needs {need}: this is the plan for {larger.name}"
    raise ConfigError(
        f"mesh {shape} needs {need} chips, but {own.chip} has {named.chips}; change the --mesh flags or leave them out"
    )


def _advice(given: Mapping[str, Any], cfg: RunConfig, machine: chips.Machine, need: float) -> str:
    """Return what to do if nothing fits; `need` is the memory of the smallest layout."""
    from nash_mhc.estimate.candidates import larger_that_fits

    size = f"{need / 2**30:.1f} GiB of a chip's {machine.chip.memory / 2**30:.1f} GiB"
    nothing = f"nothing fits: the smallest layout needs {size}; take a smaller --batch-size, --seq-len or --model-size"
    if (found := larger_that_fits(cfg, machine, given)) is None:
        return f"{nothing}, or another --chip"
    larger, best = found
    flags = " ".join(as_flags(best.settings))
    return f"{nothing}, or --chip {larger.name}, which needs {best.memory.total / 2**30:.1f} GiB per chip with {flags}"


# These import JAX, so only after parsing the flags.
_infer = deferred("nash_mhc.train.inferred_settings:infer_without_tokenizer")
_recorded = deferred("nash_mhc.train.inferred_settings:recorded_settings")


def main() -> int:
    options: dict[str, Any] = {"found": _infer, "folder": "train.checkpoint_dir", "recorded": _recorded}
    options["examples"] = (
        "--model-size 3b --chip v6e-8 --tokens 100B",
        "--model-size 1b --chip h100-8 --mesh-tp 1",
        "runs/notes --chip cpu",
    )
    parsed = parse(sys.argv[1:], prog="python -m nash_mhc.plan", own=own_flags, **options)
    if shown(parsed):
        return 0
    logs.configure(parsed.config.telemetry.log_level)
    own = parsed.own
    if own.top < 1:
        raise ConfigError("--top must be at least 1")
    file = file_to_write("--json", own.json if own.json != "-" else None)
    tokens = number_of_tokens(own.tokens) if own.tokens else None
    machine, remark = _machine(own, parsed.given)

    from nash_mhc.estimate import candidates
    from nash_mhc.model.architectures import count_parameters
    from nash_mhc.plan import show
    from nash_mhc.plan.verify import verify
    from nash_mhc.train.inferred_settings import with_preset_vocabulary

    given = with_preset_vocabulary(parsed.given, parsed.config.model.vocab_size)
    cfg = parsed.config
    cfg = dataclasses.replace(cfg, **candidates.sequence_per_chip(cfg.data, cfg.train, machine.chips, parsed.given))
    found = candidates.candidates(cfg, machine, parsed.given, also_smaller=True)
    if not found:
        sequences = cfg.data.batch_size * cfg.train.grad_accum
        raise ConfigError(
            f"no mesh of {machine.chips} chips divides this model and {sequences} sequences/step; try --batch-size "
            f"{-(-sequences // machine.chips) * machine.chips}, or another --chip"
        )
    parameters = count_parameters(cfg.model)
    rows = [show.row(c, machine, tokens) for c in found]
    fits = found[0].fits != "no"
    command = module_command("nash_mhc.train", *as_flags({**given, **found[0].settings})) if fits else None
    verified = [verify(each, given, machine) for each in found[:3]] if own.method == "compile" and fits else []
    figures = {
        "machine": str(machine), "chip": {**dataclasses.asdict(machine.chip), "slices": dict(machine.chip.slices)},
        "candidates": rows, "command": command, "compiled": verified, "remark": remark, "parameters": parameters,
    }  # fmt: skip
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    if own.json == "-":
        print(json.dumps(figures, indent=2))
        return 0
    if remark:
        print(remark)
    show.show(machine, rows[: own.top], parameters=parameters, tokens=tokens, count=len(found))
    for each in verified:
        print("\n" + each["sentence"])
    print(f"\n{command}" if command else "\n" + _advice(parsed.given, cfg, machine, min(c.memory.total for c in found)))
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
