"""What the devices could do at best, the denominator of MFU, and how much they hold."""

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
    """Processors that this process may keep busy:
    as many as it is bound to, or fewer where a container grants it less."""
    bound = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(bound, float(quota) / float(period))
    return bound


def _processor_time() -> float:
    """Seconds that all processors together would have needed for what this process has done so far."""
    return time.process_time() / cores()


def matmul_rate(dtype: str, device: jax.Device, seconds: float = 0.5) -> float:
    """FLOP/s of a large square matmul on one device: the best of several runs, waiting for each.

    A CPU may be busy with something else just now. What it could do follows from the time that it spends on this.
    """
    n, clock = (1024, _processor_time) if device.platform == "cpu" else (8192, time.perf_counter)
    # Drawn on the host, and repeated where it is large: a program that draws would take longer than all else here.
    drawn = np.resize(np.random.default_rng(0).standard_normal(1 << 20, np.float32), (n, n)).astype(jnp.dtype(dtype))
    a, b = jax.device_put((drawn, drawn.T), device)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, b))
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = clock()
        jax.block_until_ready([multiply(a, b) for _ in range(2)])
        best = min(best, (clock() - start) / 2)
    return 2 * n**3 / best


def memory_rate(device: jax.Device, seconds: float = 0.5) -> float:
    """Bytes a second that go through the memory of one device, read or written: the best of several passes of
    a = a + 3 b over arrays that no cache holds."""
    n, calls = (1 << 24, 1) if device.platform == "cpu" else (1 << 28, 4)
    drawn = np.zeros(n, np.float32)
    a, b = (jax.device_put(drawn, device) for _ in range(2))
    add = jax.jit(lambda a, b: a + 3.0 * b, donate_argnums=0)  # in place: a new array's pages would be mapped first
    a = jax.block_until_ready(add(a, b))
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        for _ in range(calls):
            a = add(a, b)
        jax.block_until_ready(a)
        best = min(best, (time.perf_counter() - start) / calls)
    return 3 * 4 * n / best


_rate_here = functools.cache(functools.partial(matmul_rate, seconds=0.2))  # a run should not wait for it twice


def known_peak(device_kind: str) -> float | None:
    """bfloat16 TFLOP/s of one such chip by its data sheet."""
    return None if (chip := by_kind(device_kind)) is None else chip.tflops


def known_memory(device_kind: str) -> int | None:
    """Bytes of one such chip by its data sheet."""
    return None if (chip := by_kind(device_kind)) is None else int(chip.memory_gb * 10**9)


def device_memory(device: jax.Device) -> int | None:
    """Bytes that a program may use on one device; None for a CPU, and where nobody knows."""
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(limit) if limit else known_memory(device.device_kind)


def processors(mesh: Mesh) -> int:
    """Devices that work on their own: emulated host devices share one processor."""
    return 1 if mesh.devices.flat[0].platform == "cpu" else mesh.size


def peak_flops(mesh: Mesh, dtype: str, measured_rate: float | None = None) -> float | None:
    """FLOP/s of the whole mesh: the data sheet's for bfloat16 on a known chip, the measured matmul rate for any other.

    None on a CPU: what is measured there depends on what else runs, and so would MFU.
    """
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    if device.platform == "cpu":
        return None
    if dtype == "bfloat16" and (teraflops := known_peak(device.device_kind)):
        return teraflops * 1e12 * mesh.size
    return (measured_rate or _rate_here(dtype, device)) * processors(mesh)


def peak_memory(mesh: Mesh) -> int | None:
    """Bytes that the fullest of this process's devices has held at most;
    None where a device does not say, such as a CPU."""
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index() and d.platform != "cpu"]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in mine]
    return max((peak for peak in peaks if peak is not None), default=None)
