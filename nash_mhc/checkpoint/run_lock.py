"""One run at a time per directory: an OS file lock or, where there are no locks, a lease that its owner keeps renewing.

Local and shared disks: `flock` on `.lock`, which the kernel releases however the process ends. Object stores and disks
without locks: `owner.json`, which is created exclusively, renewed every few seconds, and taken over once it expires.
Several processes of a run are one owner: process 0 holds the lock, and a new run waits for the others to exit, too.
filelock would only replace two calls of fcntl.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import Folder, create_exclusive, exists, is_remote, is_same_file, parse_json, write_atomic

log = logging.getLogger(__name__)
LOCK, OTHERS, OBJECT = ".lock", ".lock.others", "owner.json"
RENEW_S, EXPIRED_S = 10.0, 45.0  # a lease is renewed this often, and expires after this long without renewal
SEEN_S = 30.0  # a shared disk may show files from other machines this late
_POLL_S, _REPEAT_MESSAGE_S = 0.2, 60.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # errors of file systems without locks


class Owner:
    """The owner of a run directory. This base class locks nothing and allows everything."""

    def check(self) -> None:
        """Raise if this run may not write: OSError if the directory is gone, ConfigError if another run owns it."""

    def reacquire(self) -> None:
        """Acquire a directory again that was removed and recreated. Raise ConfigError if another run owns it."""
        self.check()

    def release(self) -> None:
        """Let other runs acquire the directory."""


def _machine() -> list[str]:
    """Return what identifies the PID namespace: host, boot, container."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):
        words += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.stat("/proc/self/ns/pid").st_ino)]
    return words


def _new_record() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"id": uuid.uuid4().hex, "machine": _machine(), "pid": os.getpid(), "since": since, "beat": 0}


def _read_record(path: Folder) -> dict[str, Any]:
    """Return an owner's record; empty if it is missing or only partly written."""
    with as_os_errors(), contextlib.suppress(FileNotFoundError, ValueError):
        values = parse_json(path.read_bytes())
        return values if isinstance(values, dict) else {}
    return {}


def _describe(record: dict[str, Any]) -> str:
    try:
        return f"process {record['pid']} on {record['machine'][0]}, since {record['since']}"
    except (KeyError, IndexError, TypeError):
        return "another process"  # whose record is not written yet


class _Wait:
    """Waits for another run to release a directory, up to `limit` seconds."""

    def __init__(self, folder: Folder, limit: float) -> None:
        self._folder, self._limit = folder, limit
        self._start, self._next_message = time.monotonic(), 0.0

    def pause(self, holder: str) -> None:
        """Sleep until the next attempt; raise ConfigError if the time is up."""
        waited = time.monotonic() - self._start
        if waited >= self._limit:
            tried = f" (waited for {waited:.0f} s)" if self._limit else ""
            raise ConfigError(
                f"--checkpoint-dir {self._folder}: another run holds the lock ({holder}){tried}; stop that run, wait for it "
                "with "
                f"--wait-for-lock SECONDS, or choose another folder"
            )
        if waited >= self._next_message:
            log.info(f"{self._folder}: another run holds the lock ({holder}); waiting up to {self._limit - waited:.0f} s ...")
            self._next_message = waited + _REPEAT_MESSAGE_S
        time.sleep(min(_POLL_S, self._limit - waited))


# --- file locks ------------------------------------------------------------------------------------------------------


