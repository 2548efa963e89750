"""The CPU at hand as a machine to plan for: its rates are measured, which takes a second."""

from __future__ import annotations

import math
import time

import numpy as np

from nash_mhc.runtime.chips import Chip, Machine
from nash_mhc.runtime.host_memory import host_memory

_COPIED = 1 << 26  # bytes, more than a cache holds


def _best_of(count: int, work: object) -> float:
    best = float("inf")
    for _ in range(count):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best


def this_cpu() -> Machine:
    """float32 matrix work by all of its cores, and its memory: a copy reads and writes.

    By numpy: JAX would take hold of the accelerators, if there are some.
    """
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
