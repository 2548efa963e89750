"""Machines by name (v6e-8, h100-16), from `chips.yaml`, and the CPU and memory of this machine. Needs no JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
import timeit
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError

_FACTS = Path(__file__).with_name("chips.yaml")
_COPY_BYTES = 1 << 26  # larger than any CPU cache
_MAX_CHIPS = 4096


@dataclass(frozen=True)
class Chip:
    """A kind of accelerator; chips.yaml explains the fields."""

    name: str
    platform: str
    tflops: float
    memory_gb: float
    memory_gbps: float
    links_gbps: float
    network_gbps: float | None
    dollars: float | None
    named_by: str
    slices: Mapping[int, str]
    source: str
    kinds: tuple[str, ...] = ()
    usable_gib: float | None = None

    @property
    def memory(self) -> float:
        """Return the bytes that a program may use."""
        return self.usable_gib * 2**30 if self.usable_gib else self.memory_gb * 1e9

    @property
    def largest(self) -> int:
        """Return the largest number of chips joined by fast links."""
        return max(self.slices)


@dataclass(frozen=True)
class Machine:
    """A number of chips, in one slice or node or in several that are joined by a slower network."""

    name: str
    chip: Chip
    chips: int
    slices: int = 1

    @property
    def topology(self) -> str:
        """Return the topology of one slice."""
        return self.chip.slices[self.chips // self.slices]

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.chip.dollars is None else self.chip.dollars * self.chips

    def __str__(self) -> str:
        each = f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology
        return f"{self.name}: {self.chips} x {self.chip.name}" + (f" ({each})" if self.chip.platform == "tpu" else "")


def _parse_chip(name: str, fields: Mapping[str, Any], where: str) -> Chip:
    known = {"from" if f.name == "source" else f.name for f in dataclasses.fields(Chip)} - {"name"}
    if unknown := sorted(set(fields) - known):
        raise ConfigError(f"{where}: {name} has no key {unknown[0]}{did_you_mean(unknown[0], known)}")
    values = {("source" if key == "from" else key): value for key, value in fields.items()}
    values["kinds"] = tuple(values.get("kinds", ()))
    required = {f.name for f in dataclasses.fields(Chip) if f.default is dataclasses.MISSING} - {"name"}
    if missing := sorted(required - set(values)):
        lacking = missing[0].replace("source", "from")
        raise ConfigError(f"{where}: {name} has no {lacking}; see chips.yaml in the package")
    for key in ("tflops", "memory_gb", "memory_gbps", "links_gbps"):
        if not isinstance(values[key], int | float) or values[key] <= 0:
            raise ConfigError(f"{where}: {key} of {name} must be a positive number, not {values[key]!r}")
    numbers = {key: float(value) for key, value in values.items() if type(value) is int}  # YAML has 275 for 275.0
    return Chip(name=name, **values | numbers)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    import yaml  # deferred: `doctor` must run without it

    try:
        facts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--chips {file}: cannot be read ({str(error).splitlines()[0]}); give a YAML file of chips") from None
    if not isinstance(facts, dict) or not all(isinstance(each, dict) for each in facts.values()):
        raise ConfigError(f"--chips {file}: must map chip names to keys and values, like chips.yaml")
    return facts


@functools.cache
def chips(file: str | None = None) -> dict[str, Chip]:
    """Return all known chips by name; `file` adds and overrides some."""
    facts = _read(_FACTS)
    for name, changes in (_read(Path(file).expanduser()) if file else {}).items():
        facts[name] = facts.get(name, {}) | changes
    return {name: _parse_chip(name, each, f"--chips {file}" if file else _FACTS.name) for name, each in facts.items()}


def by_kind(device_kind: str) -> Chip | None:
    """Return the chip for a `device_kind` of JAX. The longest match wins: GB200 is not B200."""
    named = [(kind, chip) for chip in chips().values() for kind in chip.kinds if kind in device_kind]
    return max(named, key=lambda each: len(each[0]))[1] if named else None


def machine(name: str, known: Mapping[str, Chip]) -> Machine:
    """Return the machine named `v6e-8`, `h100-16` or `h100`. ConfigError with the nearest name."""
    kind, _, number = name.lower().rpartition("-")
    if name.lower() in known or not kind:  # known: a kind with a dash, such as a100-80
        kind, number = name.lower(), ""
    if kind not in known:
        nearest = did_you_mean(kind, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"--chip {name}: unknown chip{nearest}")
    chip = known[kind]
    if number and (not number.isdigit() or int(number) < 1):
        raise ConfigError(f"--chip {name}: write the number of chips after the dash, as in {kind}-{chip.largest}")
    cores = 2 if chip.named_by == "cores" else 1
    count = int(number) // cores if number else min(chip.slices)
    if count in chip.slices:
        return Machine(name.lower(), chip, count)
    if count <= _MAX_CHIPS and count > chip.largest and count % chip.largest == 0:
        if chip.network_gbps is None:
            raise ConfigError(
                f"--chip {name}: {kind}-{chip.largest * cores} is the largest single machine, and the network between "
                f"machines is unknown; set network_gbps of {kind} in a --chips file"
            )
        return Machine(name.lower(), chip, count, count // chip.largest)
    sizes = [*chip.slices, *range(2 * chip.largest, _MAX_CHIPS + 1, chip.largest)]
    near = min(sizes, key=lambda size: abs(size - count))
    raise ConfigError(f"--chip {name}: no machine of this size exists; did you mean {kind}-{near * cores}?")


def next_larger(of: Machine) -> Iterable[Machine]:
    """Yield the larger machines of one slice or node with the same chip."""
    cores = 2 if of.chip.named_by == "cores" else 1
    for count in sorted(of.chip.slices):
        if count > of.chips:
            yield Machine(f"{of.chip.name}-{count * cores}", of.chip, count)


def this_cpu() -> Machine:
    """Return this machine's CPU as a machine to plan for; measures its rates in about a second.

    Uses numpy, because JAX would reserve the accelerators.
    """
    import numpy as np

    n = 1024
    a = np.ones((n, n), np.float32)
    seconds = min(timeit.repeat(lambda: a @ a, number=1, repeat=5))
    source, target = np.ones(_COPY_BYTES // 8), np.empty(_COPY_BYTES // 8)
    copied = min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=3))
    held = host_memory()
    memory = held[1] / 1e9 if held else math.inf
    gbps = 2 * _COPY_BYTES / copied / 1e9
    chip = Chip(
        name="cpu", platform="cpu", tflops=2 * n**3 / seconds / 1e12, memory_gb=memory,
        memory_gbps=gbps, links_gbps=gbps,
        network_gbps=None, dollars=None, named_by="chips", slices={1: "1"}, source="measured just now",
    )  # fmt: skip
    return Machine("cpu", chip, 1)


def system_file(path: str | Path) -> str:
    """Return the content of a file in /proc or /sys; empty if there is none."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def host_memory() -> tuple[float, float] | None:
    """Return the (free, total) memory in bytes of this machine or container; None if unknown."""
    rows = (line.split() for line in system_file("/proc/meminfo").splitlines())
    kib = {row[0].rstrip(":"): float(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    if not {"MemAvailable", "MemTotal"} <= set(kib):
        return None
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit, used = system_file("/sys/fs/cgroup/memory.max"), system_file("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and float(limit) < total:
        free, total = min(free, float(limit) - float(used)), float(limit)
    return max(free, 0.0), total
