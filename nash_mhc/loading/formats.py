"""Model directories that are not runs. Kits register their formats, and are loaded when such a directory is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nash_mhc.checkpoint.run_folder import RUN
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.storage.errors import reason
from nash_mhc.storage.files import Folder, is_remote

HUB = "config.json"  # names the format of Hugging Face models
RUN_COPY = "hub"  # subfolder of a run with the companion files of the model that it started from


class ModelFormat(NamedTuple):
    """How to read a model directory that is not a run."""

    config: Callable[[Path], RunConfig]
    read: Callable[[Path, Any], Any]  # (folder, shapes with shardings) -> model
    check: Callable[[Path], object] = lambda path: None  # ConfigError if the weights do not match the configuration
    stops: Callable[[Path], Sequence[int]] = lambda path: ()  # end-of-text tokens, in addition to that of the tokenizer
    dtype: str | None = None  # compute dtype; None: that of the configuration
    is_initial: bool = False  # whether a run can start from such a folder; it then has the next two fields
    identity: Callable[[Path], str] = lambda path: ""  # digest of the weights
    companions: Callable[[Path], Mapping[str, bytes]] = lambda path: {}  # files that a run copies: name -> content
    instead: str = ""  # what a run can start from, if not from such a folder
    transformers_config: Callable[[RunConfig], dict[str, Any] | None] = lambda cfg: None  # config.json in transformers


# By the name of a file in such a directory. A directory with run.json is a run.
FORMATS: Registry[ModelFormat] = Registry("formats", {})


def format_of(folder: str | Folder) -> ModelFormat | None:
    """Return how to read a model directory, or None for a run."""
    path = Path(str(folder)).expanduser()
    if is_remote(folder) or (path / RUN).exists():
        return None
    return next((FORMATS[name] for name in FORMATS if (path / name).is_file()), None)


def initial_format(flag: str, folder: str) -> ModelFormat | None:
    """Return the format of a folder that a run starts from, or None for a run. Raise ConfigError if it cannot start."""
    form = format_of(folder)
    if form is not None and not form.is_initial:
        form.config(Path(folder))  # a more precise error, if it is incomplete
        raise ConfigError(f"{flag} {folder}: a run cannot start from a folder of this format; {form.instead}")
    return form


def copied_companions(folder: Path) -> dict[str, bytes]:
    """Return the files to copy into a run that starts from this model directory: path in the run -> content."""
    folder = folder / RUN_COPY if format_of(folder) is None else folder
    form = format_of(folder)
    return {} if form is None else {f"{RUN_COPY}/{name}": content for name, content in form.companions(folder).items()}


# --- arrays in safetensors files --------------------------------------------------------------------------------------


def cast(name: str, array: np.ndarray, dtype: Any, alternatives: str) -> np.ndarray:
    """Return the array in `dtype`.

    Raise ConfigError if a finite value would overflow. `alternatives`: dtypes to suggest.
    """
    with np.errstate(over="ignore"):  # the error says more than numpy's warning
        narrow = array.astype(dtype)
    overflowed = np.isfinite(array) & ~np.isfinite(narrow)
    if not overflowed.any():
        return narrow
    largest, limit = np.abs(array[overflowed].astype(np.float64)).max(), float(ml_dtypes.finfo(narrow.dtype).max)
    raise ConfigError(
        f"--dtype {narrow.dtype}: {name} has a value of {largest:.6g}, above the maximum of {limit:.6g}; "
        f"use --dtype {alternatives}"
    )


def save_tensors(arrays: dict[str, np.ndarray], file: Path, metadata: dict[str, str] | None = None) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, file, metadata=metadata)
    file.chmod(0o644)  # safetensors creates it readable by the owner only


def load_tensors(file: Path, remedy: str = "") -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    try:
        found: dict[str, np.ndarray] = load_file(file)
    except Exception as error:  # safetensors defines no common base class
        cause = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{file}: cannot be read ({cause}){remedy}") from None
    return found
