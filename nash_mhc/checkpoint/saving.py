"""Checkpoints in spite of the storage: a save that fails is reported and tried again,
and the run stops only when it must."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from nash_mhc.checkpoint.run_folder import CHECKPOINTS, RunFolder
from nash_mhc.checkpoint.run_lock import NoOwner, Owner
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import resume_command
from nash_mhc.config.humanize import duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import any_process, run_collectively
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors, reason

_ATTEMPTS_WHILE_STOPPING = 3  # with the first pauses, half a minute: as long as many schedulers wait before they kill
_LOOK_S = 1.0  # how often a pause looks whether the run is asked to stop
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Saver:
    """Owns the clock of a run's saves. Pauses after failed ones double up to the longest;
    `attempts` in a row are the end.

    `texts` (file name -> text) lie beside the checkpoints and are written again when the folder has vanished.
    """

    def __init__(
        self,
        store: Store,
        texts: Mapping[str, str | bytes],
        *,
        say: Callable[[str], None],
        owner: Owner = NoOwner(),
        last: int | None = None,
        attempts: int = 8,  # with these pauses, a quarter of an hour
        first_pause: float = 10.0,
        longest_pause: float = 300.0,
        stopping: Callable[[], bool] = lambda: False,
        free_space: Callable[[], int] = lambda: 0,
    ) -> None:
        """`last` is the step that this run has saved before, if any.

        `stopping`: whether the run has been asked to stop, after which it does not wait for long. `free_space` removes
        what can be made again from a full disk, and returns how many bytes that were.
        """
        self._store, self._texts, self._attempts, self._say, self._owner = store, texts, attempts, say, owner
        self._run = RunFolder(store.folder.parent)
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._stopping, self._free_space = stopping, free_space
        self._writing: int | None = None  # the step whose save is under way
        self.last = last  # the step that was saved last
        self._failed = 0  # attempts in a row
        self._pause_ends: float | None = None

    def _agreed(self, mine: bool) -> bool:
        """Whether it is so in any process. Saving is done by all of them together, so they must all decide alike, and
        they ask in the same order: every answer that a decision here depends on goes through this method."""
        return any_process(mine)

    def retry_due(self) -> bool:
        """Asked after each step: whether to save now because an earlier save failed and the pause after it is over.

        Several processes try again when the next checkpoint is due:
        to agree after every step would cost more than it gains.
        """
        if jax.process_count() > 1:
            return False
        if self._writing is not None and self._store.done():
            self._end()
        return self._pause_ends is not None and time.monotonic() >= self._pause_ends

    def save(self, state: PyTree, step: int, values: dict[str, Any], *, wait: bool = False) -> None:
        """Starts a save; during the pause after a failed one, leaves it to `due`.

        With `wait` it is begun at once and returns when the checkpoint is whole, however many attempts that takes.
        ConfigError, with the last whole checkpoint, after too many.
        """
        self._end(wait=wait)
        while self.last != step and (wait or self._pause_ends is None or self._agreed(time.monotonic() >= self._pause_ends)):
            self._writing, self._pause_ends = step, None
            missing, lock_lost = self._missing()
            # A folder that only some processes miss is there: they have lost their disk, and must not make another one.
            gone = self._agreed(lock_lost) or not self._agreed(not missing)
            if gone:
                self._store.give_up()  # the next save, this one, starts anew

            def begin(missing: list[str] = missing, gone: bool = gone) -> None:
                if gone:
                    self._make_again(missing)
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
            self._end(wait=True)
            self._wait_for_pause()

    def _wait_for_pause(self) -> None:
        """To its end; once the run is asked to stop, for no longer than the first pause."""
        while self._pause_ends is not None and (left := self._pause_ends - time.monotonic()) > 0:
            if self._stopping():
                time.sleep(min(left, self._first_pause))
                return
            time.sleep(min(left, _LOOK_S))

    def wait_quietly(self) -> None:
        """Waits for the save under way, for a run that ends for another reason: a failure is no longer worth a word."""
        if self._writing is not None:
            with contextlib.suppress(OSError):
                run_collectively(self._store.wait)
        self._writing = None

    def _end(self, *, wait: bool = False) -> None:
        """Waits for the save under way, and takes note of how it ended."""
        if self._writing is None:
            return
        try:
            run_collectively(self._store.wait)
        except OSError as fault:
            self._note(fault, wait=wait)
            return
        if self._failed:
            self._say(f"checkpoint {self._writing} is written, after {self._failed} failed attempt{'s' * (self._failed > 1)}")
        self.last, self._writing, self._failed, self._pause_ends = self._writing, None, 0, None

    def _note(self, fault: OSError, *, wait: bool) -> None:
        step, self._writing = self._writing, None
        self._store.give_up()  # in every process: the next attempt is made by all of them
        self._failed += 1
        if fault.errno in _FULL and (freed := self._free_space()):
            self._say(f"the disk is full: {freed / 1e6:,.1f} MB of compiled programs are removed; the next start compiles anew")
        attempts = min(self._attempts, _ATTEMPTS_WHILE_STOPPING) if self._agreed(self._stopping()) else self._attempts
        why = f"{reason(fault)}, {self._store.folder}"
        if self._failed >= attempts:
            with contextlib.suppress(OSError, ConfigError):
                self._owner.check()
                self._store.clear()  # what the last attempt left goes, too
            raise ConfigError(
                f"checkpoint {step} could not be written ({why}), {self._failed} attempts in a row have failed; the run stops "
                f"here; {self._last_whole()}; mend the storage, then continue with {resume_command(self._run)}"
            )
        pause = self._pause(self._failed)
        self._pause_ends = time.monotonic() + pause
        going_on = "" if wait else "training goes on, "
        end = duration(sum(map(self._pause, range(self._failed, attempts))))
        again = f"it is tried again in {duration(pause)}, and the run gives up if it still fails in {end}"
        self._say(f"checkpoint {step} could not be written ({why}); {going_on}{again}")

    def _pause(self, failed: int) -> float:
        """After so many failures in a row."""
        return min(self._first_pause * 2 ** (failed - 1), self._longest_pause)

    def _last_whole(self) -> str:
        with contextlib.suppress(OSError), as_os_errors():
            if found := self._store.finished():
                return f"the last whole checkpoint is step {found[-1]}"
        return "there is no whole checkpoint" if self.last is None else f"the last one, step {self.last}, is gone"

    def _missing(self) -> tuple[list[str], bool]:
        """What someone has deleted or moved away, if that can be found out, and whether it is the lock alone;
        where it cannot, saving will fail and say so."""
        missing: list[str] = []
        with contextlib.suppress(OSError), as_os_errors():
            missing = self._run.missing(self._texts)
            try:
                self._owner.check()
            except FileNotFoundError:
                return (missing, False) if missing else (["the lock of this run"], True)
        return missing, False

    def _make_again(self, missing: list[str]) -> None:
        with as_os_errors():
            if jax.process_index() == 0:
                files.make(self._store.folder)
            self._owner.retake()  # before anything is cleared away: by now it may be another run's
            self._store.reopen()
            if jax.process_index() == 0:
                self._run.write(self._texts)
        if not missing:  # to another process only
            return
        lost = ", without those it held" if CHECKPOINTS in missing else ""
        self._say(f"{self._run}: {', '.join(missing)} had vanished and is made again{lost}")
