"""Documents of different parts that are the same but for case, spaces and punctuation: counted while data is prepared.

Each chunk leaves a file with 8 bytes a document. At the end those of what is held out are in memory, and the others
pass by, chunk by chunk.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nash_mhc.config.humanize import counted
from nash_mhc.data.documents.holdout import PARTS, TRAINED_ON, key_of
from nash_mhc.data.prepared.manifest import write_file

_ASCII = bytes(byte for byte in range(128) if not chr(byte).isalnum())
_OTHERS = re.compile(r"[\W_]+")


def near_key(text: str) -> int:
    """Equal for texts with the same letters and digits, whatever their case and what stands between; 0 without any."""
    letters = text.lower().encode("utf-8").translate(None, _ASCII)  # most of it, and much faster than the rest
    if not letters.isascii():
        letters = _OTHERS.sub("", letters.decode("utf-8")).encode("utf-8")
    return key_of([letters]) if letters else 0


def file_of(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:05d}.near"


def write_keys(file: Path, documents: Iterable[tuple[int, int]]) -> None:
    """(near key, part) of the documents of a chunk."""
    found = [(key, part) for key, part in documents if key]
    buffer = io.BytesIO()
    np.save(buffer, np.array([key for key, _ in found], np.uint64))
    np.save(buffer, np.array([part for _, part in found], np.uint8))
    write_file(file, buffer.getvalue())


def _read_keys(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open("rb") as opened:
        return np.load(opened), np.load(opened)


def in_words(files: Sequence[Path], names: Sequence[str]) -> str:
    """How many documents of each held-out part are nearly those of another one; empty where none are.

    `names` are those of the parts.
    """
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for file in files:
        keys, parts = _read_keys(file)
        held.append((keys[parts != TRAINED_ON], parts[parts != TRAINED_ON]))
    if not held:
        return ""
    keys, parts = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    known, which = np.unique(keys, return_inverse=True)
    is_in = np.zeros((len(PARTS), len(known)), bool)  # whether a part has such a document
    is_in[parts, which] = True
    for file in files if len(known) else ():
        passing, of = _read_keys(file)
        passing = passing[of == TRAINED_ON]
        at = np.searchsorted(known, passing).clip(max=len(known) - 1)
        is_in[TRAINED_ON, at[known[at] == passing]] = True
    in_several = is_in.sum(axis=0)[which] > 1
    counts = [(int((in_several & (parts == part)).sum()), names[part]) for part in PARTS[1:]]
    told = ", ".join(f"{counted(count, 'document')} of {name}" for count, name in counts if count)
    return f"the same as a document of another part but for case, spaces or punctuation: {told}" if told else ""
