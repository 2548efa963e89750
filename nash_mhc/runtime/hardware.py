"""Peak FLOP/s (the denominator of MFU), memory bandwidth and memory size of the devices."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nash_mhc.runtime.chips import by_kind


def cores() -> float:
    """Return the number of CPU cores available to this process: its affinity, or the container's quota if smaller."""
    bound = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(bound, float(quota) / float(period))
    return bound


def _processor_time() -> float:
    """Return the CPU time of this process so far, divided by its number of cores."""
    return time.process_time() / cores()


def matmul_rate(dtype: str, device: jax.Device, seconds: float = 0.5) -> float:
    """Return the FLOP/s of a large square matmul on one device, the best of several runs.

    On a CPU this counts CPU time, because other processes may be using it.
    """
    n, clock = (1024, _processor_time) if device.platform == "cpu" else (8192, time.perf_counter)
    # Random numbers from the host, repeated to fill a large array: compiling a random generator would take longer.
    random = np.resize(np.random.default_rng(0).standard_normal(1 << 20, np.float32), (n, n)).astype(jnp.dtype(dtype))
    a, b = jax.device_put((random, random.T), device)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, b))
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = clock()
        jax.block_until_ready([multiply(a, b) for _ in range(2)])
        best = min(best, (clock() - start) / 2)
    return 2 * n**3 / best


def memory_rate(device: jax.Device, seconds: float = 0.5) -> float:
    """Return the memory bandwidth of one device in bytes/s (read and written), measured with a = a + 3 b."""
    n, calls = (1 << 24, 1) if device.platform == "cpu" else (1 << 28, 4)
    zeros = np.zeros(n, np.float32)
    a, b = (jax.device_put(zeros, device) for _ in range(2))
    add = jax.jit(lambda a, b: a + 3.0 * b, donate_argnums=0)  # in place, to avoid mapping new pages
    a = jax.block_until_ready(add(a, b))
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        for _ in range(calls):
            a = add(a, b)
        jax.block_until_ready(a)
        best = min(best, (time.perf_counter() - start) / calls)
    return 3 * 4 * n / best


_rate_here = functools.cache(functools.partial(matmul_rate, seconds=0.2))  # measured once per process


def known_peak(device_kind: str) -> float | None:
    """Return the bfloat16 TFLOP/s of a chip from its data sheet; None if unknown."""
    return None if (chip := by_kind(device_kind)) is None else chip.tflops


def known_memory(device_kind: str) -> int | None:
    """Return the memory bytes of a chip from its data sheet; None if unknown."""
    return None if (chip := by_kind(device_kind)) is None else int(chip.memory_gb * 10**9)


def device_memory(device: jax.Device) -> int | None:
    """Return the bytes that a program may use on one device; None for a CPU or if unknown."""
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(limit) if limit else known_memory(device.device_kind)


def processors(mesh: Mesh) -> int:
    """Return the number of independent devices: emulated host devices share one CPU."""
    return 1 if mesh.devices.flat[0].platform == "cpu" else mesh.size


def peak_flops(mesh: Mesh, dtype: str, measured_rate: float | None = None) -> float | None:
    """Return the peak FLOP/s of the mesh: from the data sheet for bfloat16 on a known chip, else measured.

    None on a CPU, where the measurement depends on other processes.
    """
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    if device.platform == "cpu":
        return None
    if dtype == "bfloat16" and (teraflops := known_peak(device.device_kind)):
        return teraflops * 1e12 * mesh.size
    return (measured_rate or _rate_here(dtype, device)) * processors(mesh)


def peak_memory(mesh: Mesh) -> int | None:
    """Return the largest peak memory use of this process's devices in bytes; None if they do not report it (CPU)."""
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index() and d.platform != "cpu"]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
    return max((peak for peak in peaks if peak is not None), default=None)
