"""Trials of child processes: import the packages, compute on all devices, write to the storage, train and restore."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nash_mhc.config import presets
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, WARNING, CheckFailed, Finding, Reporter, one_line, size
from nash_mhc.doctor.machine import is_installed, needed_modules
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import Folder, is_remote, to_path

_SLOW = 0.25  # of the data sheet's rate: a healthy device reaches more on a matmul of this size
_UNEQUAL = 0.5  # of the fastest device's rate: the others would wait for such a device in every step
_BYTES, _BYTES_REMOTE = 64 << 20, 8 << 20  # written and read back; fewer over a network
_LOW_DISK = 5e9  # bytes: a few checkpoints of the smaller presets
_STEPS, _ROWS_PER_DEVICE = 2, 2
_SENTENCE = "The doctor came by at {} and found that all was well.\n\n"


# --- devices ---------------------------------------------------------------------------------------------------------


def check_devices(reporter: Reporter) -> None:
    _imports(reporter)
    import jax

    platforms = os.environ.get("JAX_PLATFORMS")
    remedy = (
        f"JAX_PLATFORMS is {platforms}: unset it, or install JAX for that platform (pip install 'nash_mhc[cuda]' or '[tpu]')"
        if platforms and platforms != "cpu"
        else "end other processes that hold the device, check its driver, or set JAX_PLATFORMS=cpu to train without it; on "
        "a TPU pod, start this command on all hosts at once"
    )
    with reporter.section("devices", "asking JAX for its devices", remedy):
        devices, local = jax.devices(), jax.local_devices()
        kinds = sorted({device.device_kind for device in devices})
        text = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform}), {_process(reporter, devices)}"
        figures = {"platform": devices[0].platform, "count": len(devices), "local": len(local), "kinds": kinds}
        reporter.ok("devices", text, **figures, processes=jax.process_count())
    remedy = "another process may hold its memory (see nvidia-smi), or its driver does not match JAX"
    with reporter.section("matmul", "compiling and running a matmul", remedy):
        _matmul(reporter, local)
    remedy = "devices cannot reach each other: try NCCL_DEBUG=INFO, or exclude one with CUDA_VISIBLE_DEVICES"
    with reporter.section("all-reduce", "compiling and running a sum over all devices", remedy):
        _all_reduce(reporter, devices)
    with reporter.section("device memory", "asking the devices", "check the devices with nvidia-smi or a similar tool"):
        _memory(reporter, local)


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


def _process(reporter: Reporter, devices: list[Any]) -> str:
    """Describe this process's place among those of a launcher, without waiting for the others."""
    from nash_mhc.config.schema import MeshConfig
    from nash_mhc.parallel.processes import find_place

    place = find_place(MeshConfig(), os.environ)
    if place is None and all(device.process_index == 0 for device in devices):
        return "1 process"
    which = f"process {place.index} of {place.count}" if place and place.count else "one process of several"
    text = f"{which}: checked alone; a run uses all of them"
    remedy = "train for 2 steps with the same launcher to try them together"
    reporter.found(Finding("processes", WARNING, text, remedy))
    return which


