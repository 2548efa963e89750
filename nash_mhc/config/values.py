"""Text that a user wrote for a key, on the command line or in a file, as a value of that key's type."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.key_names import Key
from nash_mhc.config.schema import ConfigError, at_home, check_field

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def convert(key: Key, text: str, name: str, *, quoted: bool = False) -> Any:
    """Text to the key's type, then the schema's own check; `name` is what the user called the key."""
    word = text.strip().lower()
    if not word:
        raise ConfigError(f"{name} needs a value")
    value: Any = at_home(text) if key.metadata["path"] else text
    # Quotes in YAML keep the literal text, and "none" is an ordinary word where the key cannot be None (--remat none).
    choices = key.metadata["choices"] or ()
    may_be_none = not quoted and (not choices or type(None) in key.kinds)
    is_none = may_be_none and (word in ("null", "~") or (word == "none" and type(None) in key.kinds))
    with contextlib.suppress(KeyError, ValueError):  # what stays text fails the check below, which says what it wants
        if is_none:
            value = None
        elif bool in key.kinds:
            value = BOOLS[word]
        elif float in key.kinds:
            value = float(word)
        elif int in key.kinds:
            # People write 1e4 for a number of steps; plain digits must not lose precision on the way through a float.
            value = int(word) if re.fullmatch(r"[+-]?[\d_]+", word) else float(word)
            value = int(value) if isinstance(value, int) or value.is_integer() else text
    try:
        check_field(name, value, key.annotation, key.metadata)
    except ConfigError as error:
        raise ConfigError(f"{error}{did_you_mean(text, choices)}") from None
    return value
