"""The hash of every file of a checkpoint, written last: what has no manifest is not finished, what differs from it is damaged.

Only the standard library: a checkpoint can be checked where no JAX is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FILE = "manifest.json"
VERSION = 1  # of the file's form


def numbered(folder: Path) -> list[int]:
    """Steps that have a folder of their own, oldest first; what Orbax is still writing has another name."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / FILE)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing lets other threads run
        return list(pool.map(_digest, paths))


def write(checkpoint: Path) -> None:
    """Hashes what is there. All of the manifest appears, or nothing of it."""
    found = _files(checkpoint)
    entries = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(found, _digests(found), strict=True)
    }
    part = checkpoint.with_name(f"{checkpoint.name}.{FILE}.part")  # beside the checkpoint, whose files are all accounted for
    part.write_text(json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n")
    part.replace(checkpoint / FILE)


def read(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, SHA-256); ValueError says what is wrong with the manifest itself."""
    try:
        values = json.loads((checkpoint / FILE).read_text())
        if values["version"] != VERSION:
            raise ValueError(f"its manifest has form {values['version']}, this version reads {VERSION}")
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in values["files"].items()}
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ValueError(f"its manifest {reason}") from None
    except (json.JSONDecodeError, UnicodeError, KeyError, TypeError, AttributeError):
        raise ValueError("its manifest is damaged") from None


def identity(checkpoint: Path) -> str:
    """One hash that stands for all files: two checkpoints that have the same one are the same."""
    return _digest(checkpoint / FILE)


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None when every file is there, whole and unchanged, and no other."""
    try:
        expected = read(checkpoint)
    except ValueError as error:
        return str(error)
    try:
        for name, (size, _) in expected.items():  # before any file is read as a whole
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        if extra := [path for path in _files(checkpoint) if path.relative_to(checkpoint).as_posix() not in expected]:
            return f"{extra[0].relative_to(checkpoint)} does not belong to it"
        for (name, (_, digest)), found_digest in zip(
            expected.items(), _digests(checkpoint / name for name in expected), strict=True
        ):
            if digest != found_digest:
                return f"the content of {name} has changed"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


def values_of(checkpoint: Path) -> dict[str, Any]:
    """The plain values beside the state (step, configuration, tokens seen, evaluation); empty when they cannot be read."""
    try:
        values = json.loads((checkpoint / "values" / "metadata").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def held_out_loss(checkpoint: Path) -> float:
    """Infinite for a checkpoint that was not evaluated."""
    loss = (values_of(checkpoint).get("evaluation") or {}).get("eval/loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else math.inf


def kept(folder: Path, *, last: int, every: int) -> set[int]:
    """Of the finished checkpoints: the last few, those at multiples of `every` (0: none) and the best by held-out loss."""
    steps = [step for step in numbered(folder) if (folder / str(step) / FILE).is_file()]
    chosen = set(steps[-last:]) | {step for step in steps if every and step % every == 0}
    losses = {step: held_out_loss(folder / str(step)) for step in steps}
    best = min(steps, key=lambda step: (losses[step], -step), default=None)
    return chosen | {best} if best is not None and losses[best] < math.inf else chosen
