"""What XLA is asked for beyond its defaults, by platform: the one place where that is declared.

A row more is all that a new option needs. It goes to the compiler with the program, not through the environment; what
the user's own XLA_FLAGS name is theirs, and left out here. `--print-config` shows what is in force.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Option(NamedTuple):
    name: str
    value: str | bool
    reason: str
    deterministic: bool = False  # of runs that are to have the same bits every time, alone


OPTIONS: dict[str, tuple[Option, ...]] = {
    "cpu": (
        Option(
            "xla_backend_optimization_level", "1",
            "matrix products are in a library; of all else, LLVM's higher levels make nothing faster (docs/experiments.md)",
        ),
    ),
    "gpu": (
        Option(
            "xla_gpu_deterministic_ops", True,
            "--deterministic: sums in one order, and the same kernel every time, whichever was fastest just now",
            deterministic=True,
        ),
    ),
    "tpu": (),
}  # fmt: skip
_OWN = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # where a user's own flags are
_WIDTH = 118


def flags_of_user(environment: Mapping[str, str] = os.environ) -> set[str]:
    """Names of what the user has set. XLA_FLAGS may be the name of a file that has them."""
    texts = [environment.get(variable, "") for variable in _OWN]
    if texts[0].strip() and not texts[0].lstrip().startswith("-"):
        file = Path(texts[0].strip())
        texts[0] = file.read_text() if file.is_file() else ""
    return {name for text in texts for name in re.findall(r"(?:^|\s)--?([\w-]+)", text)}


def compiler_options(
    platform: str, *, deterministic: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str | bool]:
    """For `jit(...).lower(...).compile(compiler_options=...)`."""
    theirs = flags_of_user(environment)
    return {option.name: option.value for option in _asked(platform, deterministic) if option.name not in theirs}


def _asked(platform: str, deterministic: bool) -> list[Option]:
    return [option for option in OPTIONS.get(platform, ()) if deterministic or not option.deterministic]


def as_comments(platform: str, *, deterministic: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Lines of a YAML file that are no part of it."""
    theirs, lines = flags_of_user(environment), [f"compiler options on {platform} (your own XLA_FLAGS go before them):"]
    for option in _asked(platform, deterministic):
        value = str(option.value).lower()
        said = "left to XLA_FLAGS" if option.name in theirs else option.reason
        lines += textwrap.wrap(f"  {option.name}={value}: {said}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    if len(lines) == 1:
        lines.append("  none")
    return "".join(f"# {line}\n" for line in lines)
