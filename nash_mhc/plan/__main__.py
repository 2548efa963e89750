"""`nash-mhc plan`: what fits a machine, how fast it will be and what it will cost, before it is paid for."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.commands import file_to_write, local_path, one_line_errors
from nash_mhc.config.parsing import Parsed, Settings, as_flags, parse, shown
from nash_mhc.config.schema import ConfigError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def own_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chip", metavar="NAME", default=None, help="chips to plan for: v6e-8, h100-16, cpu ... (required)")
    group.add_argument(
        "--chips", type=local_path, metavar="FILE", default=None, help="YAML file with your own chip data or prices"
    )
    group.add_argument(
        "--tokens", metavar="N", default=None, help="tokens of the whole run, for hours and dollars, such as 100B"
    )
    group.add_argument("--top", metavar="N", type=int, default=8, help="rows to show [8]")
    methods = "estimate (seconds), or compile the best three to verify them (minutes) [estimate]"
    group.add_argument("--method", choices=["estimate", "compile"], default="estimate", help=methods)
    group.add_argument(
        "--json",
        type=local_path,
        metavar="FILE",
        default=None,
        help="also write all rows to this file ('-': JSON to stdout only)",
    )


def number_of_tokens(text: str) -> float:
    found = re.fullmatch(r"([\d_.]+(?:e\d+)?)([kmbt]?)", text.strip().lower())
    try:
        assert found is not None
        number = float(found[1]) * _UNITS[found[2]]
    except (AssertionError, ValueError):
        raise ConfigError(f"--tokens {text}: write a number, such as 100B or 2.5e10") from None
    if number <= 0:
        raise ConfigError(f"--tokens {text}: must be more than 0")
    return number


def _machine(own: argparse.Namespace, given: Mapping[str, Any]) -> tuple[Any, str | None]:
    """(the machine, a remark): a mesh that needs more chips than were named is answered with as many as it needs."""
    from nash_mhc.runtime.chips import chips, machine, next_larger, this_cpu

    known = chips(own.chips)
    if own.chip is None:
        raise ConfigError(f"--chip is missing: name what to plan for, such as v6e-8; there are cpu, {', '.join(known)}")
    found = this_cpu() if own.chip.lower() == "cpu" else machine(own.chip, known)
    sizes = [given.get(f"mesh.{axis}", 1) for axis in ("data", "fsdp", "tp")]
    asked = {axis for axis in ("data", "fsdp", "tp") if f"mesh.{axis}" in given}
    need = math.prod(size for size in sizes if size != -1)
    if not asked or -1 in sizes or need == found.chips or (len(asked) < 3 and found.chips % need == 0):
        return found, None
    shape = "x".join(map(str, sizes))
    for larger in next_larger(found):
        if larger.chips == need:
            count = f"{found.chips} chip{'s' * (found.chips > 1)}"
            return larger, f"{found.name} is {count}, and mesh {shape} needs {need}: this is the plan for {larger.name}"
    raise ConfigError(
        f"mesh {shape} needs {need} chips, and {own.chip} has {found.chips}; leave the mesh out, or make it multiply to that"
    )


def _advice(parsed: Parsed, cfg: Any, machine: Any, smallest: Any) -> str:
    """What to change where nothing fits."""
    from nash_mhc.estimate.candidates import nearest_that_fit

    need, room = smallest.memory.total / 2**30, smallest.capacity / 2**30
    lines = [f"nothing fits: the smallest needs {need:.1f} GiB of a chip's {room:.1f}. What would:"]
    for what, best in nearest_that_fit(cfg, machine, parsed.given):
        flags = " ".join(as_flags(best.settings))
        lines.append(f"  {what}: {best.memory.total / 2**30:.1f} GiB a chip with {flags}")
    return "\n".join(
        lines if len(lines) > 1 else [*lines, f"  no smaller batch or larger slice of {machine.chip.name} that is known"]
    )


def _found(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    from nash_mhc.train.inferred_settings import infer_without_tokenizer  # with JAX: after the flags

    return infer_without_tokenizer(given, values)


def _recorded(folder: str, given: Mapping[str, Any]) -> Settings:
    from nash_mhc.train.inferred_settings import recorded_settings

    return recorded_settings(folder, given)


def main() -> int:
    how: dict[str, Any] = {"found": _found, "folder": "train.checkpoint_dir", "recorded": _recorded}
    parsed = parse(sys.argv[1:], prog="python -m nash_mhc.plan", own=own_flags, **how)
    if shown(parsed):
        return 0
    own = parsed.own
    if own.top < 1:
        raise ConfigError("--top must be at least 1")
    file, tokens = (
        file_to_write("--json", own.json if own.json != "-" else None),
        number_of_tokens(own.tokens) if own.tokens else None,
    )
    machine, remark = _machine(own, parsed.given)

    from nash_mhc.estimate import candidates
    from nash_mhc.model.architectures import count_parameters  # with JAX: after the flags
    from nash_mhc.plan import show
    from nash_mhc.train.inferred_settings import with_preset_vocabulary

    given = with_preset_vocabulary(parsed.given, parsed.config.model.vocab_size)
    cfg = candidates.rows_for(parsed.config, machine, parsed.given)
    found = candidates.candidates(cfg, machine, parsed.given, also_smaller=True)
    if not found:
        rows = cfg.data.batch_size * cfg.train.grad_accum
        raise ConfigError(
            f"no mesh of {machine.chips} chips divides this model and {rows} rows a step; try --batch-size "
            f"{-(-rows // machine.chips) * machine.chips}, or another --chip"
        )
    parameters = count_parameters(cfg.model)
    rows_shown = [show.row(c, machine, tokens) for c in found]
    fits = found[0].fits != "no"
    command = show.train_command(found[0], given) if fits else None
    verified = _verify(own, found, given, machine) if own.method == "compile" and fits else []
    figures = show.as_json(machine, rows_shown, command) | {"compiled": verified, "remark": remark, "parameters": parameters}
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    if own.json == "-":
        print(json.dumps(figures, indent=2))
        return 0
    if remark:
        print(remark)
    show.show(machine, rows_shown[: own.top], parameters=parameters, tokens=tokens, looked_at=len(found))
    for line in verified:
        print("\n" + line["sentence"])
    print(f"\n{command}" if command else "\n" + _advice(parsed, cfg, machine, min(found, key=lambda c: c.memory.total)))
    return 0


def _verify(own: argparse.Namespace, found: list[Any], given: Mapping[str, Any], machine: Any) -> list[dict[str, Any]]:
    from nash_mhc.plan.verify import verify

    return [verify(each, given, machine) for each in found[:3]]


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
