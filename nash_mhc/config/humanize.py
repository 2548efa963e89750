"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, word: str, several: str | None = None) -> str:
    """`1 file`, `12 files`, `2 batches`"""
    return f"{number:,} {word if number == 1 else several or f'{word}s'}"


def short(number: int | float) -> str:
    """`812`, `41k`, `1.25M`, `3.1B`"""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"


def duration(seconds: int | float) -> str:
    """`0.4 s`, `12 s`, `3 min 5 s`, `2 h 40 min`, `3 d 4 h`: the two largest units."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left = round(seconds)
    parts: list[tuple[int, str]] = []
    for name, size in units:
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, name))
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)
