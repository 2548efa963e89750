"""The manifest of a checkpoint, written last with the hash of every file, and which checkpoints are retained.

A checkpoint without a manifest is unfinished; one that differs from it is damaged. Only the standard library, so that
a checkpoint can be verified without JAX.
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
from nash_mhc.storage.files import Folder, digest_of_file, digests_of_files, is_remote
from nash_mhc.storage.json_files import MALFORMED, number, parse_json

FILE = "manifest.json"
VERSION = 1  # of the file's form
_REMOVAL_ATTEMPTS, _REMOVAL_PAUSE_S = 20, 0.1
_STEP = re.compile(r"0|[1-9][0-9]{0,14}")


def step_of(name: str) -> int | None:
    """Return the step that a checkpoint's folder is named after; None for every other name.

    A step has one spelling: `020` or other scripts' digits would stand for a folder that is not there.
    """
    return int(name) if _STEP.fullmatch(name) else None


def saved_steps(folder: Folder) -> list[int]:
    """Steps that have a folder of their own, oldest first; what Orbax is still writing may have another name."""
    return sorted(step for name in files.subfolders(folder) if (step := step_of(name)) is not None)


def misnamed(folder: Folder) -> list[str]:
    """Folders with digits for a name that are nevertheless no step's, such as `020`."""
    return sorted(name for name in files.subfolders(folder) if name.isdecimal() and step_of(name) is None)


def _files(checkpoint: Folder) -> dict[str, int]:
    """Name -> bytes of what is to be hashed."""
    return {name: size for name, size in files.sizes(checkpoint).items() if name != FILE}


def write(checkpoint: Folder) -> None:
    """Hashes what is there, once it is safely on the disk. All of the manifest appears, or nothing of it."""
    files.sync(checkpoint)
    found = _files(checkpoint)
    digests = digests_of_files(checkpoint / name for name in found)
    entries = {name: {"bytes": size, "sha256": digest} for (name, size), digest in zip(found.items(), digests, strict=True)}
    part = checkpoint.with_name(f"{checkpoint.name}.{FILE}.part")  # beside the checkpoint, whose files are all accounted for
    files.write_atomic(checkpoint / FILE, json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n", part=part)


def _not_answered(checkpoint: Folder, error: OSError) -> None:
    """A disk that cannot read a file has lost it. An object store that does not answer has lost nothing:
    ConfigError."""
    if is_remote(checkpoint) and not isinstance(error, FileNotFoundError):
        raise ConfigError(f"{checkpoint}: cannot be reached ({reason(error)}); nothing was changed, try again") from error


class _OtherForm(ValueError):
    """Written by another version."""


def read(checkpoint: Folder) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, SHA-256); ValueError says what is wrong with the manifest itself."""
    try:
        with as_os_errors():
            values = parse_json((checkpoint / FILE).read_bytes())
        if values["version"] != VERSION:
            raise _OtherForm(f"its manifest has form {values['version']}, this version reads {VERSION}")
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
    except OSError as error:
        _not_answered(checkpoint, error)
        wrong = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
        raise ValueError(f"its manifest {wrong}") from None
    except _OtherForm:
        raise
    except MALFORMED:
        raise ValueError("its manifest is damaged") from None


def identity(checkpoint: Folder) -> str:
    """One hash that stands for all files: two checkpoints that have the same one are the same."""
    return digest_of_file(checkpoint / FILE)


def problem(checkpoint: Folder) -> str | None:
    """What is wrong with a checkpoint, in a few words;
    None when every file is there, whole and unchanged, and no other."""
    try:
        expected = read(checkpoint)
    except ConfigError:
        raise
    except ValueError as error:
        return str(error)
    try:
        with as_os_errors():
            found = _files(checkpoint)
            for name, (size, _) in expected.items():  # before any file is read as a whole
                if name not in found:
                    return f"{name} is missing"
                if found[name] != size:
                    return f"{name} has {found[name]:,} bytes instead of {size:,}"
            if extra := sorted(set(found) - set(expected)):
                return f"{extra[0]} does not belong to it"
            digests = digests_of_files(checkpoint / name for name in expected)
            for (name, (_, digest)), found_digest in zip(expected.items(), digests, strict=True):
                if digest != found_digest:
                    return f"the content of {name} has changed"
        if (step := read_values(checkpoint).get("step", checkpoint.name)) != step_of(checkpoint.name) and isinstance(step, int):
            return f"it holds step {step} under another name"
    except OSError as error:
        _not_answered(checkpoint, error)
        return f"{error.filename or checkpoint} cannot be read ({reason(error)})"
    return None


def read_values(checkpoint: Folder, *, strict: bool = False) -> dict[str, Any]:
    """The plain values beside the state (step, configuration, tokens seen, evaluation); empty when they cannot be read.

    With `strict`, only when they are not there or damaged: what the storage cannot say just now is an OSError.
    """
    try:
        with as_os_errors():
            values = parse_json((checkpoint / "values" / "metadata").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    except OSError:
        if strict:
            raise
        return {}
    return values if isinstance(values, dict) else {}


def held_out_loss(checkpoint: Folder, *, strict: bool = False) -> float:
    """Infinite for a checkpoint that was not evaluated."""
    evaluation = read_values(checkpoint, strict=strict).get("evaluation")
    loss = number(evaluation, "eval/loss") if isinstance(evaluation, dict) else None
    return math.inf if loss is None else loss


def retained(folder: Folder, *, last: int, every: int) -> set[int]:
    """Of the finished checkpoints: the last few, those at multiples of `every` (0: none) and the best by held-out loss.

    Orbax's retention policies know nothing of manifests: here a checkpoint without one does not count.

    OSError where that cannot be found out just now: nothing may be deleted for want of an answer.
    """
    steps = [step for step in saved_steps(folder) if files.exists(folder / str(step) / FILE)]
    chosen = set(steps[-last:]) | {step for step in steps if every and step % every == 0}
    losses = {step: held_out_loss(folder / str(step), strict=True) for step in steps}
    best = best_of(losses)
    return chosen if best is None else chosen | {best}


def best_of(losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, of equal ones the last; None where no loss is finite."""
    best = min(losses, key=lambda step: (losses[step], -step), default=None)
    return best if best is not None and losses[best] < math.inf else None


