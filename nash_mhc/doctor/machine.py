"""What the machine itself says, without JAX: accelerators and free memory; and whether JAX sees all of that."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nash_mhc.doctor.findings import OK, WARNING, Finding, size, told
from nash_mhc.doctor.teller import Teller
from nash_mhc.runtime.chips import host_memory, system_file

_GOOGLE = "0x1ae0"  # as a vendor on the PCI bus
_LITTLE = 2e9  # bytes: the tiny model's run takes about half of it
_DRIVER = "look after the driver (dmesg, a restart): a run would find no GPU"


def gpus() -> list[dict[str, Any]]:
    """Those that NVIDIA's tool lists; OSError where it fails. A driver that is stuck keeps it waiting for ever."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    asked = [tool, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise OSError(answer.stdout.strip() or answer.stderr.strip() or f"nvidia-smi ended with {answer.returncode}")
    found = []
    for line in answer.stdout.splitlines():
        name, *memory = (word.strip() for word in line.split(","))
        total, used = (float(word) * 2**20 if word.replace(".", "").isdigit() else None for word in [*memory, "", ""][:2])
        found.append({"name": name, "memory": total, "used": used})
    return found


def tpu_chips(dev: Path = Path("/dev"), bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Device files of TPU chips; since v5e they are those of VFIO, which other devices than Google's have as well."""
    if chips := [*dev.glob("accel[0-9]*")]:
        return len(chips)
    of_google = (card for card in bus.glob("*") if system_file(card / "vendor") == _GOOGLE)
    if all(system_file(card / "class").startswith(("0x01", "0x02")) for card in of_google):  # disks and networks of its cloud
        return 0
    return len([*dev.glob("vfio/[0-9]*")])


def check_accelerators() -> Iterator[Finding]:
    """What is plugged in, whoever may use it."""
    try:
        cards = gpus()
    except (OSError, ValueError) as error:
        yield Finding("accelerators", WARNING, f"nvidia-smi: {told(error)}", _DRIVER)
        cards = []
    chips = tpu_chips()
    figures = {"gpus": cards, "tpu_chips": chips}
    names = sorted({card["name"] for card in cards})
    shown = [f"{sum(card['name'] == name for card in cards)} x {name}" for name in names]
    shown += [f"{chips} TPU chips by their device files"] * (chips > 0)
    yield Finding("accelerators", OK, ", ".join(shown) or "none: the CPU is what there is", figures=figures)
    for number, card in enumerate(cards):
        if card["used"] and card["memory"] and card["used"] > 0.1 * card["memory"]:
            text = f"GPU {number}: {size(card['used'])} of {size(card['memory'])} are taken by others"
            yield Finding("accelerators", WARNING, text, "nvidia-smi names the processes; end them, or take another GPU")


def check(tell: Teller) -> None:
    """In a process of its own: one that waits for a driver cannot always be ended."""
    with tell.part("accelerators", "asking nvidia-smi", _DRIVER, patience=0.25, status=WARNING):
        for finding in check_accelerators():
            tell.found(finding)


def check_memory() -> Iterator[Finding]:
    if (found := host_memory()) is None:
        yield Finding("host memory", OK, "this system does not say how much is free")
        return
    free, total = found
    text = f"{size(free)} of {size(total)} are free"
    few = f"end what else is running, or take a machine with more: below {size(_LITTLE)} even small runs are killed"
    low = free < _LITTLE
    yield Finding("host memory", WARNING if low else OK, text, few * low, {"free": free, "total": total})


def _why_hidden(kind: str, names: tuple[str, ...], installed: list[str], env: Mapping[str, str]) -> tuple[str, str]:
    """(why JAX does not see a device that is there, the remedy)"""
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and not set(names) & set(platforms.lower().split(",")):
        return f"JAX_PLATFORMS={platforms} hides it", "unset JAX_PLATFORMS"
    hiding = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if kind == "GPU" else ("TPU_VISIBLE_CHIPS",)
    for variable in hiding:
        if env.get(variable) in ("", "-1", "none", "void"):
            return f"{variable}={env[variable]} hides it", f"unset {variable}"
    extra, part = ("cuda", "cuda") if kind == "GPU" else ("tpu", "libtpu")
    if not any(part in name for name in installed):
        older = ", or [cuda12] for a driver before CUDA 13" if kind == "GPU" else ""
        return f"JAX is not installed for a {kind}", f"pip install 'nash_mhc[{extra}]'{older}"
    return "JAX does not say why", "another process may hold it; python -c 'import jax; jax.devices()' shows JAX's own words"


def compare(
    there: Mapping[str, Any], seen: Mapping[str, Any], installed: list[str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """`there` are the figures of the accelerators, `seen` those of JAX's devices."""
    cards, chips = len(there.get("gpus", ())), int(there.get("tpu_chips", 0))
    names = {"GPU": ("gpu", "cuda", "rocm"), "TPU": ("tpu",)}
    for kind, count in (("GPU", cards), ("TPU", chips)):
        if count and seen.get("platform") == "cpu":
            why, remedy = _why_hidden(kind, names[kind], installed, env)
            yield Finding("devices", WARNING, f"a {kind} is here and a run would train on the CPU: {why}", remedy)
    if seen.get("platform") == "gpu" and seen.get("local", 0) < cards:
        text = f"JAX sees {seen['local']} of {cards} GPUs"
        remedy = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')} chooses; unset it to have all of them"
        yield Finding("devices", WARNING, text, remedy)
    if seen.get("platform") == "cpu" and not cards and any("cuda" in name for name in installed):
        text = "JAX is installed for CUDA, and no GPU is here"
        yield Finding("devices", WARNING, text, "on a machine with a GPU, look after its driver: nvidia-smi has to list it")
