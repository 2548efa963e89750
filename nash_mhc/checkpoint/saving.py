"""Saves checkpoints despite storage failures: reports and retries a failed save, and stops the run only if it must."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from nash_mhc.checkpoint.run_folder import CHECKPOINTS, RunFolder
from nash_mhc.checkpoint.run_lock import Owner
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import resume_command
from nash_mhc.config.humanize import duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import any_process, run_collectively
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors, reason

log = logging.getLogger(__name__)
_ATTEMPTS_WHILE_STOPPING = 3  # with the first pauses 30 s: many schedulers kill after that
_POLL_S = 1.0  # how often a pause checks whether the run is asked to stop
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Saver:
    """Saves and retries. Pauses after failures double up to `longest_pause`; after `attempts` failures in a row the run
    stops.

    `texts` (file name -> content) are files of the run directory that are restored if someone deletes it. All
    processes of a run save together. They must take the same decisions, so each decision uses `any_process`.
    """

    def __init__(
        self,
        store: Store,
        texts: Mapping[str, str | bytes],
        *,
        owner: Owner = Owner(),
        last: int | None = None,
        attempts: int = 8,  # with the default pauses about 15 minutes
        first_pause: float = 10.0,
        longest_pause: float = 300.0,
        stopping: Callable[[], bool] = lambda: False,
        free_space: Callable[[], int] = lambda: 0,
    ) -> None:
        """`last` is the step that was saved last, if any.

        `stopping` returns whether the run was asked to stop; then pauses are short. `free_space` deletes what can be
        regenerated from a full disk and returns the bytes.
        """
        self._store, self._texts, self._attempts, self._owner = store, texts, attempts, owner
        self._run = RunFolder(store.folder.parent)
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._stopping, self._free_space = stopping, free_space
        self._saving: int | None = None  # the step whose save is in progress
        self.last = last
        self._failures = 0  # in a row
        self._retry_at: float | None = None

    def retry_due(self) -> bool:
        """Return whether to retry a failed save after this step.

        With several processes always False, because agreeing after every step would be slow: they retry at the next
        checkpoint interval.
        """
        if jax.process_count() > 1:
            return False
        if self._saving is not None and self._store.done():
            self._finish()
        return self._retry_at is not None and time.monotonic() >= self._retry_at

    def save(self, state: PyTree, step: int, values: dict[str, Any], *, wait: bool = False) -> None:
        """Start a save; during the pause after a failure, do nothing.

        With `wait`, save at once and return when the checkpoint is complete. Raise ConfigError after too many failures.
        """
        self._finish(wait=wait)
        while self.last != step and (wait or self._retry_at is None or any_process(time.monotonic() >= self._retry_at)):
            self._saving, self._retry_at = step, None
            missing, only_lock = self._missing()
            # If only some processes miss the folder, they have lost the disk and must not create another folder.
            gone = any_process(only_lock) or not any_process(not missing)
            if gone:
                self._store.give_up()  # so that this save starts from a clean state

            def begin(missing: list[str] = missing, gone: bool = gone) -> None:
                if gone:
                    self._recreate(missing)
                elif missing:
                    raise FileNotFoundError(errno.ENOENT, "the folder has vanished", str(self._run))
                self._owner.check()
                self._store.save(step, state, values)

            try:
                run_collectively(begin)
            except OSError as fault:
                self._note(fault, wait=wait)
            if not wait:
                return
            self._finish(wait=True)
            self._wait_for_retry()

    def _wait_for_retry(self) -> None:
        while self._retry_at is not None and (left := self._retry_at - time.monotonic()) > 0:
            if self._stopping():
                time.sleep(min(left, self._first_pause))
                return
            time.sleep(min(left, _POLL_S))

    def wait_quietly(self) -> None:
        """Wait for the save in progress and ignore failures, for a run that ends with another error."""
        if self._saving is not None:
            with contextlib.suppress(OSError):
                run_collectively(self._store.wait)
        self._saving = None

    def _finish(self, *, wait: bool = False) -> None:
        """Wait for the save in progress and record its result."""
        if self._saving is None:
            return
        try:
            run_collectively(self._store.wait)
        except OSError as fault:
            self._note(fault, wait=wait)
            return
        failed = f" after {self._failures} failed attempt{'s' * (self._failures > 1)}" if self._failures else ""
        log.log(logging.INFO if failed else logging.DEBUG, f"saved checkpoint {self._saving}{failed}")
        self.last, self._saving, self._failures, self._retry_at = self._saving, None, 0, None

    def _note(self, fault: OSError, *, wait: bool) -> None:
        """Report a failed save and schedule the retry; raise ConfigError if it was the last attempt."""
        step, self._saving = self._saving, None
        self._store.give_up()  # in every process, because all of them retry
        self._failures += 1
        if fault.errno in _FULL and (freed := self._free_space()):
            log.warning(f"the disk is full: removed {freed / 1e6:,.1f} MB of compiled programs; the next start recompiles them")
        attempts = min(self._attempts, _ATTEMPTS_WHILE_STOPPING) if any_process(self._stopping()) else self._attempts
        failed = f"checkpoint {step} could not be written ({reason(fault)}, {self._store.folder})"
        if self._failures >= attempts:
            with contextlib.suppress(OSError, ConfigError):
                self._owner.check()
                self._store.recover()
            raise ConfigError(
                f"{failed}; stopping after {self._failures} failed attempts in a row; {self._last_complete()}; fix the "
                f"storage, then continue with {resume_command(self._run)}"
            )
        pause = self._pause(self._failures)
        self._retry_at = time.monotonic() + pause
        training = "" if wait else "training continues, "
        end = duration(sum(map(self._pause, range(self._failures, attempts))))
        log.warning(f"{failed}; {training}retrying in {duration(pause)}; the run stops if saving still fails in {end}")

    def _pause(self, failures: int) -> float:
        return min(self._first_pause * 2 ** (failures - 1), self._longest_pause)

    def _last_complete(self) -> str:
        with contextlib.suppress(OSError), as_os_errors():
            if finished := self._store.finished():
                return f"the latest complete checkpoint is step {finished[-1]}"
        return "there is no complete checkpoint" if self.last is None else f"the latest one, step {self.last}, is gone"

    def _missing(self) -> tuple[list[str], bool]:
        """Return the names of missing files, and whether only the lock is missing. If the storage does not answer,
        nothing counts as missing: the save will fail and report why."""
        missing: list[str] = []
        with contextlib.suppress(OSError), as_os_errors():
            missing = self._run.missing(self._texts)
            try:
                self._owner.check()
            except FileNotFoundError:
                return (missing, False) if missing else (["the lock of this run"], True)
        return missing, False

    def _recreate(self, missing: list[str]) -> None:
        with as_os_errors():
            if jax.process_index() == 0:
                files.make(self._store.folder)
            self._owner.reacquire()  # before anything is removed: the folder may belong to another run by now
            self._store.recover()
            if jax.process_index() == 0:
                self._run.write(self._texts)
        if missing:  # otherwise only other processes miss something
            lost = ", without the earlier checkpoints" if CHECKPOINTS in missing else ""
            log.warning(f"{self._run}: recreated {', '.join(missing)}, which had vanished{lost}")
