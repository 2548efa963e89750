"""Read JSON files; a damaged one is a one-line ConfigError."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import Folder

# Raised when a file holds other values than the code that reads it expects.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def parse_json(data: bytes | str) -> Any:
    """Parse UTF-8 JSON; ValueError for anything else."""
    try:
        return json.loads(data.decode("utf-8") if isinstance(data, bytes) else data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextlib.contextmanager
def reading(path: object, remedy: str = "", kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise any failure to read or interpret a file as a one-line ConfigError of that `kind`."""
    remedy = f"; {remedy}" if remedy else ""
    try:
        with as_os_errors():
            yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}){remedy}") from None
    except MALFORMED as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)[:200] or type(error).__name__
        raise kind(f"{path}: cannot be read ({what}){remedy}") from None


def read_json(path: Folder, remedy: str = "", kind: type[ConfigError] = ConfigError) -> dict[str, Any]:
    """Return the object in a JSON file; ConfigError if it holds anything else."""
    with reading(path, remedy, kind):
        values = parse_json(path.read_bytes())
        if not isinstance(values, dict):
            raise TypeError(f"expected a JSON object, found {type(values).__name__}")
        return values


def check_types(values: Mapping[str, Any], **kinds: type) -> None:
    """Check the type of each named value; KeyError or TypeError. Numbers must not be negative."""
    for name, kind in kinds.items():
        value = values[name]
        is_right = isinstance(value, kind | int if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not is_right or (kind in (int, float) and not 0 <= value < 2**63):
            raise TypeError(f"{name} is {str(value)[:40]!r}")


def table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object under `name`; empty if there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number under `name`; None if there is none."""
    value = values.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
