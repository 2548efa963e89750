"""Folders that a command makes, whole or not at all, and folders of models that are only read."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from nash_mhc.config.commands import module_command
from nash_mhc.config.kits import provided
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import is_remote, to_path


def check_is_new(out: Path) -> None:
    """ConfigError where something is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; choose another folder, or remove it first")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Where to write what `out` shall hold at the end. ConfigError."""
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


_HELD = ("config.json", "run.json", "checkpoints")  # one of them in every folder of a run or a model, beside kits' formats


def model_name(text: str) -> str | None:
    """OWNER/NAME of a model on Hugging Face: hf:OWNER/NAME, or two words where no folder OWNER is here."""
    if text.startswith("hf:"):
        return text[3:]
    named = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*", text)
    return text if named and not Path(named[1]).exists() else None


def download_command(name: str) -> str:
    """The command that makes a folder of that name from a model on Hugging Face."""
    return shlex.join(["hf", "download", model_name(name) or "OWNER/NAME", "--local-dir", name.removeprefix("hf:")])


def check_model_folder(flag: str, name: str, hint: str = "") -> None:
    """ConfigError unless `name` is a folder that holds a run or a model. `hint`: what else the user may have meant."""
    folder, shown = to_path(name), f"{flag} {name}".strip()
    with as_config_error(shown):
        is_there = files.exists(folder, kind="directory")
        if is_there and (is_remote(name) or any((Path(folder) / held).exists() for held in (*_HELD, *provided("formats")))):
            return
    if is_there and (Path(folder) / "adapter_config.json").exists():
        command = module_command("nash_mhc.hub", "import", name, "--base", "BASE", "--out", "RUN")
        raise ConfigError(f"{shown}: holds adapters of PEFT without their base; make one folder of both with {command}")
    wrong = "holds neither a run nor a model" if is_there else "no such folder"
    remedy = "give the folder of a run or of a Hugging Face model"
    raise ConfigError(f"{shown}: {wrong}; {remedy} ({download_command(name)}){hint}")
