"""Checkpoint manifests (the hash of every file, written last) and checkpoint retention.

A checkpoint without a manifest is incomplete; one that differs from its manifest is damaged. Needs no JAX.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.files import MALFORMED, Folder, digest_of_file, digests_of_files, is_remote, number, parse_json

FILE, VALUES = "manifest.json", "values/metadata"
VERSION = 1  # of the file format
_REMOVAL_ATTEMPTS, _REMOVAL_PAUSE_S = 20, 0.1
_STEP = re.compile(r"0|[1-9][0-9]{0,14}")


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name; None for other names, including `020` and non-ASCII digits."""
    return int(name) if _STEP.fullmatch(name) else None


def saved_steps(folder: Folder) -> list[int]:
    """Return the steps that have a folder, oldest first. Orbax may use another name until it has written a step."""
    return sorted(step for name in files.subfolders(folder) if (step := step_of(name)) is not None)


def misnamed(folder: Folder) -> list[str]:
    """Return the names of folders that consist of digits but name no step, such as `020`."""
    return sorted(name for name in files.subfolders(folder) if name.isdecimal() and step_of(name) is None)


def _files(checkpoint: Folder) -> dict[str, int]:
    """Return the bytes of every file but the manifest, by name."""
    return {name: size for name, size in files.sizes(checkpoint).items() if name != FILE}


