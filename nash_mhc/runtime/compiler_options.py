"""XLA compiler options by platform, passed with each program. The user's XLA_FLAGS take precedence.

`--print-config` shows the options in effect.
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
    deterministic: bool = False  # only with --deterministic


OPTIONS: dict[str, tuple[Option, ...]] = {
    "cpu": (
        Option(
            "xla_backend_optimization_level", "1",
            "compiles faster; matmuls use a library, and higher levels speed up nothing else (docs/experiments.md)",
        ),
    ),
    "gpu": (
        Option(
            "xla_gpu_deterministic_ops", True,
            "--deterministic: fixed order of sums, and fixed kernels instead of autotuned ones",
            deterministic=True,
        ),
    ),
    "tpu": (),
}  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_WIDTH = 118


def user_set_flags(environment: Mapping[str, str] = os.environ) -> set[str]:
    """Return the names of the flags that the user has set. XLA_FLAGS may name a file with flags."""
    texts = [environment.get(variable, "") for variable in _VARIABLES]
    if texts[0].strip() and not texts[0].lstrip().startswith("-"):
        file = Path(texts[0].strip())
        texts[0] = file.read_text() if file.is_file() else ""
    return {name for text in texts for name in re.findall(r"(?:^|\s)--?([\w-]+)", text)}


def compiler_options(
    platform: str, *, deterministic: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str | bool]:
    """Return the options for `lowered.compile(compiler_options=...)`."""
    user_flags = user_set_flags(environment)
    return {option.name: option.value for option in _options(platform, deterministic) if option.name not in user_flags}


def _options(platform: str, deterministic: bool) -> list[Option]:
    return [option for option in OPTIONS.get(platform, ()) if deterministic or not option.deterministic]


def as_comments(platform: str, *, deterministic: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the options as YAML comments."""
    user_flags = user_set_flags(environment)
    lines = [f"compiler options on {platform} (XLA_FLAGS take precedence):"]
    for option in _options(platform, deterministic):
        value = str(option.value).lower()
        note = "left to XLA_FLAGS" if option.name in user_flags else option.reason
        lines += textwrap.wrap(f"  {option.name}={value}: {note}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    if len(lines) == 1:
        lines.append("  none")
    return "".join(f"# {line}\n" for line in lines)
