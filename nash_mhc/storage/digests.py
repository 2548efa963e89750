"""SHA-256 of values and of files, many at once."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nash_mhc.storage.paths import Folder


def digest_of(values: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Folder) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(paths: Iterable[Folder]) -> list[str]:
    """In threads: hashing lets others run."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest_of_file, paths))


@functools.lru_cache(maxsize=1 << 16)
def _digest_of_state(path: Path, size: int, modified_ns: int) -> str:
    return digest_of_file(path)


def digests_of_sources(paths: Iterable[Path]) -> list[str]:
    """Of a user's files, which a run opens for each split: each is read once in a process, unless it changes."""
    states = [(path, path.stat()) for path in paths]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: _digest_of_state(s[0].absolute(), s[1].st_size, s[1].st_mtime_ns), states))
