"""Show keys: help text, a configuration as YAML, settings as flags."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from nash_mhc.config import presets
from nash_mhc.config.commands import name_hint
from nash_mhc.config.keys import OURS, SMALL, Key, further, key_of_any_kind, keys, sections
from nash_mhc.config.schema import ARCHITECTURES, ConfigError, RunConfig, weighted_parts

_DIR = "run directory, the same as --checkpoint-dir (for a name without a slash, write ./NAME); "
_EXAMPLES = (
    "--total-steps 50",
    "--model-size small --batch-size 32 learning_rate=1e-3",
    "--config run.yaml --seed 1 --print-config",
)
TITLES = {"data": "data", "train": "training", "optim": "optimizer", "mesh": "devices", "model": "model shape"}


def as_flags(given: Mapping[str, Any]) -> list[str]:
    """Return the command-line words that set these values; a mixture repeats its flag."""
    words: list[str] = []
    for path, value in given.items():
        key = key_of_any_kind(path)
        if isinstance(value, bool):
            words.append(key.flag if value else f"--no-{key.flag[2:]}")
        elif key.metadata.get("weighted") and (parts := weighted_parts(value)):
            words += [word for name, weight in parts for word in (key.flag, f"{name}:{weight}")]
        else:
            words += [key.flag, "none" if value is None else str(value)]
    return words


def _scalar(key: Key, value: Any) -> str:
    """Return a value as one line of YAML that `read_yaml` reads back."""
    text_none = type(None) in key.kinds and str(value).lower() == "none" and value is not None
    style = '"' if text_none or not str(value).isprintable() else None
    text: str = yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def render(config: RunConfig, origins: Mapping[str, str]) -> str:
    """Return YAML that `--config` reads back to the same configuration, with each value's origin as a comment."""
    values = config.to_dict()
    lines: list[tuple[str, str]] = []
    for path, key in keys(config.model_kind).items():
        section, _, name = path.rpartition(".")
        if section and (f"{section}:", "") not in lines:
            lines.append((f"{section}:", ""))
        # An origin quotes what the user typed, which must not break the comment.
        origin = "".join(c if c.isprintable() else "?" for c in origins.get(path, ""))
        left = f"{'  ' if section else ''}{name}: {_scalar(key, key.of(values))}"
        lines.append((left, f"  # {origin}" if origin else ""))
    column = max(len(left) for left, _ in lines if len(left) <= 48)
    return "".join(f"{left:<{column}}{comment}".rstrip() + "\n" for left, comment in lines)


def _line(left: str, text: str, width: int) -> str:
    body = textwrap.wrap(text, width - 34, break_on_hyphens=False)
    head = f"  {left:<30}  {body.pop(0)}" if len(left) <= 30 else f"  {left}"
    return "\n".join([head, *(" " * 34 + rest for rest in body)])


def _width() -> int:
    return max(80, min(100, shutil.get_terminal_size((100, 24)).columns)) - 1


def _described(key: Key, defaults: dict[str, Any]) -> str:
    """Return flag, type or choices, help and default as a line of help."""
    names = {int: "INT", float: "FLOAT", str: "TEXT", bool: "[BOOL]", type(None): "none"}
    choices = key.metadata["choices"]
    kind = "{" + ",".join(choices) + "}" if choices else "|".join(names[t] for t in key.kinds)
    value = key.of(defaults)
    default = "none" if value is None else value if choices else _scalar(key, value)
    return _line(f"{key.flag} {kind}", f"{key.help} [{default}]", _width())


def section_help(section: str, kind: str = OURS) -> str:
    """Return the help of one section or model kind; raise ConfigError for an unknown name."""
    known = list(dict.fromkeys([*sections(), *further(), *ARCHITECTURES]))
    if section not in known:
        raise ConfigError(f"--help {section}: no such section{name_hint(section, known)}")
    if section in ARCHITECTURES:
        section, kind = "model", section
    defaults = presets.run(kind=kind).to_dict()
    title = further().get(section, TITLES.get(section, section))
    if section == "model":
        title = f"{title} of {kind}"
    lines = [_described(key, defaults) for key in keys(kind).values() if key.section == section]
    return "\n".join([f"{title} ({section}.*):" if section in sections() else f"{title}:", *lines]) + "\n"


def usage(prog: str, *, folder: bool = False, kind: str = OURS, examples: Sequence[str] = _EXAMPLES) -> str:
    """Return the help text: all keys of pretraining by section, then the names of the other sections.

    `folder`: whether the command takes a run directory without a flag.
    """
    about_dir = _DIR + ("an existing run is resumed" if prog.endswith(".train") else "the settings of that run are used")
    width, defaults = _width(), presets.run(kind=kind).to_dict()
    note = (
        "If a key is set more than once, the last setting on the command line wins. Brackets show the default "
        f"with --model-size {RunConfig.model_size}; --print-config shows the defaults of other sizes. A flag "
        "with [BOOL] also has a --no-... form."
    )
    out = [
        f"usage: {prog} {'[DIR] ' * folder}[--flag value] [key=value] [--config FILE] ...\n\nexamples:",
        "\n".join(f"  {prog} {example}" for example in examples) + "\n",
        textwrap.fill(note, width, break_on_hyphens=False) + "\n\ngeneral:",
        *([_line("DIR", about_dir, width)] * folder),
        _line("-h, --help", "show this text", width),
        _line("--config FILE", "read keys from a YAML file; later settings override them", width),
        _line("--print-config", "print every key with its origin, as YAML for --config, and exit", width),
        *(_described(key, defaults) for key in keys(kind).values() if "." not in key.path),
        _line(SMALL, "the same as --model-size small", width),
    ]
    for section in TITLES:
        out += ["", section_help(section, kind).rstrip("\n")]
    out += ["", "more sections:", *(_line(f"--help {name}", text, width) for name, text in further().items())]
    out += [_line(f"--help {name}", f"keys of --model-kind {name}", width) for name in ARCHITECTURES if name != kind]
    return "\n".join(out) + "\n"
