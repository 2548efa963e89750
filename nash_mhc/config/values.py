"""Convert the text of a key, from the command line or a file, to the key's type."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.key_names import Key
from nash_mhc.config.schema import ConfigError, check_field, expand_home

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def convert(key: Key, text: str, name: str, *, quoted: bool = False) -> Any:
    """Convert text to the key's type and check it; `name` is what the user called the key."""
    word = text.strip().lower()
    if not word:
        raise ConfigError(f"{name} needs a value")
    value: Any = expand_home(text) if key.metadata["path"] else text
    # Quotes in YAML keep the literal text, and "none" is an ordinary word where the key cannot be None (--remat none).
    choices = key.metadata["choices"] or ()
    may_be_none = not quoted and (not choices or type(None) in key.kinds)
    is_none = may_be_none and (word in ("null", "~") or (word == "none" and type(None) in key.kinds))
    with contextlib.suppress(KeyError, ValueError):  # a value left as text fails the check below
        if is_none:
            value = None
        elif bool in key.kinds:
            value = BOOLS[word]
        elif float in key.kinds:
            value = float(word)
        elif int in key.kinds:
            # Accept 1e4 for an integer, but do not pass plain digits through a float: they would lose precision.
            value = int(word) if re.fullmatch(r"[+-]?[\d_]+", word) else float(word)
            value = int(value) if isinstance(value, int) or value.is_integer() else text
    try:
        check_field(name, value, key.annotation, key.metadata)
    except ConfigError as error:
        raise ConfigError(f"{error}{did_you_mean(text, choices)}") from None
    return value
