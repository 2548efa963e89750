"""Orbax behind one small interface: numbered saves of a tree of arrays and a few plain values beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from nash_mhc.config.schema import ConfigError


def _flat(tree: PyTree) -> dict[str, Any]:
    """Leaves by their readable path (`model.layers.ffn.up_DF`): the file does not depend on how Python nests them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


class Store:
    """Checkpoints of one run, in `<folder>/checkpoints`. Saves are asynchronous; leaving the context waits for them."""

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        # Orbax takes a relative folder and then fails at the first save.
        self.folder = Path(folder).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "values": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, values: dict[str, Any]) -> None:
        """Starts writing; returns once the state has been copied, so that the next step may reuse its memory."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(_flat(state)), values=ocp.args.JsonSave(values))
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state, with the structure and shardings of `like` (ShapeDtypeStructs), and the values saved with it."""
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
