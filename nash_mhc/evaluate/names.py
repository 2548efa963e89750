"""What --tasks may name beside tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path

from nash_mhc.config.fields import ConfigError, check_scheme
from nash_mhc.storage.errors import reason

STORIES, BYTES = "stories", "bytes:"
HELD_OUT = "held_out"  # what the run itself holds out of its data, measured as the run does


def read_text(name: str) -> str:
    """The file of `bytes:FILE`. ConfigError."""
    check_scheme(BYTES, name.removeprefix(BYTES))
    path = Path(name.removeprefix(BYTES)).expanduser()
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({reason(error)})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is no UTF-8 text (byte {error.start:,})") from None
    if not text:
        raise ConfigError(f"{name}: the file is empty")
    return text
