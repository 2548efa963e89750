"""Checkpoint storage with Orbax: numbered saves of a tree of arrays and a few JSON values."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.manifest import delete_unretained, remove_unfinished
from nash_mhc.checkpoint.run_lock import SEEN_S, wait_for_any
from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import Barrier, LostProcess, from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.runtime.compat.orbax import write_replicas_in_parts
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error, as_os_errors
from nash_mhc.storage.files import Folder, is_remote, parse_json, to_path

log = logging.getLogger(__name__)
_MIN_SLICE_BYTES = 2**20  # smallest slice of a replicated array that a process writes on its own
_BARRIER_MS = 1_200_000  # Orbax's own timeout for writing all parts
_stores = 0  # number of stores opened so far, the same in all processes


class Store:
    """The checkpoints of a run, in `<folder>/checkpoints`. Saves are asynchronous; leaving the context waits for them.

    The mark `250.saving` exists from the start of a save until its manifest is written. Orbax verifies no content, so
    this class decides which checkpoints are complete and which may be deleted.

    Storage failures are OSErrors. The next save then removes what the failed one left. Several processes call `save`
    and `wait` inside `run_collectively`, and all of them call `give_up` if one fails.
    """

    def __init__(self, folder: str | Folder, *, keep: int = 3, keep_every: int = 0) -> None:
        # Orbax accepts a relative path but fails at the first save.
        self.folder = (to_path(folder) if is_remote(folder) else to_path(folder).absolute()) / "checkpoints"
        self._keep, self._keep_every = keep, keep_every
        self.verified: set[int | None] = set()  # steps that need no further check, even if another process checked them
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finishing: Future[None] | None = None
        self._failed = False
        global _stores  # noqa: PLW0603
        _stores += 1
        self._number, self._attempt = _stores, 0
        self._barrier: Barrier | None = None  # of the last save
        self._inode: int | None = None  # of the folder, at the start of the last save

        def make_folder() -> None:
            with as_config_error(self.folder):
                files.make(self.folder)

        from_leader(make_folder)
        write_replicas_in_parts(_MIN_SLICE_BYTES if jax.process_count() > 1 else None)

    def _processes(self, purpose: object) -> ocp.options.MultiprocessingOptions:
        """Return options that let processes wait for each other without devices, which would have no timeout."""
        everyone, name = set(range(jax.process_count())), f"store{self._number}.{self._attempt}.{purpose}"
        return ocp.options.MultiprocessingOptions(active_processes=everyone, barrier_sync_key_prefix=name)

    def _checkpointer(self, step: int) -> tuple[ocp.AsyncCheckpointer, Barrier]:
        """Return a checkpointer for one save and its threads' barrier; after a failure they cannot be used again.

        Orbax's CheckpointManager would add a list of steps, which is wrong once checkpoints are damaged or renamed.
        """
        processes = self._processes(step)
        barrier = Barrier(processes.barrier_sync_key_prefix)
        # If creating a folder in the background fails, threads wait for it and delay the exit by ten minutes.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=barrier)
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=processes, async_options=options),
            state=ocp.StandardCheckpointHandler(), values=ocp.JsonCheckpointHandler(),
        )  # fmt: skip
        return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=processes), barrier

    def _current_inode(self) -> int | None:
        """Return what identifies the folder, to notice when it is replaced by another one of the same name."""
        if is_remote(self.folder):
            return 0
        with contextlib.suppress(OSError):
            return self.folder.stat().st_ino
        return None

    def _check_inode(self, cause: Exception | None = None) -> None:
        """Raise OSError if the folder was moved or deleted since the save began, with some of its files."""
        if self._current_inode() != self._inode:
            raise FileNotFoundError(errno.ENOENT, "the folder has vanished", str(self.folder)) from cause

    @contextlib.contextmanager
    def _storage_faults(self) -> Iterator[None]:
        """Raise storage failures as OSError, including any error of Orbax about a folder that is gone."""
        try:
            with as_os_errors():
                yield
        except Exception as error:
            self._check_inode(error)
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and jax.process_count() > 1 and not self._save_will_end(kind):
            self._stop_waiting()
            return
        try:
            # The original error must not be replaced by a failed save.
            with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
                self.wait()
        finally:
            self._background.shutdown()

    def _save_will_end(self, kind: object) -> bool:
        """Return whether the save in progress ends although this process fails: the other processes may be gone."""
        if self._finishing is None:
            return not self._failed
        return kind is not LostProcess and not futures.wait([self._finishing], timeout=SEEN_S).not_done

    def _stop_waiting(self) -> None:
        """End the threads that wait for other processes."""
        self._finishing = None
        if self._barrier is not None:
            self._barrier.cancelled.set()
        self._background.shutdown(wait=False)

    def warm_up(self, state: PyTree) -> None:
        """Allocate pinned host memory in the background, so that the first save is as fast as the others.

        The allocation takes 9 s for the 11 GB of a 1b model; the copy itself takes 0.2 s. JAX reuses the memory.
        """
        leaves = [leaf for leaf in jax.tree.leaves(state) if next(iter(leaf.devices())).platform != "cpu"]

        def work() -> None:
            with contextlib.suppress(Exception):  # the save itself will report the problem
                copies = [jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")) for leaf in leaves]
                jax.block_until_ready(copies)

        self._background.submit(work)

    def done(self) -> bool:
        """Return whether no save is in progress; `wait` then returns or raises immediately."""
        return self._finishing is None or self._finishing.done()

    def wait(self) -> None:
        """Wait until the save in progress is complete; raise its failure."""
        if self._finishing is not None:
            finishing, self._finishing = self._finishing, None
            self._failed = True
            with self._storage_faults():
                finishing.result()
            self._failed = False

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        return manifest.saved_steps(self.folder)

    def finished(self) -> list[int]:
        """Return the steps that have a manifest."""
        return [step for step in self.steps() if files.exists(self.folder / str(step) / manifest.FILE)]

    def save(self, step: int, state: PyTree, values: dict[str, Any]) -> None:
        """Start a save; return once the state is copied and the next step may overwrite it."""
        self.wait()
        with self._storage_faults():
            attempt = self._attempt
            if self._failed:
                self.recover()
            self._failed = True
            self._inode = self._current_inode()
            self._mark(step)
            items = ocp.args.Composite(state=ocp.args.StandardSave(named_leaves(state)), values=ocp.args.JsonSave(values))
            self._check_attempt(attempt)
            checkpointer, barrier = self._checkpointer(step)
            self._barrier = barrier
            checkpointer.save(self.folder / str(step), args=items, force=True)
            self._check_attempt(attempt)
            self._failed = False
        # Hashing and deleting must wait for Orbax's commit, so they run in a thread.
        self._finishing = self._background.submit(self._finish, step, checkpointer, barrier)

    def _mark(self, step: int) -> None:
        """Create the mark in process 0 and wait for it in the others: a lost disk may look like an empty folder."""
        mark = self.folder / f"{step}.saving"
        if jax.process_index() == 0:
            mark.touch()
        elif not wait_for_any(mark):
            raise FileNotFoundError(errno.ENOENT, "does not see the files of process 0", str(self.folder))

    def _check_attempt(self, attempt: int) -> None:
        """Stop a thread whose save was given up because it failed in another process."""
        if attempt != self._attempt:
            raise TimeoutError("this save was abandoned")

    def give_up(self) -> None:
        """Mark the last save as failed, here or in another process, so that the next one starts clean."""
        self._failed = True
        if jax.process_count() > 1:
            self._stop_waiting()
            self._attempt += 1
            self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def recover(self) -> None:
        """Remove the files of a failed save, and recreate the folder if needed."""
        if jax.process_index() == 0:
            files.make(self.folder)
            remove_unfinished(self.folder)

    def _finish(self, step: int, checkpointer: ocp.AsyncCheckpointer, barrier: Barrier) -> None:
        checkpointer.close()  # waits for Orbax's commit, and raises its failure
        self._check_inode()
        barrier(key="written", timeout_ms=_BARRIER_MS)  # all processes have checked their part
        if jax.process_index() == 0:
            manifest.write(self.folder / str(step))
            # The checkpoint is complete, so failures no longer matter: the next save cleans up.
            with contextlib.suppress(OSError), as_os_errors():
                (self.folder / f"{step}.saving").unlink(missing_ok=True)
                delete_unretained(self.folder, keep=self._keep, keep_every=self._keep_every)

    def latest_complete(self, *, set_aside: bool = False) -> int | None:
        """Return the latest step with a complete checkpoint; None if there never was one.

        Unusable ones are reported and, with `set_aside`, renamed. Raise ConfigError if all checkpoints are damaged, not
        counting interrupted saves.
        """
        damaged: set[str] = set()
        for name in manifest.misnamed(self.folder):
            log.warning(f"{self.folder / name}: ignored, because its name is not a step")
        for step in reversed(self.steps()):
            if (wrong := manifest.problem(self.folder / str(step))) is None:
                self.verified.add(step)
                return step
            unfinished = files.exists(self.folder / f"{step}.saving")
            reason = "its save was interrupted" if unfinished else f"damaged, {wrong}"
            name = f"{step}.{'unfinished' if unfinished else 'damaged'}"
            damaged |= set() if unfinished else {name if set_aside else str(step)}
            log.warning(f"checkpoint {step}: {reason}; {f'renamed to {name}' if set_aside else 'skipped'}")
            if set_aside:
                files.move(self.folder / str(step), self.folder / name)
                (self.folder / f"{step}.saving").unlink(missing_ok=True)
        if lost := sorted({path.name for path in self.folder.glob("*.damaged")} | damaged):
            raise ConfigError(
                f"{self.folder}: all checkpoints are damaged ({', '.join(lost)}); restore one from a backup, or start again "
                f"in another --checkpoint-dir"
            )
        return None

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Return the state, with the structure and shardings of `like` (ShapeDtypeStructs), and the saved values."""
        state, checkpoint = self.restore_part(step, like), self.folder / str(step)
        with as_config_error(checkpoint):
            return state, parse_json((checkpoint / manifest.VALUES).read_bytes())

    def restore_part(self, step: int, like: PyTree, *prefixes: str) -> PyTree:
        """Restore the leaves of `like`, each from the first of `prefixes` (such as "model") that has it."""
        checkpoint, leaves = self.folder / str(step), named_leaves(like)
        starts = tuple(f"{prefix}." for prefix in prefixes) or ("",)
        if step not in self.verified and (wrong := manifest.problem(checkpoint)):
            raise ConfigError(f"{checkpoint}: damaged ({wrong}); use another checkpoint")
        saved = array_metadata(checkpoint)
        first = lambda name: next((start for start in starts if start + name in saved), starts[-1])
        wanted = {first(name) + name: leaf for name, leaf in leaves.items()}
        for name, leaf in wanted.items():
            shape, _ = saved.get(name, ("missing", ""))
            if shape != leaf.shape:
                raise ConfigError(
                    f"{checkpoint}: {name} is {shape}, but this configuration needs {leaf.shape}; "
                    f"use the run's own settings (run.json) or another --checkpoint-dir"
                )
        known = {start + name for start in starts for name in leaves}
        if extra := sorted(name for name in saved if name.startswith(starts) and name not in known):
            raise ConfigError(f"{checkpoint}: contains {extra[0]}, which this configuration does not have (see run.json)")
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=self._processes("restore"))
        with as_config_error(checkpoint), reader:
            restored = reader.restore(checkpoint / "state", args=arguments)
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])


def array_metadata(checkpoint: Folder) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the (global shape, dtype) of every array by name, without reading arrays or using devices."""
    state = checkpoint / "state"
    metadata = ocp.StandardCheckpointHandler().metadata(state if is_remote(state) else state.absolute())
    return {name: (tuple(entry.shape), str(entry.dtype)) for name, entry in metadata.items()}