def _matmul(reporter: Reporter, devices: list[Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from nash_mhc.runtime.hardware import known_peak, matmul_rate

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
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(add_up(values))
        times.append(time.perf_counter() - start)
    rate = 4 * length / min(times)
    text = f"{size(4 * length)} from each of {n} devices in {min(times) * 1e3:.3g} ms, {rate / 1e9:.3g} GB/s"
    reporter.ok("all-reduce", text, devices=n, bytes=4 * length, seconds=min(times), rate=rate)


def _memory(reporter: Reporter, devices: list[Any]) -> None:
    from nash_mhc.runtime.hardware import device_memory

    limits = [limit for device in devices if (limit := device_memory(device)) is not None]
    if not limits:
        reporter.ok("device memory", "shared with the host", bytes=None)
        return
    used = [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in devices]
    text = f"{size(min(limits))} per device, {size(max(used))} of it used by this check"
    reporter.ok("device memory", text, bytes=limits, used=used)


# --- storage ---------------------------------------------------------------------------------------------------------


def check_storage(reporter: Reporter, *, folder: str, run_folder: str) -> None:
    remedy = f"give this user write access to {folder}, or name another folder here and with train --checkpoint-dir"
    with contextlib.suppress(CheckFailed), reporter.section("storage", f"writing to {folder}", remedy), as_os_errors():
        _check_rates(reporter, to_path(folder))
    remedy = "set JAX_COMPILATION_CACHE_DIR to a directory that you can write"
    with reporter.section("compilation cache", "looking for the cache", remedy, status=WARNING):
        _check_cache(reporter, to_path(run_folder))


def _trial_folder(folder: Folder) -> Folder:
    """Return the name of a new folder in `folder`, or in its nearest parent that exists."""
    existing = folder if is_remote(folder) else next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing / f".doctor-{uuid.uuid4().hex[:12]}"


def _read_from_disk(path: Folder) -> bytes:
    """Read a file after dropping it from the page cache, where the system allows that."""
    if not is_remote(path) and hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.read_bytes()


def _check_rates(reporter: Reporter, folder: Folder) -> None:
    """Measure how fast the storage is written (durably) and read."""
    content = os.urandom(1 << 20) * ((_BYTES_REMOTE if is_remote(folder) else _BYTES) >> 20)
    trial = _trial_folder(folder)
    files.make(trial)
    try:
        start = time.perf_counter()
        files.write_atomic(trial / "written", content)
        written = time.perf_counter()
        content_read = _read_from_disk(trial / "written")
        end = time.perf_counter()
        free = None if is_remote(folder) else shutil.disk_usage(trial).free
    finally:
        files.remove(trial)
    if content_read != content:
        raise OSError("the bytes read differ from the bytes written")
    write, read = (len(content) / max(seconds, 1e-9) for seconds in (written - start, end - written))
    text = f"{folder}: writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    text += "" if free is None else f", {size(free)} free"
    low = free is not None and free < _LOW_DISK
    remedy = "free space, or name a folder on another disk: a checkpoint takes about 12 bytes per parameter" if low else ""
    figures = {"folder": str(folder), "write": write, "read": read, "free": free}
    reporter.found(Finding("storage", WARNING if low else OK, text, remedy, figures))


def _check_cache(reporter: Reporter, run_folder: Folder) -> None:
    """Try the directory that `runtime/compiled.py` would use for compiled programs."""
    variable = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if variable == "":
        remedy = "unset JAX_COMPILATION_CACHE_DIR: with an empty value, every start compiles again"
        reporter.found(Finding("compilation cache", WARNING, "switched off", remedy))
        return
    default = (Path("runs") if is_remote(run_folder) else run_folder.parent) / ".jax_cache"
    cache = to_path(variable) if variable else default.absolute()
    try:
        with as_os_errors():
            trial = _trial_folder(cache)
            files.write_atomic(trial, b"x")
            trial.unlink()
    except OSError as error:
        remedy = "set JAX_COMPILATION_CACHE_DIR to another directory: without a cache every start compiles again"
        text = f"{cache}: cannot be written ({error.strerror or error})"
        reporter.found(Finding("compilation cache", WARNING, text, remedy))
        return
    new = not files.exists(cache)
    text = f"{cache}, writable{' (a run creates it)' if new else ''}"
    reporter.ok("compilation cache", text, folder=str(cache), new=new)


# --- two steps of a run ----------------------------------------------------------------------------------------------


def fast_compilation(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a smoke test on a CPU: compile fast, run slowly."""
    flags = env.get("XLA_FLAGS", "")
    wanted = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):  # other versions of XLA may abort at an unknown flag
        wanted.append("--xla_cpu_use_fusion_emitters=false")  # halves the compilation
    return {**env, "XLA_FLAGS": " ".join([flags, *(flag for flag in wanted if flag.partition("=")[0] not in flags)]).strip()}


def _smoke_config(scratch: Path, platform: str, count: int) -> RunConfig:
    """Return the tiny preset without evaluation and samples, which would be more programs to compile.

    On a CPU, where compilation takes most of the time, the model is smaller but has every part. On an accelerator it
    is the full preset, so that the kernels of a real run are tried.
    """
    cfg = presets.run("tiny")
    text = scratch / "text.txt"
    text.write_text("".join(_SENTENCE.format(number) for number in range(400 * count)), encoding="utf-8")
    if platform == "cpu" and isinstance(cfg.model, ModelConfig):
        small = replace(cfg.model, layers=1, scales=2, streams=2, width=64, ffn=128, heads=4, kv_heads=4)
        cfg = replace(cfg, model=small, data=replace(cfg.data, seq_len=64))
    return replace(
        cfg,
        data=replace(
            cfg.data, dataset=str(text), cache_dir=str(scratch / "data"), validation_fraction=0.0,
            batch_size=_ROWS_PER_DEVICE * count,
        ),
        mesh=replace(cfg.mesh, platform=platform, data=-1, num_processes=1),
        optim=replace(cfg.optim, warmup_steps=0),
        train=replace(
            cfg.train, total_steps=_STEPS, log_interval=1, eval_interval=0, checkpoint_interval=_STEPS,
            checkpoint_dir=str(scratch / "run"),
        ),
        telemetry=replace(cfg.telemetry, sample_tokens=0),
    )  # fmt: skip


def _check_restore(folder: str | Folder, state: Any) -> None:
    """Raise unless the checkpoint is complete (ConfigError) and restores bit for bit (RuntimeError)."""
    import jax
    import numpy as np

    from nash_mhc.checkpoint.store import Store
    from nash_mhc.parallel.params import named_leaves

    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    with Store(folder) as store:
        restored = named_leaves(store.restore(_STEPS, like)[0])
    for name, leaf in named_leaves(state).items():
        if np.asarray(leaf).tobytes() != np.asarray(restored[name]).tobytes():
            raise RuntimeError(f"{name} differs after the restore")


def smoke_test(reporter: Reporter, *, scratch: str, platform: str, count: int) -> None:
    start = time.monotonic()
    train = module_command("nash_mhc.train", "--total-steps", "2")
    remedy = f"please report it with the file that --json FILE writes and the output of {train}"
    with reporter.section("smoke test", "starting", remedy, patience=5.0):
        from nash_mhc.checkpoint.run_folder import RunFolder
        from nash_mhc.train.callbacks import EachStep
        from nash_mhc.train.trainer import run

        cfg = _smoke_config(Path(scratch), platform, count)
        reporter.progress("compiling the step of a small model")
        step_times: list[float] = []

        def after_step(number: int) -> None:
            step_times.append(time.monotonic() - start)
            reporter.progress(f"step {number} of {_STEPS} done{'; saving' if number == _STEPS else ''}")

        result = run(cfg, quiet=True, callbacks=[EachStep(after_step)])
        losses = [row["loss"] for row in RunFolder(result.folder).rows()]
        if len(losses) != _STEPS or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise RuntimeError(f"expected {_STEPS} finite losses, got {losses}")
        reporter.progress("restoring")
        _check_restore(result.folder, result.state)
        seconds = time.monotonic() - start
        text = (
            f"{_STEPS} steps (loss {' -> '.join(f'{loss:.3f}' for loss in losses)}), saved, verified, restored bit for bit; "
            f"{seconds:.0f} s, {step_times[0]:.0f} s until the first step"
        )
        reporter.ok("smoke test", text, losses=losses, seconds=seconds, until_first_step=step_times[0])
