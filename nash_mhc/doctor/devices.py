"""What JAX makes of the machine: its packages imported, its devices found and put to work, all of them together."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, WARNING, Finding, size, told
from nash_mhc.doctor.packages import is_there, needed_modules
from nash_mhc.doctor.teller import Stop, Teller

_SLOW = 0.25  # of the data sheet's rate: nothing healthy is below it on a matmul of this size
_UNEQUAL = 0.5  # of the fastest device's rate: all others would wait for such a one in every step


def _imports(tell: Teller) -> None:
    """One after another, so that the one that hangs or tears the process down is known by its name."""
    modules = {module: package for module, package in needed_modules().items() if is_there(module)}
    missing, broken = sorted(set(needed_modules()) - set(modules)), []
    began = time.monotonic()
    for module, package in modules.items():
        remedy = f"pip install --force-reinstall {package}"
        with tell.part("imports", f"importing {module}", remedy):
            try:
                importlib.import_module(module)
            except Exception as error:  # a library may raise anything when it finds another one changed
                if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in missing:
                    continue  # that has been told, with its remedy
                broken.append(module)
                tell.found(Finding("imports", PROBLEM, f"{module} cannot be imported ({told(error)})", remedy))
    if missing and not broken:
        tell.found(Finding("imports", SKIPPED, f"because of what is not installed: {', '.join(missing)}"))
    if missing or broken:
        raise Stop
    tell.ok("imports", f"{len(modules)} packages in {time.monotonic() - began:.1f} s")


def _processes(tell: Teller, devices: list[Any]) -> str:
    """Whether a launcher makes this process one of several; asked only, for the others may not be there."""
    from nash_mhc.config.schema import MeshConfig
    from nash_mhc.parallel.place import find_place

    place = find_place(MeshConfig(), os.environ)
    together = max(device.process_index for device in devices) + 1
    if place is None and together == 1:
        return "1 process"
    which = f"process {place.index} of {place.count}" if place and place.count else "one process of several"
    text = f"{which}: looked at by itself; a run joins the others"
    remedy = "train for 2 steps with the same launcher to try them together"
    tell.found(Finding("processes", WARNING, text, remedy))
    return which


def _devices(tell: Teller) -> list[Any]:
    import jax

    devices = jax.devices()
    local = jax.local_devices()
    kinds = sorted({device.device_kind for device in devices})
    processes = _processes(tell, devices)
    text = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform}), {processes}"
    figures = {"platform": devices[0].platform, "count": len(devices), "local": len(local), "kinds": kinds}
    tell.ok("devices", text, **figures, processes=jax.process_count())
    return devices


def _matmul(tell: Teller) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from nash_mhc.runtime.hardware import known_peak, matmul_rate

    devices = jax.local_devices()
    devices = devices[:1] if devices[0].platform == "cpu" else devices  # emulated ones are the same processor
    small = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 8
    for device in devices:
        if not np.array_equal(jax.jit(jnp.matmul)(jax.device_put(small, device), small.T), small @ small.T):
            raise RuntimeError(f"{device}: a product of small whole numbers comes out wrong")
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    rates = [matmul_rate(dtype, device, seconds=0.3) for device in devices]
    peak = known_peak(devices[0].device_kind)
    text = f"{min(rates) / 1e12:.3g} TFLOP/s in {dtype}" + f" on the slowest of {len(rates)}" * (len(rates) > 1)
    text += f", {min(rates) / peak / 1e12:.0%} of the data sheet" if peak else ""
    remedy = ""
    if peak and min(rates) < _SLOW * peak * 1e12:
        remedy = "it is slower than it should be: another process may use it, or it is too hot or capped (nvidia-smi -q)"
    elif min(rates) < _UNEQUAL * max(rates):
        slowest = devices[rates.index(min(rates))]
        remedy = f"{slowest} has less than half of the others' rate, who wait for it: see what else runs on it, or leave it out"
    tell.found(Finding("matmul", WARNING if remedy else OK, text, remedy, {"dtype": dtype, "rates": rates}))


def _all_reduce(tell: Teller, devices: list[Any]) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    n = len(devices)
    if n == 1:
        tell.ok("all-reduce", "one device: there are no others to add up with", devices=1)
        return
    length = (1 << 20) if devices[0].platform == "cpu" else (1 << 25)  # float32 numbers that each device has
    split = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec("all"))
    mine = lambda index: np.full((1, length), index[0].start + 1, np.float32)
    ours = jax.make_array_from_callback((n, length), split, mine)
    add_up = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=split.mesh, in_specs=split.spec, out_specs=PartitionSpec())
    )
    summed = jax.block_until_ready(add_up(ours))
    if not all((np.asarray(shard.data) == n * (n + 1) / 2).all() for shard in summed.addressable_shards):
        raise RuntimeError(f"the sum over {n} devices comes out wrong")
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(add_up(ours))
        best = min(best, time.perf_counter() - began)
    rate = 4 * length / best
    text = f"{size(4 * length)} from each of {n} devices in {best * 1e3:.3g} ms, {rate / 1e9:.3g} GB/s"
    tell.ok("all-reduce", text, devices=n, bytes=4 * length, seconds=best, rate=rate)


def _memory(tell: Teller) -> None:
    import jax

    from nash_mhc.runtime.hardware import device_memory

    devices = jax.local_devices()
    limits = [limit for device in devices if (limit := device_memory(device)) is not None]
    if not limits:
        tell.ok("device memory", "that of the host", bytes=None)
        return
    used = [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in devices]
    text = f"{size(min(limits))} a device for a run's arrays, {size(max(used))} of them in use by this check"
    tell.ok("device memory", text, bytes=limits, used=used)


def check(tell: Teller) -> None:
    _imports(tell)
    platforms = os.environ.get("JAX_PLATFORMS")
    remedy = (
        f"JAX_PLATFORMS is {platforms}: unset it, or install JAX for that platform (pip install 'nash_mhc[cuda]' or '[tpu]')"
        if platforms and platforms != "cpu"
        else "end other processes that hold the device, look after its driver, or set JAX_PLATFORMS=cpu to do without; on "
        "a TPU pod, give this command on all hosts at once"
    )
    with tell.part("devices", "asking JAX for its devices", remedy):
        devices = _devices(tell)
    remedy = "another process may hold its memory (nvidia-smi names it), or its driver and JAX do not fit together"
    with tell.part("matmul", "compiling and running a matmul", remedy):
        _matmul(tell)
    remedy = "devices do not reach each other: see NCCL_DEBUG=INFO, or leave one out with CUDA_VISIBLE_DEVICES"
    with tell.part("all-reduce", "compiling and running a sum over all devices", remedy):
        _all_reduce(tell, devices)
    with tell.part("device memory", "asking the devices", "look at the devices' own tools, such as nvidia-smi"):
        _memory(tell)
