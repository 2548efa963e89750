"""A folder that a command makes: it appears when it is whole, or not at all, and nothing is overwritten."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import one_line


def check_free(out: Path) -> None:
    """ConfigError where something is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; choose another folder, or remove it first")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Where to write what `out` shall hold at the end. ConfigError."""
    check_free(out)
    part = out.with_name(f".{out.name}.part")
    with one_line(f"--out {out}"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            if out.exists():
                out.rmdir()
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
