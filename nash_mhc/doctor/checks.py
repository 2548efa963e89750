"""The checks: installed packages, accelerators, devices, storage, and a short run. JAX is imported only in children."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import platform
import re
import shutil
import subprocess
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from nash_mhc import __version__
from nash_mhc.config.commands import module_command
from nash_mhc.doctor.findings import OK, PROBLEM, WARNING, Doing, Event, Finding, one_line
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_os_errors
from nash_mhc.storage.files import is_remote, to_path

_THIS_PACKAGE = "nash_mhc"
# Packages whose module has a different name.
_MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pyyaml": "yaml", "pillow": "PIL"}
_SHOWN = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
_PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")
_NVIDIA_SMI_S = 15.0  # a working driver answers in a second
_SLOW = 0.25  # of the data sheet's rate: a healthy device reaches more on a matmul of this size
_UNEQUAL = 0.5  # of the fastest device's rate: the others would wait for such a device in every step
_LOW_DISK = 5e9  # bytes: a few checkpoints of the smaller presets
_SENTENCE = "The doctor came by at {} and found that all was well.\n\n"


# --- packages --------------------------------------------------------------------------------------------------------


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(package: str) -> list[str]:
    """Return a package's requirements; ours from pyproject.toml if it is there, as an editable install may be old."""
    if package == _THIS_PACKAGE:
        with contextlib.suppress(OSError):
            return list(tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"])
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.requires(package) or []
    return []


def needed_modules() -> dict[str, str]:
    """Return module -> package for all that a run needs."""
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in _requirements(_THIS_PACKAGE) if "extra ==" not in text]
    return {_MODULES.get(_normalized(name), name.replace("-", "_")): name for name in names}


def installed_versions() -> dict[str, str]:
    """Return package -> version. The first of two copies counts, because it is imported."""
    versions: dict[str, str] = {}
    for package in metadata.distributions():
        if name := package.metadata["Name"]:  # a half removed package has none
            versions.setdefault(_normalized(name), package.version)
    return versions


def check_packages() -> Iterator[Finding]:
    """Compare the installed versions with what this package and its requirements need."""
    versions, wrong = installed_versions(), list[Finding]()
    needed, plugins = needed_modules(), [name for name in versions if _PLUGIN.fullmatch(name)]
    for package in [_THIS_PACKAGE, *map(_normalized, needed.values())]:
        for name, specifier, version in _unmet(package, versions):
            state = "is not installed" if version is None else f"is {version}"
            status = PROBLEM if package in (_THIS_PACKAGE, "jax") else WARNING
            text = f"{name} {state}, and {package} needs {specifier or 'it'}"
            wrong.append(Finding("packages", status, text, f"pip install '{name}{specifier}'"))
    for name in plugins:
        if versions[name] != (jaxlib := versions.get("jaxlib")):
            text = f"{name} is {versions[name]}, and jaxlib is {jaxlib}: JAX would not use it"
            wrong.append(Finding("packages", PROBLEM, text, "pip install --upgrade jax jaxlib " + " ".join(plugins)))
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {versions[name]}" for name in (*_SHOWN, *plugins) if name in versions)
        text = f"python {platform.python_version()}, nash_mhc {__version__}, {shown}; all {len(needed)} required packages"
        yield Finding("packages", OK, text, figures={name: versions[_normalized(name)] for name in needed.values()})


