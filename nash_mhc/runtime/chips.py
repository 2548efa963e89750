"""Machines by name (v6e-8, h100-16), from `chips.yaml`, and the CPU and memory of this one. Without JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError

_FACTS = Path(__file__).with_name("chips.yaml")
_COPIED = 1 << 26  # bytes, more than a cache holds
_MOST = 4096  # chips that a plan is made for


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator; the keys of chips.yaml, which says what each of them is."""

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
        """Bytes that a program may use."""
        return self.usable_gib * 2**30 if self.usable_gib else self.memory_gb * 1e9

    @property
    def largest(self) -> int:
        """Chips that share their fast links at most."""
        return max(self.slices)


@dataclass(frozen=True)
class Machine:
    """So many chips: one slice or node of them, or several, which are joined by the slower network."""

    name: str
    chip: Chip
    chips: int
    slices: int = 1

    @property
    def topology(self) -> str:
        """Of one slice."""
        return self.chip.slices[self.chips // self.slices]

    @property
    def dollars_an_hour(self) -> float | None:
        return None if self.chip.dollars is None else self.chip.dollars * self.chips

    def __str__(self) -> str:
        each = f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology
        return f"{self.name}: {self.chips} x {self.chip.name}" + (f" ({each})" if self.chip.platform == "tpu" else "")


def _chip(name: str, facts: Mapping[str, Any], where: str) -> Chip:
    known = {"from" if f.name == "source" else f.name for f in dataclasses.fields(Chip)} - {"name"}
    if unknown := sorted(set(facts) - known):
        raise ConfigError(f"{where}: {name} has no key {unknown[0]}{did_you_mean(unknown[0], known)}")
    values = {("source" if key == "from" else key): value for key, value in facts.items()}
    values["kinds"] = tuple(values.get("kinds", ()))
    required = {f.name for f in dataclasses.fields(Chip) if f.default is dataclasses.MISSING} - {"name"}
    if missing := sorted(required - set(values)):
        lacking = missing[0].replace("source", "from")
        raise ConfigError(f"{where}: {name} lacks {lacking}; chips.yaml of the package says what it is")
    for key in ("tflops", "memory_gb", "memory_gbps", "links_gbps"):
        if not isinstance(values[key], int | float) or values[key] <= 0:
            raise ConfigError(f"{where}: {key} of {name} must be a positive number, not {values[key]!r}")
    numbers = {key: float(value) for key, value in values.items() if type(value) is int}  # as people write them
    return Chip(name=name, **values | numbers)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    import yaml  # here, since `doctor` has to run without it

    try:
        facts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--chips {file}: cannot be read ({str(error).splitlines()[0]}); give a YAML file of chips") from None
    if not isinstance(facts, dict) or not all(isinstance(each, dict) for each in facts.values()):
        raise ConfigError(f"--chips {file}: must hold chips by name, with keys and values under each, as chips.yaml does")
    return facts


@functools.cache
def chips(file: str | None = None) -> dict[str, Chip]:
    """All that are known, by name; `file` adds to them and changes them."""
    facts = _read(_FACTS)
    for name, changes in (_read(Path(file).expanduser()) if file else {}).items():
        facts[name] = facts.get(name, {}) | changes
    return {name: _chip(name, each, f"--chips {file}" if file else _FACTS.name) for name, each in facts.items()}


def by_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls so. The longest name counts: GB200 is no B200, an L40 no L4."""
    named = [(kind, chip) for chip in chips().values() for kind in chip.kinds if kind in device_kind]
    return max(named, key=lambda each: len(each[0]))[1] if named else None


def machine(name: str, known: Mapping[str, Chip]) -> Machine:
    """`v6e-8`, `h100-16`, or a chip alone (one of it). ConfigError, with the nearest name."""
    kind, dash, number = name.lower().rpartition("-")
    if name.lower() in known:  # a100-80 is a kind itself, and one of it
        kind, dash, number = name.lower(), "", ""
    elif not dash:
        kind, number = name.lower(), ""
    if kind not in known:
        raise ConfigError(f"--chip {name}: there is no such chip{_nearest(kind, known)}")
    chip = known[kind]
    if number and (not number.isdigit() or int(number) < 1):
        raise ConfigError(f"--chip {name}: write the number of chips after the dash, as in {kind}-{chip.largest}")
    cores = 2 if chip.named_by == "cores" else 1
    smallest = min(chip.slices)
    count = int(number) // cores if number else smallest
    if count in chip.slices:
        return Machine(name.lower(), chip, count)
    if count <= _MOST and count > chip.largest and count % chip.largest == 0:
        if chip.network_gbps is None:
            raise ConfigError(
                f"--chip {name}: more than {kind}-{chip.largest * cores} are several machines, and what joins them is not "
                f"known; give network_gbps of {kind} in a file for --chips"
            )
        return Machine(name.lower(), chip, count, count // chip.largest)
    sizes = [*chip.slices, *range(2 * chip.largest, _MOST + 1, chip.largest)]
    near = min(sizes, key=lambda size: abs(size - count))
    raise ConfigError(f"--chip {name}: there is no such size; did you mean {kind}-{near * cores}?")


def next_larger(of: Machine) -> Iterable[Machine]:
    """The same chip in larger numbers, one slice or node of it."""
    cores = 2 if of.chip.named_by == "cores" else 1
    for count in sorted(of.chip.slices):
        if count > of.chips:
            yield Machine(f"{of.chip.name}-{count * cores}", of.chip, count)


def _nearest(word: str, known: Mapping[str, Chip]) -> str:
    return did_you_mean(word, known) or f"; there are {', '.join(known)}"


def _best_of(count: int, work: object) -> float:
    best = float("inf")
    for _ in range(count):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best


def this_cpu() -> Machine:
    """Return this machine's CPU as a machine to plan for; measures its rates, which takes a second.

    With numpy: JAX would reserve the accelerators.
    """
    import numpy as np

    n = 1024
    a = np.ones((n, n), np.float32)
    seconds = _best_of(5, lambda: a @ a)
    source, target = np.ones(_COPIED // 8), np.empty(_COPIED // 8)
    copied = _best_of(3, lambda: np.copyto(target, source))
    held = host_memory()
    memory = held[1] / 1e9 if held else math.inf
    gbps = 2 * _COPIED / copied / 1e9
    chip = Chip(
        name="cpu", platform="cpu", tflops=2 * n**3 / seconds / 1e12, memory_gb=memory,
        memory_gbps=gbps, links_gbps=gbps,
        network_gbps=None, dollars=None, named_by="chips", slices={1: "1"}, source="measured just now",
    )  # fmt: skip
    return Machine("cpu", chip, 1)


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