def _try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Create and lock a file; return its descriptor, or None if another process holds the lock."""
    while True:
        with contextlib.ExitStack() as closing, contextlib.suppress(BlockingIOError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            closing.callback(os.close, handle)
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            if not is_same_file(path, handle):
                continue  # the previous holder deleted it meanwhile
            closing.pop_all()
            return handle
        return None


class _FileLock(Owner):
    def __init__(self, folder: Path, wait: float) -> None:
        self._folder = folder
        self._handle = self._acquire(_Wait(folder, wait))

    def _acquire(self, wait: _Wait, *, again: bool = False) -> int:
        path = self._folder / LOCK
        while (handle := _try_lock(path)) is None:
            wait.pause(_describe(_read_record(path)))
        try:
            if not again:  # the other processes of the previous run may still be exiting; `again`, they are this run's own
                while (others := _try_lock(self._folder / OTHERS)) is None:
                    wait.pause("processes of a run whose process 0 has exited")
                os.close(others)
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(_new_record()).encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _is_held(self) -> bool:
        return is_same_file(self._folder / LOCK, self._handle)

    def check(self) -> None:
        if not self._is_held():
            raise FileNotFoundError(errno.ENOENT, "the folder has vanished", str(self._folder))

    def reacquire(self) -> None:
        if not self._is_held():
            before, self._handle = self._handle, self._acquire(_Wait(self._folder, 0.0), again=True)
            os.close(before)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_held():
                if (others := _try_lock(self._folder / OTHERS)) is not None:  # all other processes have exited
                    (self._folder / OTHERS).unlink()
                    os.close(others)
                (self._folder / LOCK).unlink()
        os.close(self._handle)


class _SharedLock(Owner):
    def __init__(self, folder: Path, handle: int) -> None:
        self._folder, self._handle = folder, handle

    def reacquire(self) -> None:
        with contextlib.suppress(OSError):  # until the folder is visible here, the lock of process 0 suffices
            if (handle := _try_lock(self._folder / OTHERS, fcntl.LOCK_SH)) is not None:
                os.close(self._handle)
                self._handle = handle

    def release(self) -> None:
        os.close(self._handle)


# --- leases ----------------------------------------------------------------------------------------------------------


class _Lease(Owner):
    """Ownership by a record that a thread keeps renewing."""

    def __init__(self, folder: Folder, wait: float) -> None:
        self._folder, self._path, self._record = folder, folder / OBJECT, _new_record()
        self._new_owner: str | None = None  # the run that has taken over
        self._last_renewal = time.monotonic()
        self._stopped = threading.Event()
        self._acquire(_Wait(folder, wait))
        self._thread = threading.Thread(target=self._keep_renewing, name="owner", daemon=True)
        self._thread.start()

    def _acquire(self, wait: _Wait) -> None:
        seen: dict[str, Any] = {}
        since = time.monotonic()
        while not (self._try_create() and self._won_takeover(seen)):
            record = _read_record(self._path)
            if record.get("machine") == self._record["machine"] and not _is_alive(record.get("pid")):
                self._remove(record)
            elif record != seen:
                if record.get("id") == seen.get("id"):
                    wait.pause(_describe(record))  # renewed since the last look: alive
                else:
                    log.info(f"{self._folder}: locked by {_describe(record)}; checking whether that run is still alive ...")
                seen, since = record, time.monotonic()
            elif time.monotonic() - since > EXPIRED_S:
                log.warning(f"{self._folder}: {_describe(record)} has not renewed its lock for {EXPIRED_S:.0f} s; taking over")
                self._remove(record)
            time.sleep(min(1.0, RENEW_S / 10))

    def _won_takeover(self, replaced: dict[str, Any]) -> bool:
        """Return whether this run's record survived: a concurrent takeover may have removed it."""
        if replaced:
            time.sleep(min(2.0, RENEW_S / 5))
        return not replaced or _read_record(self._path).get("id") == self._record["id"]

    def _try_create(self) -> bool:
        with as_os_errors(), contextlib.suppress(FileExistsError):
            create_exclusive(self._path, json.dumps(self._record))
            return True
        return False

    def _remove(self, record: dict[str, Any]) -> None:
        with as_os_errors(), contextlib.suppress(FileNotFoundError):
            if _read_record(self._path) == record:  # unless another run was faster
                self._path.unlink()

    def _keep_renewing(self) -> None:
        while self._new_owner is None and not self._stopped.wait(RENEW_S):
            with contextlib.suppress(Exception):  # a storage failure says nothing about the owner
                self._renew()

    def _renew(self) -> None:
        """Renew the lease, or notice that another run has taken over."""
        record, own_id = _read_record(self._path), self._record["id"]
        if record.get("id", own_id) != own_id:
            self._new_owner = _describe(record)
        elif record or not self._path.exists():  # an unreadable record is being written by another run
            renewed = self._record | {"beat": self._record["beat"] + 1}
            with as_os_errors():
                # Atomically: a reader of half a record would think that nobody owns the folder.
                write_atomic(self._path, json.dumps(renewed), part=self._folder / f".{OBJECT}.{own_id}.part")
            self._record, self._last_renewal = renewed, time.monotonic()

    def check(self) -> None:
        if self._new_owner is None and time.monotonic() - self._last_renewal > EXPIRED_S:  # others may have taken over
            record = _read_record(self._path)
            if record.get("id") != self._record["id"]:
                self._new_owner = _describe(record) if record else "one that has exited"
        if self._new_owner is not None:
            raise ConfigError(
                f"{self._folder}: another run ({self._new_owner}) took over the directory, because this run did not renew "
                "its lock in time; this run stops"
            )

    def release(self) -> None:
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._remove(self._record)


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (OSError, ValueError, TypeError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


# --- acquiring -------------------------------------------------------------------------------------------------------


def acquire(folder: Folder, *, wait: float = 0.0) -> Owner:
    """Own an existing run directory until `release` or the end of the process.

    Raise ConfigError naming the current owner.
    """
    if not is_remote(folder):
        try:
            return _FileLock(folder, wait)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return _Lease(folder, wait)


def acquire_shared(folder: Folder) -> Owner:
    """Lock the directory for another process of the run: no new run starts there while one of them is alive."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            if (handle := _try_lock(Path(folder) / OTHERS, fcntl.LOCK_SH)) is not None:
                return _SharedLock(Path(folder), handle)
    return Owner()


def check_visible(folder: Folder) -> None:
    """Raise ConfigError unless this process sees the lock that process 0 holds."""
    if not wait_for_any(folder / LOCK, folder / OBJECT):
        raise ConfigError(
            f"--checkpoint-dir {folder}: process {os.getpid()} on {socket.gethostname()} does not see the files of "
            f"process 0; all processes need the same folder on a shared disk"
        )


def wait_for_any(*paths: Folder) -> bool:
    """Wait for one of these files of another process, as long as a shared disk may take to show it."""
    end = time.monotonic() + SEEN_S
    while not any(map(exists, paths)):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
