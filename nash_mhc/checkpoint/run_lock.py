"""A run's folder belongs to one run at a time:
a lock that ends with its process or, where there are none, a sign of life.

On this machine and on shared disks it is the operating system's lock on `.lock`: whatever ends the process, it is free
then. An object store has no locks: `owner.json` is created only where there is none and written again every few
seconds, and who finds one that is no longer written takes it over. Several processes are one owner: the first holds the
folder, the others are waited for before another run may have it.

filelock would replace the two calls of fcntl alone: owners, moved folders and several processes are most of this file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nash_mhc.config.schema import ConfigError
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import Folder, create_exclusive, exists, is_remote, is_same_file, write_atomic
from nash_mhc.storage.json_files import parse_json

LOCK, OTHERS, OBJECT = ".lock", ".lock.others", "owner.json"
BEAT_S, DEAD_S = 10.0, 45.0  # an owner writes its sign of life this often, and without one for so long it is taken for dead
SEEN_S = 30.0  # a shared disk may show late what another machine has written
_ASK_AGAIN_S, _SAY_AGAIN_S = 0.2, 60.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a file system that has none


@runtime_checkable
class Owner(Protocol):
    def check(self) -> None:
        """Where the folder is not (or no longer) this run's, nothing may be written there: OSError if it may come back,
        ConfigError if another run has it."""

    def retake(self) -> None:
        """Of a folder that was moved or deleted and is made again. ConfigError where another run has it by now."""

    def release(self) -> None: ...


class NoOwner:
    """For what needs no owner: a process that writes nothing, a test."""

    def check(self) -> None: ...
    def retake(self) -> None: ...
    def release(self) -> None: ...


def _machine() -> list[str]:
    """Where a process number means something: this machine since its last start, and this part of it."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):
        words += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.stat("/proc/self/ns/pid").st_ino)]
    return words


def _about_me() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"id": uuid.uuid4().hex, "machine": _machine(), "pid": os.getpid(), "since": since, "beat": 0}


def _read_json(path: Folder) -> dict[str, Any]:
    """Empty where nobody has written it, or not all of it yet."""
    with as_os_errors(), contextlib.suppress(FileNotFoundError, ValueError):
        values = parse_json(path.read_bytes())
        return values if isinstance(values, dict) else {}
    return {}


def _who(about: dict[str, Any]) -> str:
    try:
        return f"process {about['pid']} on {about['machine'][0]}, since {about['since']}"
    except (KeyError, IndexError, TypeError):
        return "another process"  # which has not said who it is yet


class _Patience:
    """How long a folder is waited for, and what is said meanwhile."""

    def __init__(self, folder: Folder, wait: float, say: Callable[[str], None]) -> None:
        self._folder, self._wait, self._say = folder, wait, say
        self._began = time.monotonic()
        self._said: float | None = None

    def ask_again(self, who: str) -> None:
        """Returns when it is worth another try; ConfigError when there is no more time."""
        now = time.monotonic()
        waited = now - self._began
        if waited >= self._wait:
            tried = f" (waited for {waited:.0f} s)" if self._wait else ""
            raise ConfigError(
                f"--checkpoint-dir {self._folder}: another run holds it ({who}){tried}; stop that one, wait for its end with "
                f"--wait-for-lock SECONDS, or choose another folder"
            )
        if self._said is None or now - self._said > _SAY_AGAIN_S:
            self._say(f"{self._folder}: another run holds it ({who}); waiting for it, {self._wait - waited:.0f} s at most ...")
            self._said = now
        time.sleep(min(_ASK_AGAIN_S, self._wait - waited))


# --- folders with locks ----------------------------------------------------------------------------------------------


