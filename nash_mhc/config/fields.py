"""Declare and check keys: each field carries its type, bounds and help text. No jax, no I/O."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

Settings = dict[str, tuple[Any, str]]  # path -> value, origin


class ConfigError(ValueError):
    """A user's mistake in one line: what is wrong, where, and the remedy. Commands print it and exit with code 2."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in a notebook: the message without a traceback."""
        return [f"error: {self}"]


# Removed keys and flags -> what to do instead. Runs that recorded them still load.
REMOVED = {
    "model.sinkhorn_iterations": "the mixing of streams converges without it; leave it out",
    "objective.label_smoothing": "leave it out for --objective next_token, or register an objective with smoothing",
    "task": "bench quality compares on text",
    "picture": "--json FILE writes all figures",
    "verify_resume": "`python -m nash_mhc.doctor` trains, saves and resumes a small model on this machine",
}


def key(
    default: Any,
    help: str,
    *,
    low: int | float | None = None,
    above: int | float | None = None,
    high: int | float | None = None,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    weighted: bool = False,
    path: bool = False,
    remote: bool = False,
    axis: bool = False,
    further: str | None = None,
    seam: str | None = None,
    model_folder: bool = False,
) -> Any:
    """Declare one key: default, help text, inclusive bounds `low` and `high`, exclusive bound `above`.

    weighted: the flag may be repeated with weights (a:0.7); the values are joined. path: a local path, in which ~ is
    expanded; with `remote` it may be gs://. axis: a mesh axis. further: the `--help` section that shows this key, if it
    is not its own. seam: the field of Kit whose names are values of this key; the help text lists them.
    model_folder: the value is the folder of a model.
    """
    bounds = {"low": low, "above": above, "high": high}
    kind = {"weighted": weighted, "path": path, "remote": remote, "axis": axis, "further": further, "seam": seam}
    kind["model_folder"] = model_folder
    return field(default=default, metadata=bounds | {"help": help, "choices": choices, "flag": flag} | kind)


def axis(help: str) -> Any:
    """Declare a mesh axis: its number of devices."""
    return key(1, help, low=-1, axis=True)


def accepted_types(annotation: Any) -> tuple[type, ...]:
    """Return `int | None` as (int, NoneType) and `float` as (float,). Keys have no other types."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(typing.get_args(annotation))
    return (annotation,)


def type_name(annotation: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return " or ".join(names[t] for t in accepted_types(annotation))


def _is_valid_argument(text: str) -> bool:
    """Return whether the operating system accepts the text as a file name or an argument."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def check_field(name: str, value: Any, annotation: Any, metadata: Any) -> None:
    """Check a value against the declaration of its key; raise ConfigError if it is invalid."""
    types_ = accepted_types(annotation)
    # Python takes bool for an int: `--seed true` must fail.
    fits = isinstance(value, types_) and not (isinstance(value, bool) and bool not in types_)
    if not fits:
        raise ConfigError(f"{name} must be {type_name(annotation)}, not {value!r}")
    if value is None:
        return
    if value == "":
        raise ConfigError(f"{name} must not be empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{name} must be a 64-bit integer, not {value}")
    if isinstance(value, str) and not _is_valid_argument(value):
        raise ConfigError(f"{name} must be text without NUL characters or lone surrogates, not {value!r}")
    if metadata.get("path"):
        check_scheme(name, value, remote=metadata["remote"])
        longest = max((part for path, _ in weighted_parts(value) or [(value, "")] for part in path.split("/")), key=len)
        if len(os.fsencode(longest)) > 255:
            raise ConfigError(f"{name}: {longest[:40]}... is too long for the name of a file or folder")
    choices, low, above, high = (metadata.get(k) for k in ("choices", "low", "above", "high"))
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    if low is not None and not value >= low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")
    if above is not None and not value > above:
        raise ConfigError(f"{name} must be above {above}, not {value}")
    if high is not None and not value <= high:
        raise ConfigError(f"{name} must be at most {high}, not {value}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Cached: a plan builds thousands of sections, and reading annotations took half of its time."""
    return typing.get_type_hints(kind)


class Section:
    """Base of all sections; checks every field against its declaration at construction."""

    section: ClassVar[str] = ""
    about: ClassVar[str] = ""  # one line for `--help`, for the section of a kit
    of_objective: ClassVar[str | None] = None  # the objective that the section belongs to, if it is of a kit
    prefixed: ClassVar[bool] = False  # whether flags start with the section's name: --mesh-data
    switch: ClassVar[str] = ""  # for the section of a kit: while this key is set, a resumed run cannot change the section

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]  # a class can be hashed
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            is_integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
            if is_integer and accepted_types(hints[f.name])[0] is float:
                value = float(value)
                object.__setattr__(self, f.name, value)
            if f.metadata["path"] and isinstance(value, str):
                value = expand_home(value)
                object.__setattr__(self, f.name, value)
            check_field(f"{self.section}.{f.name}", value, hints[f.name], f.metadata)

    def check_run(self, run: Any) -> None:
        """Raise ConfigError if the section does not fit the rest of a RunConfig. Kit sections are checked if set."""

    def trains_role(self, role: str) -> bool:
        """Whether a kit's section lets parameters of this role (`parallel/params.py`) be trained."""
        return True


def weighted_parts(text: str) -> list[tuple[str, str]]:
    """Return `a:0.7,b:0.3` as [(a, 0.7), (b, 0.3)]; an empty list if the text is not a list of weighted names."""
    parts, end = [], 0
    for weight in re.finditer(r":(\d+(?:\.\d*)?|\.\d+)(?:,|$)", text):
        parts.append((text[end : weight.start()], weight[1]))
        end = weight.end()
    is_whole = end == len(text) and not text.endswith(",") and all(name for name, _ in parts)
    return parts if is_whole else []


def expand_home(path: str) -> str:
    """Expand ~ in a path or in each path of a weighted list."""
    if parts := weighted_parts(path):
        return ",".join(f"{os.path.expanduser(name)}:{weight}" for name, weight in parts)
    return os.path.expanduser(path)


def check_scheme(name: str, path: str, *, remote: bool = False) -> None:
    """Raise ConfigError for an unsupported scheme; s3://bucket/run would become a local folder `s3:`."""
    for part in [part for part, _ in weighted_parts(path)] or [path]:
        found = re.match(r"(?:hf:)?([A-Za-z][\w+.-]*)://", part)
        if found and not (remote and part.startswith("gs://")):
            also = " or in Google Cloud Storage (gs://bucket/folder)" if remote else ""
            raise ConfigError(f"{name} {part}: {found[1]}:// is not supported; give a path on this machine{also}")


def nearest_multiple(value: int, factor: int) -> int:
    """Return the positive multiple of `factor` closest to `value`, for error messages."""
    return max(factor, round(value / factor) * factor)
