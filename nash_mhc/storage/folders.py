"""Output folders, created completely or not at all, and checks of model folders given as input."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from nash_mhc.config.kits import provided
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import is_remote, to_path


def check_is_new(out: Path) -> None:
    """Raise ConfigError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: already exists; choose another folder, or remove it first")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` on success. Raise ConfigError for storage failures."""
    check_is_new(out)
    part = out.with_name(f".{out.name}.part")
    with as_config_error(f"--out {out}"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            if out.exists():
                out.rmdir()
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


_RUN_FILES = ("run.json", "checkpoints")  # a run has one of them


def model_name(text: str) -> str | None:
    """Return OWNER/NAME for a Hugging Face model: `hf:OWNER/NAME`, or `OWNER/NAME` if there is no folder OWNER."""
    if text.startswith("hf:"):
        return text[3:]
    named = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*", text)
    return text if named and not Path(named[1]).exists() else None


def download_command(name: str) -> str:
    """Return the command that downloads a Hugging Face model to the folder `name`."""
    return shlex.join(["hf", "download", model_name(name) or "OWNER/NAME", "--local-dir", name.removeprefix("hf:")])


def check_model_folder(flag: str, name: str, hint: str = "") -> None:
    """Raise ConfigError unless `name` is a folder with a run or a model. `hint` is appended to the message."""
    folder, shown = to_path(name), f"{flag} {name}".strip()
    with as_config_error(shown):
        found = files.exists(folder, kind="directory")
        names = (*_RUN_FILES, *provided("formats"))
        if found and (is_remote(name) or any((Path(folder) / file).exists() for file in names)):
            return
    wrong = "contains neither a run nor a model" if found else "no such folder"
    remedy = "give a run directory or a Hugging Face model folder"
    raise ConfigError(f"{shown}: {wrong}; {remedy} ({download_command(name)}){hint}")
