"""Memory of the machine itself, without JAX."""

from __future__ import annotations

from pathlib import Path


def system_file(path: str | Path) -> str:
    """What the system says in such a file; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def host_memory() -> tuple[float, float] | None:
    """(free, in all) of this machine, or of the container where that grants less; None where nobody says."""
    rows = (line.split() for line in system_file("/proc/meminfo").splitlines())
    kib = {row[0].rstrip(":"): float(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    if not {"MemAvailable", "MemTotal"} <= set(kib):
        return None
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit, used = system_file("/sys/fs/cgroup/memory.max"), system_file("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and float(limit) < total:
        free, total = min(free, float(limit) - float(used)), float(limit)
    return max(free, 0.0), total