_BEING_WRITTEN = "*.orbax-checkpoint-tmp*"  # Orbax's name for a folder that it has not finished


def remove_unfinished(folder: Folder) -> None:
    """What a save that never ended left;
    a checkpoint without a manifest that has no mark was whole once, and stays."""
    for part in folder.glob(_BEING_WRITTEN):
        _remove_busy(part)
    for part in folder.glob(f"*.{FILE}.part"):
        part.unlink()
    for mark in folder.glob("*.saving"):
        checkpoint = mark.with_suffix("")
        if files.exists(checkpoint) and not files.exists(checkpoint / FILE):
            files.remove(checkpoint)
        mark.unlink()


def _remove_busy(part: Folder) -> None:
    """Remove a directory that TensorStore may still write to. Retry, then leave it: its name is no checkpoint's."""
    for attempt in range(_REMOVAL_ATTEMPTS):
        if attempt:
            time.sleep(_REMOVAL_PAUSE_S)
        with contextlib.suppress(OSError), as_os_errors():
            files.remove(part)
            return


def delete_unretained(folder: Folder, *, keep: int, keep_every: int) -> None:
    """Of what goes, the manifest goes first, so that half of it is never taken for whole."""
    for old in set(saved_steps(folder)) - retained(folder, last=keep, every=keep_every):
        mark = folder / f"{old}.saving"
        with contextlib.suppress(OSError):  # on a full disk there may be no room for it, and this makes some
            mark.touch()
        (folder / str(old) / FILE).unlink(missing_ok=True)
        files.remove(folder / str(old))
        mark.unlink(missing_ok=True)
    for leftover in folder.glob("*.unfinished"):  # a newer one is whole now
        files.remove(leftover)
    remove_unfinished(folder)
