"""Checks of JAX: import the packages, find the devices, run a matmul on each and an all-reduce over all."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, WARNING, Finding, one_line, size
from nash_mhc.doctor.isolated import CheckFailed, Reporter
from nash_mhc.doctor.machine import is_installed, needed_modules

_SLOW = 0.25  # of the data sheet's rate: a healthy device reaches more on a matmul of this size
_UNEQUAL = 0.5  # of the fastest device's rate: the others would wait for such a device in every step


def _imports(reporter: Reporter) -> None:
    """Import one module after the other, so that one that hangs or crashes is named."""
    modules = {module: package for module, package in needed_modules().items() if is_installed(module)}
    missing, broken = sorted(set(needed_modules()) - set(modules)), []
    start = time.monotonic()
    for module, package in modules.items():
        remedy = f"pip install --force-reinstall {package}"
        with reporter.section("imports", f"importing {module}", remedy):
            try:
                importlib.import_module(module)
            except Exception as error:  # a library may raise anything when a dependency has changed
                if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in missing:
                    continue  # reported as a missing package
                broken.append(module)
                reporter.found(Finding("imports", PROBLEM, f"{module} cannot be imported ({one_line(error)})", remedy))
    if missing and not broken:
        reporter.found(Finding("imports", SKIPPED, f"because of missing packages: {', '.join(missing)}"))
    if missing or broken:
        raise CheckFailed
    reporter.ok("imports", f"{len(modules)} packages in {time.monotonic() - start:.1f} s")


def _processes(reporter: Reporter, devices: list[Any]) -> str:
    """Describe this process's place among those of a launcher, without waiting for the others."""
    from nash_mhc.config.schema import MeshConfig
    from nash_mhc.parallel.processes import find_place

    place = find_place(MeshConfig(), os.environ)
    together = max(device.process_index for device in devices) + 1
    if place is None and together == 1:
        return "1 process"
    which = f"process {place.index} of {place.count}" if place and place.count else "one process of several"
    text = f"{which}: checked alone; a run uses all of them"
    remedy = "train for 2 steps with the same launcher to try them together"
    reporter.found(Finding("processes", WARNING, text, remedy))
    return which


def _devices(reporter: Reporter) -> list[Any]:
    import jax

    devices = jax.devices()
    local = jax.local_devices()
    kinds = sorted({device.device_kind for device in devices})
    processes = _processes(reporter, devices)
    text = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform}), {processes}"
    figures = {"platform": devices[0].platform, "count": len(devices), "local": len(local), "kinds": kinds}
    reporter.ok("devices", text, **figures, processes=jax.process_count())
    return devices


def _matmul(reporter: Reporter) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from nash_mhc.runtime.hardware import known_peak, matmul_rate

    devices = jax.local_devices()
    devices = devices[:1] if devices[0].platform == "cpu" else devices  # emulated ones are the same processor
    small = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 8
    for device in devices:
        if not np.array_equal(jax.jit(jnp.matmul)(jax.device_put(small, device), small.T), small @ small.T):
            raise RuntimeError(f"{device}: a matmul of small integers gives a wrong result")
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    rates = [matmul_rate(dtype, device, seconds=0.3) for device in devices]
    peak = known_peak(devices[0].device_kind)
    text = f"{min(rates) / 1e12:.3g} TFLOP/s in {dtype}" + f" on the slowest of {len(rates)}" * (len(rates) > 1)
    text += f", {min(rates) / peak / 1e12:.0%} of the data sheet" if peak else ""
    remedy = ""
    if peak and min(rates) < _SLOW * peak * 1e12:
        remedy = "slower than expected: another process may use it, or it is hot or power-capped (nvidia-smi -q)"
    elif min(rates) < _UNEQUAL * max(rates):
        slowest = devices[rates.index(min(rates))]
        remedy = f"{slowest} has less than half of the others' rate: check what else runs on it, or exclude it"
    reporter.found(Finding("matmul", WARNING if remedy else OK, text, remedy, {"dtype": dtype, "rates": rates}))


def _all_reduce(reporter: Reporter, devices: list[Any]) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    n = len(devices)
    if n == 1:
        reporter.ok("all-reduce", "one device, nothing to reduce", devices=1)
        return
    length = (1 << 20) if devices[0].platform == "cpu" else (1 << 25)  # float32 numbers per device
    split = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec("all"))
    shard = lambda index: np.full((1, length), index[0].start + 1, np.float32)
    values = jax.make_array_from_callback((n, length), split, shard)
    add_up = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=split.mesh, in_specs=split.spec, out_specs=PartitionSpec())
    )
    summed = jax.block_until_ready(add_up(values))
    if not all((np.asarray(shard.data) == n * (n + 1) / 2).all() for shard in summed.addressable_shards):
        raise RuntimeError(f"the sum over {n} devices is wrong")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(add_up(values))
        best = min(best, time.perf_counter() - start)
    rate = 4 * length / best
    text = f"{size(4 * length)} from each of {n} devices in {best * 1e3:.3g} ms, {rate / 1e9:.3g} GB/s"
    reporter.ok("all-reduce", text, devices=n, bytes=4 * length, seconds=best, rate=rate)


def _memory(reporter: Reporter) -> None:
    import jax

    from nash_mhc.runtime.hardware import device_memory

    devices = jax.local_devices()
    limits = [limit for device in devices if (limit := device_memory(device)) is not None]
    if not limits:
        reporter.ok("device memory", "shared with the host", bytes=None)
        return
    used = [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in devices]
    text = f"{size(min(limits))} per device, {size(max(used))} of it used by this check"
    reporter.ok("device memory", text, bytes=limits, used=used)


def check(reporter: Reporter) -> None:
    _imports(reporter)
    platforms = os.environ.get("JAX_PLATFORMS")
    remedy = (
        f"JAX_PLATFORMS is {platforms}: unset it, or install JAX for that platform (pip install 'nash_mhc[cuda]' or '[tpu]')"
        if platforms and platforms != "cpu"
        else "end other processes that hold the device, check its driver, or set JAX_PLATFORMS=cpu to train without it; on "
        "a TPU pod, start this command on all hosts at once"
    )
    with reporter.section("devices", "asking JAX for its devices", remedy):
        devices = _devices(reporter)
    remedy = "another process may hold its memory (see nvidia-smi), or its driver does not match JAX"
    with reporter.section("matmul", "compiling and running a matmul", remedy):
        _matmul(reporter)
    remedy = "devices cannot reach each other: try NCCL_DEBUG=INFO, or exclude one with CUDA_VISIBLE_DEVICES"
    with reporter.section("all-reduce", "compiling and running a sum over all devices", remedy):
        _all_reduce(reporter, devices)
    with reporter.section("device memory", "asking the devices", "check the devices with nvidia-smi or a similar tool"):
        _memory(reporter)
