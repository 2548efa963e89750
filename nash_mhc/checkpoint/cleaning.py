"""Deletes what is no longer needed beside the checkpoints of a run: old ones, and what failed saves have left."""

from __future__ import annotations

import contextlib

from nash_mhc.checkpoint import manifest
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.paths import Folder

_BEING_WRITTEN = "*.orbax-checkpoint-tmp*"  # Orbax's name for a folder that it has not finished


def remove_unfinished(folder: Folder) -> None:
    """What a save that never ended left;
    a checkpoint without a manifest that has no mark was whole once, and stays."""
    for part in folder.glob(_BEING_WRITTEN):
        with (
            contextlib.suppress(OSError),
            as_os_errors(),
        ):  # TensorStore may still be at it; nobody takes it for a checkpoint
            files.remove(part)
    for part in folder.glob(f"*.{manifest.FILE}.part"):
        part.unlink()
    for mark in folder.glob("*.saving"):
        checkpoint = mark.with_suffix("")
        if files.exists(checkpoint) and not files.exists(checkpoint / manifest.FILE):
            files.remove(checkpoint)
        mark.unlink()


def make_room(folder: Folder, *, keep: int, keep_every: int) -> None:
    """Of what goes, the manifest goes first, so that half of it is never taken for whole."""
    for old in set(manifest.numbered(folder)) - manifest.kept(folder, last=keep, every=keep_every):
        mark = folder / f"{old}.saving"
        with contextlib.suppress(OSError):  # on a full disk there may be no room for it, and this makes some
            mark.touch()
        (folder / str(old) / manifest.FILE).unlink(missing_ok=True)
        files.remove(folder / str(old))
        mark.unlink(missing_ok=True)
    for leftover in folder.glob("*.unfinished"):  # a newer one is whole now
        files.remove(leftover)
    remove_unfinished(folder)