def write(checkpoint: Folder) -> None:
    """Flush all files to disk, hash them and write the manifest atomically."""
    files.sync(checkpoint)
    files_found = _files(checkpoint)
    digests = digests_of_files(checkpoint / name for name in files_found)
    entries = {
        name: {"bytes": size, "sha256": digest} for (name, size), digest in zip(files_found.items(), digests, strict=True)
    }
    part = checkpoint.with_name(f"{checkpoint.name}.{FILE}.part")  # not inside, where it would be an extra file
    files.write_atomic(checkpoint / FILE, json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n", part=part)


def _check_answered(checkpoint: Folder, error: OSError) -> None:
    """Raise ConfigError if an object store did not answer: unlike on a disk, that does not mean damage."""
    if is_remote(checkpoint) and not isinstance(error, FileNotFoundError):
        raise ConfigError(f"{checkpoint}: cannot be reached ({reason(error)}); try again (no file was changed)") from error


def read(checkpoint: Folder) -> dict[str, tuple[int, str]]:
    """Return the (bytes, SHA-256) of every file by name; raise ValueError if the manifest is missing or unusable."""
    try:
        with as_os_errors():
            values = parse_json((checkpoint / FILE).read_bytes())
        version = values["version"]
        entries = values["files"] if version == VERSION else {}
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except OSError as error:
        _check_answered(checkpoint, error)
        wrong = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
        raise ValueError(f"the manifest {wrong}") from None
    except MALFORMED:
        raise ValueError("the manifest is damaged") from None
    if version != VERSION:
        raise ValueError(f"the manifest has version {version}, but only version {VERSION} is supported")
    return expected


def identity(checkpoint: Folder) -> str:
    """Return one hash for the whole checkpoint, that of its manifest."""
    return digest_of_file(checkpoint / FILE)


def problem(checkpoint: Folder) -> str | None:
    """Return what is wrong with a checkpoint; None if it has exactly the files of its manifest, unchanged."""
    try:
        expected = read(checkpoint)
    except ConfigError:
        raise
    except ValueError as error:
        return str(error)
    try:
        with as_os_errors():
            found = _files(checkpoint)
            for name, (size, _) in expected.items():  # cheaper than hashing, so first
                if name not in found:
                    return f"{name} is missing"
                if found[name] != size:
                    return f"{name} has {found[name]:,} bytes instead of {size:,}"
            if extra := sorted(set(found) - set(expected)):
                return f"unexpected file {extra[0]}"
            digests = digests_of_files(checkpoint / name for name in expected)
            for (name, (_, digest)), found_digest in zip(expected.items(), digests, strict=True):
                if digest != found_digest:
                    return f"the content of {name} has changed"
        if (step := read_values(checkpoint).get("step", checkpoint.name)) != step_of(checkpoint.name) and isinstance(step, int):
            return f"it contains step {step}"
    except OSError as error:
        _check_answered(checkpoint, error)
        return f"{error.filename or checkpoint} cannot be read ({reason(error)})"
    return None


def read_values(checkpoint: Folder, *, strict: bool = False) -> dict[str, Any]:
    """Return the values saved with the state (step, configuration, evaluation, ...); empty if they cannot be read.

    With `strict`, raise OSError if the storage does not answer; missing or damaged values are still empty.
    """
    try:
        with as_os_errors():
            values = parse_json((checkpoint / VALUES).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    except OSError:
        if strict:
            raise
        return {}
    return values if isinstance(values, dict) else {}


def held_out_loss(checkpoint: Folder, *, strict: bool = False) -> float:
    """Return the held-out loss; infinite for a checkpoint that was not evaluated."""
    evaluation = read_values(checkpoint, strict=strict).get("evaluation")
    loss = number(evaluation, "eval/loss") if isinstance(evaluation, dict) else None
    return math.inf if loss is None else loss


def retained(folder: Folder, *, last: int, every: int) -> set[int]:
    """Return the steps to retain: the last `last`, multiples of `every` (0: none), the best by held-out loss.

    Only complete checkpoints count, which Orbax's retention policies cannot know. Raise OSError if the storage does not
    answer: nothing may be deleted because of that.
    """
    steps = [step for step in saved_steps(folder) if files.exists(folder / str(step) / FILE)]
    chosen = set(steps[-last:]) | {step for step in steps if every and step % every == 0}
    losses = {step: held_out_loss(folder / str(step), strict=True) for step in steps}
    best = best_of(losses)
    return chosen if best is None else chosen | {best}


def best_of(losses: Mapping[int, float]) -> int | None:
    """Return the step with the lowest loss (the latest of equals); None if no loss is finite."""
    best = min(losses, key=lambda step: (losses[step], -step), default=None)
    return best if best is not None and losses[best] < math.inf else None


_TEMPORARY = "*.orbax-checkpoint-tmp*"  # Orbax's name for a folder that it is writing


def remove_unfinished(folder: Folder) -> None:
    """Remove the remains of interrupted saves. A checkpoint without manifest or `.saving` mark is damaged and stays."""
    for part in folder.glob(_TEMPORARY):
        _remove_busy(part)
    for part in folder.glob(f"*.{FILE}.part"):
        part.unlink()
    for mark in folder.glob("*.saving"):
        checkpoint = mark.with_suffix("")
        if files.exists(checkpoint) and not files.exists(checkpoint / FILE):
            files.remove(checkpoint)
        mark.unlink()


def _remove_busy(part: Folder) -> None:
    """Remove a folder that TensorStore may still write to; after several failures leave it, which does no harm."""
    for attempt in range(_REMOVAL_ATTEMPTS):
        if attempt:
            time.sleep(_REMOVAL_PAUSE_S)
        with contextlib.suppress(OSError), as_os_errors():
            files.remove(part)
            return


def delete_unretained(folder: Folder, *, keep: int, keep_every: int) -> None:
    """Delete old checkpoints, manifest first, so that a half-deleted one never counts as complete."""
    for old in set(saved_steps(folder)) - retained(folder, last=keep, every=keep_every):
        mark = folder / f"{old}.saving"
        with contextlib.suppress(OSError):  # a full disk may have no space for the mark
            mark.touch()
        (folder / str(old) / FILE).unlink(missing_ok=True)
        files.remove(folder / str(old))
        mark.unlink(missing_ok=True)
    for leftover in folder.glob("*.unfinished"):  # a newer checkpoint is complete now
        files.remove(leftover)
    remove_unfinished(folder)