def _unmet(package: str, versions: dict[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, needed versions, installed version) of each unmet requirement of a package."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, _requirements(package)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = versions.get(_normalized(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                yield requirement.name, str(requirement.specifier), version


# --- accelerators ----------------------------------------------------------------------------------------------------


def check_accelerators() -> Iterator[Finding]:
    """List the GPUs that are plugged in, whether JAX can use them or not."""
    remedy = "check the driver (dmesg, a restart): a run would find no GPU"
    if (tool := shutil.which("nvidia-smi")) is None:
        yield Finding("accelerators", OK, "no NVIDIA GPU", figures={"gpus": []})
        return
    # A process that waits for a stuck driver may survive SIGKILL, so nobody waits for it.
    process = subprocess.Popen([tool, "--query-gpu=name", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
    try:
        answer, _ = process.communicate(timeout=_NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        process.kill()
        yield Finding("accelerators", WARNING, f"no answer within {_NVIDIA_SMI_S:g} s from nvidia-smi", remedy)
        return
    if process.returncode:
        yield Finding("accelerators", WARNING, f"nvidia-smi: {one_line(answer)}", remedy)
        return
    gpus = [line.strip() for line in answer.splitlines()]
    shown = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))
    yield Finding("accelerators", OK, shown, figures={"gpus": gpus})


def check_hidden_gpus(
    gpus: list[str], devices: Mapping[str, Any], installed: Mapping[str, str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the GPUs of this machine with the figures of the check "devices", which are JAX's."""
    visible, allowed = env.get("CUDA_VISIBLE_DEVICES"), env.get("JAX_PLATFORMS", "")
    has_plugin = any(map(_PLUGIN.fullmatch, installed))
    if gpus and devices["platform"] == "cpu":
        why, remedy = "JAX does not say why", "python -c 'import jax; jax.devices()' shows JAX's message"
        if allowed and not {"gpu", "cuda", "rocm"} & set(allowed.lower().split(",")):
            why, remedy = f"JAX_PLATFORMS={allowed} hides it", "unset JAX_PLATFORMS"
        elif visible in ("", "-1", "none", "void"):
            why, remedy = f"CUDA_VISIBLE_DEVICES={visible} hides it", "unset CUDA_VISIBLE_DEVICES"
        elif not has_plugin:
            why = "JAX is not installed for a GPU"
            remedy = "pip install 'nash_mhc[cuda]', or [cuda12] for a driver before CUDA 13"
        yield Finding("devices", WARNING, f"this machine has a GPU, but a run would train on the CPU: {why}", remedy)
    if devices["platform"] == "gpu" and devices["local"] < len(gpus):
        text = f"JAX sees {devices['local']} of {len(gpus)} GPUs"
        yield Finding("devices", WARNING, text, f"CUDA_VISIBLE_DEVICES={visible} selects; unset it to use all of them")
    if devices["platform"] == "cpu" and not gpus and has_plugin:
        text = "JAX is installed for CUDA, but there is no GPU"
        yield Finding("devices", WARNING, text, "on a machine with a GPU, check its driver: nvidia-smi must list it")


# --- devices ---------------------------------------------------------------------------------------------------------


def check_devices() -> Iterator[Event]:
    start, modules = time.monotonic(), needed_modules()
    for module, package in modules.items():  # one after the other, so that one that hangs or crashes is named
        yield Doing("imports", f"importing {module}", f"pip install --force-reinstall {package}")
        importlib.import_module(module)
    yield Finding("imports", OK, f"{len(modules)} packages in {time.monotonic() - start:.1f} s")
    import jax

    platforms = os.environ.get("JAX_PLATFORMS")
    remedy = (
        f"JAX_PLATFORMS is {platforms}: unset it, or install JAX for that platform (pip install 'nash_mhc[cuda]' or '[tpu]')"
        if platforms and platforms != "cpu"
        else "end other processes that hold the device, check its driver, or set JAX_PLATFORMS=cpu to train without it; on "
        "a TPU pod, start this command on all hosts at once"
    )
    yield Doing("devices", "asking JAX for its devices", remedy)
    devices, local = jax.devices(), jax.local_devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    figures = {"platform": devices[0].platform, "count": len(devices), "local": len(local), "processes": jax.process_count()}
    yield Finding("devices", OK, f"{len(devices)} x {kinds} ({devices[0].platform})", figures=figures)
    remedy = "another process may hold its memory (see nvidia-smi), or its driver does not match JAX"
    yield Doing("matmul", "compiling and running a matmul", remedy)
    yield _matmul(local)
    remedy = "devices cannot reach each other: try NCCL_DEBUG=INFO, or exclude one with CUDA_VISIBLE_DEVICES"
    yield Doing("all-reduce", "compiling and running a sum over all devices", remedy)
    yield _all_reduce(devices)


def _matmul(devices: list[Any]) -> Finding:
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
    return Finding("matmul", WARNING if remedy else OK, text, remedy, {"dtype": dtype, "rates": rates})


def _all_reduce(devices: list[Any]) -> Finding:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    n, length = len(devices), 1 << 20
    split = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec("all"))
    shard = lambda index: np.full((1, length), (index[0].start or 0) + 1, np.float32)
    values = jax.make_array_from_callback((n, length), split, shard)
    add_up = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=split.mesh, in_specs=split.spec, out_specs=PartitionSpec())
    )
    for shard in add_up(values).addressable_shards:
        if not (np.asarray(shard.data) == n * (n + 1) / 2).all():
            raise RuntimeError(f"the sum over {n} devices is wrong")
    start = time.perf_counter()
    jax.block_until_ready(add_up(values))
    seconds = time.perf_counter() - start
    text = f"{length / 250_000:.0f} MB from each of {n} devices in {seconds * 1e3:.3g} ms" if n > 1 else "one device"
    return Finding("all-reduce", OK, text, figures={"devices": n, "seconds": seconds})


# --- storage ---------------------------------------------------------------------------------------------------------


def check_storage(folder: str) -> Iterator[Event]:
    """Write a file to the folder, or to its nearest parent that exists, and read it."""
    remedy = (
        f"make {folder} a directory that this user can write to, or use another folder, for doctor and for "
        "train --checkpoint-dir"
    )
    yield Doing("storage", f"writing to {folder}", remedy)
    path = to_path(folder)
    existing = path if is_remote(path) else next(each for each in (path, *path.absolute().parents) if each.exists())
    trial, content = existing / f".doctor-{uuid.uuid4().hex[:12]}", os.urandom(1 << 20)
    with as_os_errors():
        try:
            files.write_atomic(trial, content)
            if trial.read_bytes() != content:
                raise OSError("the bytes read differ from the bytes written")
        finally:
            trial.unlink(missing_ok=True)
    if is_remote(path):
        yield Finding("storage", OK, f"{folder} can be written")
        return
    free = shutil.disk_usage(existing).free
    remedy = "free space, or name a folder on another disk: a checkpoint takes about 12 bytes per parameter"
    low = free < _LOW_DISK
    text = f"{folder} can be written, {free / 1e9:.1f} GB free"
    yield Finding("storage", WARNING if low else OK, text, remedy if low else "", {"free": free})


# --- a short run -----------------------------------------------------------------------------------------------------


def smoke_test(scratch: str, platform: str, count: int) -> Iterator[Event]:
    """Train the tiny preset for two steps, then resume it for one more."""
    train = module_command("nash_mhc.train", "--total-steps", "2")
    remedy = f"please report it with the file that --json FILE writes and the output of {train}"
    yield Doing("smoke test", "compiling and running the step of a small model", remedy)
    from nash_mhc.checkpoint.run_folder import RunFolder
    from nash_mhc.config.parsing import parse
    from nash_mhc.train.trainer import run

    start, folder = time.monotonic(), Path(scratch)
    text = folder / "text.txt"
    text.write_text("".join(_SENTENCE.format(number) for number in range(400 * count)), encoding="utf-8")
    flags = (  # without evaluation and samples, which would be more programs to compile
        f"--dataset {text} --cache-dir {folder / 'data'} --checkpoint-dir {folder / 'run'} --validation-fraction 0 "
        f"--batch-size {2 * count} --mesh-data -1 --platform {platform} --num-processes 1 --warmup-steps 0 "
        "--log-interval 1 --eval-interval 0 --checkpoint-interval 1 --sample-tokens 0"
    )
    if platform == "cpu":  # compilation takes most of the time; on an accelerator, try the kernels of a real run
        flags += " --model-layers 1 --model-scales 2 --model-streams 2 --model-width 64 --model-ffn 128 --seq-len 64"
    for steps in (2, 3):
        run(parse([*flags.split(), "--total-steps", str(steps)]).config, quiet=True)
    losses = [row["loss"] for row in RunFolder(folder / "run").rows()]
    if len(losses) != 3 or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"expected 3 finite losses, got {losses}")
    shown = " -> ".join(f"{loss:.3f}" for loss in losses)
    text_ok = f"2 steps, saved, verified and resumed for a third (loss {shown}) in {time.monotonic() - start:.0f} s"
    yield Finding("smoke test", OK, text_ok, figures={"losses": losses})
