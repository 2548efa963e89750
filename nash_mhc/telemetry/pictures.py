"""Pictures of what is inside a model, as PNG, from the lists in an evaluation's row.
Small maps of numbers between 0 and 1."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from nash_mhc.checkpoint.run_folder import Row

_NOTHING, _MUCH, _PAPER = (241, 240, 236), (29, 78, 168), (255, 255, 255)
_CELL = 14  # pixels of a number, in height and width


class Picture(NamedTuple):
    width: int
    height: int
    png: bytes


def pictures(row: Row) -> Iterator[tuple[str, Picture]]:
    """(tag, picture) of everything in the row that is one."""
    res: Any = row.get("health/res")
    weights: Any = row.get("health/scale_weight")
    if _depth(res) == 4:  # layers x sub-layers x streams x streams
        yield "inside/H_res_by_layer", _drawn([_beside([layer[part] for layer in res]) for part in range(len(res[0]))])
    if _depth(weights) == 2:  # layers x scales: every layer a line
        yield "inside/scale_weight_by_layer", _drawn([weights])


def _depth(value: Any) -> int:
    return 1 + _depth(value[0]) if isinstance(value, list) and value else 0


def _beside(matrices: list[list[list[float]]]) -> list[list[float | None]]:
    """Matrices of the same size in one table, from left to right, with a gap between them."""
    lines: list[list[float | None]] = []
    for i in range(len(matrices[0])):
        lines.append([])
        for number, matrix in enumerate(matrices):
            gap: list[float | None] = [None] * bool(number)
            lines[-1] += [*gap, *matrix[i]]
    return lines


def _drawn(tables: list[list[list[Any]]]) -> Picture:
    """Tables below each other, with a gap between them."""
    lines: list[list[float | None]] = []
    for number, table in enumerate(tables):
        lines += [[None] * len(table[0])] * bool(number) + table
    filtered = [b"\0" + b"".join(_color(value) * _CELL for value in line) for line in lines]  # 0: each line by itself
    pixels = b"".join(line * _CELL for line in filtered)
    width, height = _CELL * len(lines[0]), _CELL * len(lines)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # eight bits of red, green and blue each
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")
    return Picture(width, height, b"\x89PNG\r\n\x1a\n" + b"".join(_part(*part) for part in parts))


def _color(value: float | None) -> bytes:
    if value is None:
        return bytes(_PAPER)
    share = min(max(value, 0.0), 1.0)
    return bytes(round(a + share * (b - a)) for a, b in zip(_NOTHING, _MUCH, strict=True))


def _part(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