def _try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """A descriptor that holds the lock on the file, which is made; None where another one has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            if is_same_file(path, handle):  # who had it before may have deleted it meanwhile
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


class _Locked:
    def __init__(self, folder: Path, wait: float, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._handle = self._take(_Patience(folder, wait, say))

    def _take(self, patience: _Patience, *, again: bool = False) -> int:
        path = self._folder / LOCK
        while (handle := _try_lock(path)) is None:
            patience.ask_again(_who(_read_json(path)))
        try:
            if not again:  # those that accompanied the last owner may not have ended yet; `again` they are this run's own
                while (others := _try_lock(self._folder / OTHERS)) is None:
                    patience.ask_again("processes of a run whose first one has ended")
                os.close(others)
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(_about_me()).encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _is_mine(self) -> bool:
        return is_same_file(self._folder / LOCK, self._handle)

    def check(self) -> None:
        if not self._is_mine():
            raise FileNotFoundError(2, "the folder has vanished", str(self._folder))

    def retake(self) -> None:
        if not self._is_mine():
            before, self._handle = self._handle, self._take(_Patience(self._folder, 0.0, print), again=True)
            os.close(before)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_mine():
                if (others := _try_lock(self._folder / OTHERS)) is not None:  # none of them is left
                    (self._folder / OTHERS).unlink()
                    os.close(others)
                (self._folder / LOCK).unlink()
        os.close(self._handle)


class _SharedLock(NoOwner):
    def __init__(self, folder: Path, handle: int) -> None:
        self._folder, self._handle = folder, handle

    def retake(self) -> None:
        with contextlib.suppress(OSError):  # where the folder is not there yet, the first process alone holds it
            if (handle := _try_lock(self._folder / OTHERS, fcntl.LOCK_SH)) is not None:
                os.close(self._handle)
                self._handle = handle

    def release(self) -> None:
        os.close(self._handle)


# --- folders without ------------------------------------------------------------------------------------------------


class _Beating:
    """Ownership by a sign of life."""

    def __init__(self, folder: Folder, wait: float, say: Callable[[str], None]) -> None:
        self._folder, self._path, self._about = folder, folder / OBJECT, _about_me()
        self._lost: str | None = None
        self._last_beat = time.monotonic()
        self._ended = threading.Event()
        self._take(_Patience(folder, wait, say), say)
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._thread.start()

    def _take(self, patience: _Patience, say: Callable[[str], None]) -> None:
        seen: dict[str, Any] = {}
        since = time.monotonic()
        while not (self._created() and self._keeps_it(seen)):
            found = _read_json(self._path)
            if found.get("machine") == self._about["machine"] and not _runs(found.get("pid")):
                self._remove(found)
            elif found != seen:
                if found.get("id") == seen.get("id"):
                    patience.ask_again(_who(found))  # it lives
                else:
                    say(f"{self._folder}: was left by, or is held by, {_who(found)}; seeing whether that is still there ...")
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > DEAD_S:
                say(f"{self._folder}: {_who(found)} has given no sign of life for {DEAD_S:.0f} s; this run takes it over")
                self._remove(found)
            time.sleep(min(1.0, BEAT_S / 10))

    def _keeps_it(self, taken_over: dict[str, Any]) -> bool:
        """Of several that have found the same dead owner, one may have removed what another has just written."""
        if taken_over:
            time.sleep(min(2.0, BEAT_S / 5))
        return not taken_over or _read_json(self._path).get("id") == self._about["id"]

    def _created(self) -> bool:
        with as_os_errors(), contextlib.suppress(FileExistsError):
            create_exclusive(self._path, json.dumps(self._about))
            return True
        return False

    def _remove(self, about: dict[str, Any]) -> None:
        with as_os_errors(), contextlib.suppress(FileNotFoundError):
            if _read_json(self._path) == about:  # nobody else was quicker
                self._path.unlink()

    def _beat(self) -> None:
        while self._lost is None and not self._ended.wait(BEAT_S):
            with contextlib.suppress(Exception):  # a store that does not answer, in whatever way, says nothing about the owner
                self._give_sign()

    def _give_sign(self) -> None:
        """Once more that this owner is alive, unless another one has come."""
        found, me = _read_json(self._path), self._about["id"]
        if found.get("id", me) != me:
            self._lost = _who(found)
        elif found or not self._path.exists():  # else someone is writing it just now, and that is not this owner
            later = self._about | {"beat": self._about["beat"] + 1}
            with as_os_errors():
                # In one piece: who reads half of it would take it for nobody's.
                write_atomic(self._path, json.dumps(later), part=self._folder / f".{OBJECT}.{me}.part")
            self._about, self._last_beat = later, time.monotonic()

    def check(self) -> None:
        if self._lost is None and time.monotonic() - self._last_beat > DEAD_S:  # for others this run may be dead by now
            found = _read_json(self._path)
            if found.get("id") != self._about["id"]:
                self._lost = _who(found) if found else "one that has ended"
        if self._lost is not None:
            raise ConfigError(
                f"{self._folder}: another run ({self._lost}) has taken it over, for this one gave no sign of life; "
                f"this one stops here"
            )

    def retake(self) -> None:
        self.check()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._remove(self._about)


def _runs(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, TypeError):
        return True
    return True


# --- both ------------------------------------------------------------------------------------------------------------


def acquire(folder: Folder, *, wait: float = 0.0, say: Callable[[str], None] = print) -> Owner:
    """The folder, which is there, is this process's until it ends or lets go of it.
    ConfigError says who has it since when."""
    if is_remote(folder):
        return _Beating(folder, wait, say)
    try:
        return _Locked(folder, wait, say)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _Beating(folder, wait, say)


def acquire_shared(folder: Folder) -> Owner:
    """Hold the folder for another process of the run: while one is alive, no other run begins there."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            if (handle := _try_lock(Path(folder) / OTHERS, fcntl.LOCK_SH)) is not None:
                return _SharedLock(Path(folder), handle)
    return NoOwner()


def check_visible(folder: Folder) -> None:
    """ConfigError where this process does not see the folder that process 0 holds."""
    end = time.monotonic() + SEEN_S
    while not any(exists(folder / name) for name in (LOCK, OBJECT)):
        if time.monotonic() > end:
            raise ConfigError(
                f"--checkpoint-dir {folder}: what process 0 has written there is not seen on {socket.gethostname()}, by "
                f"process {os.getpid()}; all processes need the same folder, on a disk that they share"
            )
        time.sleep(_ASK_AGAIN_S)
