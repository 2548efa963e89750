"""Orbax behind one small interface: numbered saves of a tree of arrays and a few plain values beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from nash_mhc.checkpoint import manifest
from nash_mhc.config.schema import ConfigError


def _flat(tree: PyTree) -> dict[str, Any]:
    """Leaves by their readable path (`model.layers.ffn.up_DF`): the file does not depend on how Python nests them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


class Store:
    """Checkpoints of one run, in `<folder>/checkpoints`. Saves are asynchronous; leaving the context waits for them.

    `250.saving` is there while 250 is being written, until its manifest is. Orbax checks no content and calls a checkpoint
    with missing files the latest one; which checkpoint can be used, and which may go, is therefore decided here.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, keep_every: int = 0) -> None:
        # Orbax takes a relative folder and then fails at the first save.
        self.folder = Path(folder).absolute() / "checkpoints"
        self._keep, self._keep_every = keep, keep_every
        self._verified: set[int] = set()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finishing: Future[None] | None = None
        options = ocp.CheckpointManagerOptions(max_to_keep=None, create=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "values": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._manager.close()

    def wait(self) -> None:
        """Until the save that was started, if any, is whole on disk; raises what went wrong with it."""
        if self._finishing is not None:
            finishing, self._finishing = self._finishing, None
            finishing.result()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return manifest.numbered(self.folder)

    def save(self, step: int, state: PyTree, values: dict[str, Any]) -> None:
        """Starts writing; returns once the state has been copied, so that the next step may reuse its memory."""
        self.wait()
        (self.folder / f"{step}.saving").touch()
        items = ocp.args.Composite(state=ocp.args.StandardSave(_flat(state)), values=ocp.args.JsonSave(values))
        self._manager.save(step, args=items, force=True)
        # Hashing and deleting wait for Orbax's commit, in a thread of their own: the loop is not held up.
        self._finishing = self._background.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """The manifest, then room: of what goes, the manifest goes first, so that half of it is never taken for whole."""
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            manifest.write(self.folder / str(step))
            (self.folder / f"{step}.saving").unlink(missing_ok=True)
            for old in set(self.steps()) - manifest.kept(self.folder, last=self._keep, every=self._keep_every):
                (self.folder / f"{old}.saving").touch()
                (self.folder / str(old) / manifest.FILE).unlink(missing_ok=True)
                shutil.rmtree(self.folder / str(old))
                (self.folder / f"{old}.saving").unlink()
            for leftover in self.folder.glob("*.unfinished"):  # a newer one is whole now
                shutil.rmtree(leftover)

    def newest(self, say: Callable[[str], None], *, set_aside: bool = False) -> int | None:
        """The last step whose checkpoint is whole. Each one passed over is told in a line and, with `set_aside`, renamed.

        ConfigError when all there were are damaged. A save that never ended was never a checkpoint.
        """
        damaged: set[str] = set()
        for step in reversed(self.steps()):
            if (wrong := manifest.problem(self.folder / str(step))) is None:
                self._verified.add(step)
                return step
            unfinished = (self.folder / f"{step}.saving").exists()
            reason = "its save did not end" if unfinished else f"damaged, {wrong}"
            name = f"{step}.{'unfinished' if unfinished else 'damaged'}"
            damaged |= set() if unfinished else {name if set_aside else str(step)}
            say(f"checkpoint {step}: {reason}; {f'set aside as {name}' if set_aside else 'passed over'}")
            if set_aside:
                shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / str(step)).rename(self.folder / name)
                (self.folder / f"{step}.saving").unlink(missing_ok=True)
                self._manager.reload()
        if lost := sorted({path.name for path in self.folder.glob("*.damaged")} | damaged):
            raise ConfigError(
                f"{self.folder}: no checkpoint is whole ({', '.join(lost)} cannot be used); bring one back from a copy, "
                f"or start anew in another --checkpoint-dir"
            )
        return None

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state, with the structure and shardings of `like` (ShapeDtypeStructs), and the values saved with it."""
        if step not in self._verified and (wrong := manifest.problem(self.folder / str(step))):
            raise ConfigError(f"{self.folder}/{step}: the checkpoint is damaged, {wrong}; use another one")
        wanted = _flat(like)
        saved = self._manager.item_metadata(step)["state"]
        shapes = {name: tuple(entry.shape) for name, entry in saved.items()}
        for name, leaf in wanted.items():
            if shapes.get(name) != leaf.shape:
                raise ConfigError(
                    f"{self.folder}/{step}: {name} is {shapes.get(name, 'not there')}, this configuration wants {leaf.shape}; "
                    f"use the run's own settings (run.json) or another --checkpoint-dir"
                )
        if extra := sorted(set(shapes) - set(wanted)):
            raise ConfigError(
                f"{self.folder}/{step}: holds {extra[0]}, which this configuration has no place for (see run.json)"
            )
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), values=ocp.args.JsonRestore())
        items = self._manager.restore(step, args=parts)
        return jax.tree.unflatten(jax.tree.structure(like), [items["state"][name] for name in wanted]), items["values"]


def arrays_of(checkpoint: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the whole arrays, whatever mesh wrote them; no array is read and no device is asked."""
    found = ocp.StandardCheckpointHandler().metadata((checkpoint / "state").absolute())
    return {name: (tuple(entry.shape), str(entry.dtype)) for name, entry in found.items()}
