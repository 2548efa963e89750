"""Orbax behind one small interface: numbered saves of a tree of arrays and a few plain values beside it."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.manifest import delete_unretained, remove_unfinished
from nash_mhc.checkpoint.run_lock import SEEN_S
from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import Barrier, LostProcess, from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.runtime.compat.orbax import write_replicas_in_parts
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error, as_os_errors
from nash_mhc.storage.files import Folder, is_remote, to_path

_LEAST_PART = 2**20  # bytes of an array that one of several processes writes, where all of them have it


def new_manager(folder: Folder, name: str) -> tuple[ocp.CheckpointManager, Barrier | None]:
    """A manager for the folder, which is there, and the barrier where its threads wait for other processes.

    `name` is used once, by all processes at the same time.
    """
    several = jax.process_count() > 1
    write_replicas_in_parts(_LEAST_PART if several else None)
    # A folder that cannot be made in the background leaves threads that wait for it, and hold up the exit,
    # for ten minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    processes = ocp.options.MultiprocessingOptions()
    meeting = None
    if several:
        # Orbax's usual barriers are collectives of the devices and wait forever. These have a timeout, and a name of
        # their own: one that has failed cannot be used again.
        meeting = at_once.barrier_sync_fn = Barrier(name)
        processes.active_processes = set(range(jax.process_count()))
        processes.barrier_sync_key_prefix = name
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None, create=False, async_options=at_once, multiprocessing_options=processes
    )
    handlers = {"state": ocp.StandardCheckpointHandler(), "values": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers), meeting


def close_manager(manager: ocp.CheckpointManager) -> None:
    for _ in range(8):  # a failed save is reported again by each of its threads, and only then are all of them at rest
        with contextlib.suppress(Exception):
            manager.close()
            return


_WRITTEN_MS = 1_200_000  # as long as Orbax waits for all parts
_stores = 0  # which all processes open in the same order


class Store:
    """Checkpoints of one run, in `<folder>/checkpoints`. Saves are asynchronous; leaving the context waits for them.

    `250.saving` is there while 250 is being written, until its manifest is. Orbax checks no content and calls a
    checkpoint with missing files the latest one;
    which checkpoint can be used, and which may go, is therefore decided here.

    What goes wrong with the storage is an OSError, whoever found it.
    The next save then starts with what the failed one left.

    Several processes call `save` and `wait` inside of `together`, and `give_up` when these have failed anywhere.
    """

    def __init__(self, folder: str | Folder, *, keep: int = 3, keep_every: int = 0) -> None:
        # Orbax takes a relative folder and then fails at the first save.
        self.folder = (to_path(folder) if is_remote(folder) else to_path(folder).absolute()) / "checkpoints"
        self._keep, self._keep_every = keep, keep_every
        self._verified: set[int] = set()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finishing: Future[None] | None = None
        self._failed = False
        global _stores  # noqa: PLW0603
        _stores += 1
        self._number, self._attempt = _stores, 0
        self._meeting: Barrier | None = None
        from_leader(self._make_folder)
        with as_config_error(self.folder):
            self._manager = self._new_manager()

    def _make_folder(self) -> None:
        with as_config_error(self.folder):
            files.make(self.folder)

    def _new_manager(self) -> ocp.CheckpointManager:
        manager, self._meeting = new_manager(self.folder, f"store{self._number}.{self._attempt}")
        self._place = self._where()
        return manager

    def _where(self) -> int | None:
        """What the folder's name stands for just now; another folder of that name is another one."""
        if is_remote(self.folder):
            return 0
        with contextlib.suppress(OSError):
            return self.folder.stat().st_ino
        return None

    def _check_place(self, cause: Exception | None = None) -> None:
        """OSError where the folder was moved or deleted since Orbax was given it:
        part of what it wrote is gone with it."""
        if self._where() != self._place:
            raise FileNotFoundError(errno.ENOENT, "the folder has vanished", str(self.folder)) from cause

    @contextlib.contextmanager
    def _storage_faults(self) -> Iterator[None]:
        """Whatever Orbax says about a folder
        that is gone (it may be any of a dozen things) is a fault of the storage."""
        try:
            with as_os_errors():
                yield
        except Exception as error:
            self._check_place(error)
            raise

    def _close_manager(self) -> None:
        close_manager(self._manager)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and jax.process_count() > 1 and not self._ends_by_itself(kind):
            self._stop_waiting()
            return
        try:
            # Whatever ended the run early is what it shall end with.
            with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
                self.wait()
        finally:
            self._background.shutdown()
            self._close_manager()

    def _ends_by_itself(self, kind: object) -> bool:
        """Whether the save under way ends, although this process leaves early: the others may be gone."""
        if self._finishing is None:
            return not self._failed
        return kind is not LostProcess and not futures.wait([self._finishing], timeout=SEEN_S).not_done

    def _stop_waiting(self) -> None:
        """Threads that wait for another process end now, without a checkpoint."""
        self._finishing = None
        if self._meeting is not None:
            self._meeting.given_up.set()
        self._background.shutdown(wait=False)

    def warm_up(self, state: PyTree) -> None:
        """Lets the first save be as quick as the others, in the background.

        An accelerator's arrays reach the host through pinned memory, and making that is slow: 9 s for the 11 GB of a 1b
        model, against 0.2 s for the copy itself. What was made once is kept and used again.
        """

        leaves = [leaf for leaf in jax.tree.leaves(state) if next(iter(leaf.devices())).platform != "cpu"]

        def work() -> None:
            with contextlib.suppress(Exception):  # the save itself will tell what is wrong
                copies = [jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")) for leaf in leaves]
                jax.block_until_ready(copies)

        self._background.submit(work)

    def done(self) -> bool:
        """Whether no save is under way; `wait` then returns, or raises, at once."""
        return self._finishing is None or self._finishing.done()

    def wait(self) -> None:
        """Until the save that was started, if any, is whole on disk; raises what went wrong with it."""
        if self._finishing is not None:
            finishing, self._finishing = self._finishing, None
            self._failed = True
            with self._storage_faults():
                finishing.result()
            self._failed = False

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return manifest.saved_steps(self.folder)

    def finished(self) -> list[int]:
        """Those of them whose save has ended."""
        return [step for step in self.steps() if files.exists(self.folder / str(step) / manifest.FILE)]

    def save(self, step: int, state: PyTree, values: dict[str, Any]) -> None:
        """Starts writing; returns once the state has been copied, so that the next step may reuse its memory."""
        self.wait()
        with self._storage_faults():
            attempt = self._attempt
            if self._failed:
                self.reopen()
            self._failed = True
            self._mark(step)
            items = ocp.args.Composite(state=ocp.args.StandardSave(named_leaves(state)), values=ocp.args.JsonSave(values))
            self._check_attempt(attempt)
            self._manager.save(step, args=items, force=True)
            self._check_attempt(attempt)
            self._failed = False
        # Hashing and deleting wait for Orbax's commit, in a thread of their own: the loop is not held up.
        self._finishing = self._background.submit(self._finish, step)

    def _mark(self, step: int) -> None:
        """Process 0 makes the mark, and the others see it before they write: of a disk that is gone, the folder may
        still be there, empty, and what is written to it is lost."""
        mark = self.folder / f"{step}.saving"
        if jax.process_index() == 0:
            mark.touch()
            return
        end = time.monotonic() + SEEN_S
        while not files.exists(mark):
            if time.monotonic() > end:
                raise FileNotFoundError(errno.ENOENT, "does not see what process 0 writes", str(self.folder))
            time.sleep(0.1)

    def _check_attempt(self, attempt: int) -> None:
        """A thread that was abandoned, because the save failed in another process, must not go on with it later."""
        if attempt != self._attempt:
            raise TimeoutError("this save was given up")

    def give_up(self) -> None:
        """The last save counts as failed, whether it did here or in another process: the next one starts anew."""
        self._failed = True
        if jax.process_count() > 1:
            self._stop_waiting()
            self._attempt += 1
            self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def reopen(self) -> None:
        """After a failed save: removes what it left, makes the folder if it is gone, and gives Orbax a new start."""
        attempt, self._failed = self._attempt, True  # until all of this is done
        self._close_manager()  # it would report the old failure as that of the next save
        if jax.process_index() == 0:
            files.make(self.folder)
            remove_unfinished(self.folder)
        manager = self._new_manager()
        self._check_attempt(attempt)
        self._manager = manager
        self._failed = False

    def clear(self) -> None:
        """Removes what the last, failed save left, for a run that ends."""
        if jax.process_count() == 1:
            self.reopen()
        elif jax.process_index() == 0:
            remove_unfinished(self.folder)

    def _finish(self, step: int) -> None:
        self._manager.wait_until_finished()
        self._check_place()
        if self._meeting is not None:  # every process has found that its part is where it belongs
            self._meeting(key=f"written/{step}", timeout_ms=_WRITTEN_MS)
        if jax.process_index() == 0:
            manifest.write(self.folder / str(step))
            # The checkpoint is whole: what cannot be deleted now goes after the next one.
            with contextlib.suppress(OSError), as_os_errors():
                (self.folder / f"{step}.saving").unlink(missing_ok=True)
                delete_unretained(self.folder, keep=self._keep, keep_every=self._keep_every)

    def latest_complete(self, say: Callable[[str], None], *, set_aside: bool = False) -> int | None:
        """The last step whose checkpoint is whole.
        Each one passed over is reported in a line and, with `set_aside`, renamed.

        ConfigError when all there were are damaged. A save that never ended was never a checkpoint.
        """
        damaged: set[str] = set()
        for name in manifest.misnamed(self.folder):
            say(f"{self.folder / name}: is not named after a step, and is ignored")
        for step in reversed(self.steps()):
            if (wrong := manifest.problem(self.folder / str(step))) is None:
                self._verified.add(step)
                return step
            unfinished = files.exists(self.folder / f"{step}.saving")
            reason = "its save did not end" if unfinished else f"damaged, {wrong}"
            name = f"{step}.{'unfinished' if unfinished else 'damaged'}"
            damaged |= set() if unfinished else {name if set_aside else str(step)}
            say(f"checkpoint {step}: {reason}; {f'set aside as {name}' if set_aside else 'passed over'}")
            if set_aside:
                files.move(self.folder / str(step), self.folder / name)
                (self.folder / f"{step}.saving").unlink(missing_ok=True)
                self._manager.reload()
        if lost := sorted({path.name for path in self.folder.glob("*.damaged")} | damaged):
            raise ConfigError(
                f"{self.folder}: no checkpoint is whole ({', '.join(lost)} cannot be used); bring one back from a copy, "
                f"or start anew in another --checkpoint-dir"
            )
        return None

    def mark_verified(self, step: int | None) -> None:
        """Another process has verified it, and may have set aside later ones, which may be saved again."""
        if jax.process_index():
            self._manager.reload()
        if step is not None:
            self._verified.add(step)

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The state, with the structure and shardings of `like` (ShapeDtypeStructs), and the values saved with it."""
        wanted = named_leaves(like)
        shapes = self._checked(step, wanted)
        if extra := sorted(set(shapes) - set(wanted)):
            raise ConfigError(
                f"{self.folder}/{step}: holds {extra[0]}, which this configuration has no place for (see run.json)"
            )
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), values=ocp.args.JsonRestore())
        with as_config_error(self.folder / str(step)):
            items = self._manager.restore(step, args=parts)
        return jax.tree.unflatten(jax.tree.structure(like), [items["state"][name] for name in wanted]), items["values"]

    def restore_part(self, step: int, like: PyTree, *prefixes: str) -> PyTree:
        """Only the leaves under these prefixes, each under the first that has it, laid out as `like`."""
        there, leaves = array_metadata(self.folder / str(step)), named_leaves(like)
        first = lambda name: next((p for p in prefixes if f"{p}.{name}" in there), prefixes[-1])
        wanted = {f"{first(name)}.{name}": leaf for name, leaf in leaves.items()}
        self._checked(step, wanted)
        known = {f"{prefix}.{name}" for prefix in prefixes for name in leaves}
        if extra := sorted(name for name in there if name.startswith(tuple(f"{p}." for p in prefixes)) and name not in known):
            raise ConfigError(f"{self.folder}/{step}: holds {extra[0]}, which this model has no place for (see run.json)")
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        with as_config_error(self.folder / str(step)), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(self.folder / str(step) / "state", args=arguments)
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])

    def _checked(self, step: int, wanted: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes in a checkpoint, which is whole and has all that is wanted; ConfigError."""
        if step not in self._verified and (wrong := manifest.problem(self.folder / str(step))):
            raise ConfigError(f"{self.folder}/{step}: the checkpoint is damaged, {wrong}; use another one")
        shapes = {name: tuple(e.shape) for name, e in self._manager.item_metadata(step)["state"].items()}
        for name, leaf in wanted.items():
            if shapes.get(name) != leaf.shape:
                raise ConfigError(
                    f"{self.folder}/{step}: {name} is {shapes.get(name, 'not there')}, this configuration wants {leaf.shape}; "
                    f"use the run's own settings (run.json) or another --checkpoint-dir"
                )
        return shapes


def array_metadata(checkpoint: Folder) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the whole arrays, whatever mesh wrote them; no array is read and no device is asked."""
    state = checkpoint / "state"
    found = ocp.StandardCheckpointHandler().metadata(state if is_remote(state) else state.absolute())
    return {name: (tuple(entry.shape), str(entry.dtype)) for name, entry in found.items()}
