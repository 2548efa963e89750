"""Checks that need no JAX: installed packages and their versions, accelerators, free memory."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nash_mhc import __version__
from nash_mhc.doctor.findings import OK, PROBLEM, WARNING, Finding, Reporter, one_line, size
from nash_mhc.runtime.chips import host_memory, system_file

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_THIS_PACKAGE = "nash_mhc"
# Packages whose module has a different name.
_MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pyyaml": "yaml", "pillow": "PIL"}
_SHOWN = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
_DEVICE_PACKAGE = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)|libtpu(-nightly)?|jaxlib")
_GOOGLE = "0x1ae0"  # PCI vendor id
_LOW_MEMORY = 2e9  # bytes: a run of the tiny model takes about half of it
_CHECK_DRIVER = "check the driver (dmesg, a restart): a run would find no GPU"


# Packages


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """Return this package's requirements, from pyproject.toml if it is there, else from the installed metadata.

    An editable install keeps the metadata of the day it was installed.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if _normalized(project["name"]) == _normalized(_THIS_PACKAGE):
            return list(project["dependencies"])
    return metadata.requires(_THIS_PACKAGE) or []


def needed_modules() -> dict[str, str]:
    """Return module -> package for all that a run needs."""
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements() if "extra ==" not in text]
    return {_MODULES.get(_normalized(name), name.replace("-", "_")): name for name in names}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing or broken
        return False


def _installed_versions() -> dict[str, str]:
    """Return package -> version. The first of two copies counts, because it is imported."""
    versions: dict[str, str] = {}
    for package in metadata.distributions():
        if name := package.metadata["Name"]:  # a half removed package has none
            versions.setdefault(_normalized(name), package.version)
    return versions


def device_packages() -> list[str]:
    """Return the installed packages through which JAX uses an accelerator."""
    return sorted(name for name in _installed_versions() if _DEVICE_PACKAGE.fullmatch(name) and name != "jaxlib")


def check_packages() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("python", OK, f"{version}, {platform.system()} {platform.machine()}", figures={"version": version})
    versions = _installed_versions()
    findings = [*_missing_packages(versions)]
    try:
        findings += [*_wrong_versions(versions), *_conflicts(versions)]
    except ImportError as error:
        findings.append(Finding("versions", WARNING, f"cannot be compared ({one_line(error)})", "pip install packaging"))
    yield from findings
    if not any(finding.check == "packages" for finding in findings):
        shown = ", ".join(f"{name} {versions[name]}" for name in (*_SHOWN, *device_packages()) if name in versions)
        text = f"nash_mhc {__version__}, {shown}; all {len(needed_modules())} required packages"
        figures = {_normalized(name): versions.get(_normalized(name)) for name in needed_modules().values()}
        yield Finding("packages", OK, text, figures={"versions": figures})
    if not any(finding.check == "versions" for finding in findings):
        yield Finding("versions", OK, "compatible, according to the packages' metadata")


def _missing_packages(versions: dict[str, str]) -> Iterator[Finding]:
    for module, name in needed_modules().items():
        if _normalized(name) not in versions or not is_installed(module):
            yield Finding("packages", PROBLEM, f"{name} is not installed", f"pip install {name}, or this package again")


def _unmet(package: str, versions: dict[str, str], extra: str = "") -> Iterator[tuple[Requirement, str | None]]:
    """Yield (requirement, installed version) for each unmet requirement of a package."""
    from packaging.requirements import Requirement

    try:
        required = requirements() if package == _THIS_PACKAGE else metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for text in required:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = versions.get(_normalized(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield requirement, version


def _wrong_versions(versions: dict[str, str]) -> Iterator[Finding]:
    """Compare the installed packages with this package's own requirements."""
    missing = {_normalized(name) for module, name in needed_modules().items() if not is_installed(module)}
    for needed, version in _unmet(_THIS_PACKAGE, versions):
        if version is not None and _normalized(needed.name) not in missing:
            text = f"{needed.name} is {version}, and this package needs {needed.specifier}"
            yield Finding("versions", PROBLEM, text, f"pip install '{needed.name}{needed.specifier}'")


def _conflicts(versions: dict[str, str]) -> Iterator[Finding]:
    """Compare the needed packages with each other's requirements: first JAX with its plugins, then the rest."""
    plugins = [name for name in versions if _DEVICE_PACKAGE.fullmatch(name)]
    extras = metadata.metadata("jax").get_all("Provides-Extra") or [] if "jax" in versions else []
    wrong: dict[str, str] = {}
    for extra in ["", *extras]:
        for needed, version in _unmet("jax", versions, extra):
            # Some extras name an old jaxlib for JAX's own tests.
            if version is not None and _normalized(needed.name) in plugins and (not extra or needed.name != "jaxlib"):
                wrong[needed.name] = f"{needed.name} is {version}, and jax {versions['jax']} needs {needed.specifier}"
    for name, text in wrong.items():
        yield Finding("versions", PROBLEM, text, f"pip install --upgrade jax {name}: their versions must match")
    for package in [*(_normalized(name) for name in needed_modules().values()), *plugins]:
        for needed, version in _unmet(package, versions):
            if needed.name not in wrong:
                state = "is not installed" if version is None else f"is {version}"
                text = f"{needed.name} {state}, and {package} {versions.get(package, '')} needs {needed.specifier or 'it'}"
                yield Finding("versions", WARNING, text, f"pip install '{needed.name}{needed.specifier}'")
    kinds = sorted({match[1] for name in plugins if (match := re.match(r"jax-(\w+)-plugin", name))})
    if len(kinds) > 1:
        text = f"JAX is installed for {' and '.join(kinds)} at once"
        yield Finding("versions", WARNING, text, f"pip uninstall jax-{kinds[0]}-plugin jax-{kinds[0]}-pjrt")


# Accelerators and memory


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that nvidia-smi lists. Raise OSError if it fails; with a stuck driver it hangs."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise OSError(answer.stdout.strip() or answer.stderr.strip() or f"nvidia-smi ended with {answer.returncode}")
    cards = []
    for line in answer.stdout.splitlines():
        name, *memory = (word.strip() for word in line.split(","))
        total, used = (float(word) * 2**20 if word.replace(".", "").isdigit() else None for word in [*memory, "", ""][:2])
        cards.append({"name": name, "memory": total, "used": used})
    return cards


def tpu_chips(dev: Path = Path("/dev"), bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Count device files of TPU chips. Since v5e these are VFIO files, which other vendors' devices also have."""
    if chips := [*dev.glob("accel[0-9]*")]:
        return len(chips)
    google_cards = (card for card in bus.glob("*") if system_file(card / "vendor") == _GOOGLE)
    if all(system_file(card / "class").startswith(("0x01", "0x02")) for card in google_cards):  # disks and networks
        return 0
    return len([*dev.glob("vfio/[0-9]*")])


def check_accelerators() -> Iterator[Finding]:
    """List the accelerators that are plugged in, whether JAX can use them or not."""
    try:
        cards = gpus()
    except (OSError, ValueError) as error:
        yield Finding("accelerators", WARNING, f"nvidia-smi: {one_line(error)}", _CHECK_DRIVER)
        cards = []
    chips = tpu_chips()
    names = sorted({card["name"] for card in cards})
    shown = [f"{sum(card['name'] == name for card in cards)} x {name}" for name in names]
    shown += [f"{chips} TPU chips (device files)"] if chips else []
    yield Finding("accelerators", OK, ", ".join(shown) or "none, only the CPU", figures={"gpus": cards, "tpu_chips": chips})
    for number, card in enumerate(cards):
        if card["used"] and card["memory"] and card["used"] > 0.1 * card["memory"]:
            text = f"GPU {number}: {size(card['used'])} of {size(card['memory'])} are used by other processes"
            yield Finding("accelerators", WARNING, text, "nvidia-smi lists the processes; end them, or use another GPU")


def report_accelerators(reporter: Reporter) -> None:
    """Run `check_accelerators` in a child process: waiting for a driver cannot always be interrupted."""
    with reporter.section("accelerators", "asking nvidia-smi", _CHECK_DRIVER, patience=0.25, status=WARNING):
        for finding in check_accelerators():
            reporter.found(finding)


def check_memory() -> Iterator[Finding]:
    if (memory := host_memory()) is None:
        yield Finding("host memory", OK, "unknown on this system")
        return
    free, total = memory
    low = free < _LOW_MEMORY
    remedy = f"end other processes, or use a machine with more: below {size(_LOW_MEMORY)} even small runs are killed"
    figures = {"free": free, "total": total}
    text = f"{size(free)} of {size(total)} free"
    yield Finding("host memory", WARNING if low else OK, text, remedy if low else "", figures)


def _why_hidden(kind: str, platforms: tuple[str, ...], installed: list[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Return (why JAX does not see a device of this kind, the remedy)."""
    allowed = env.get("JAX_PLATFORMS", "")
    if allowed and not set(platforms) & set(allowed.lower().split(",")):
        return f"JAX_PLATFORMS={allowed} hides it", "unset JAX_PLATFORMS"
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if kind == "GPU" else ("TPU_VISIBLE_CHIPS",):
        if env.get(variable) in ("", "-1", "none", "void"):
            return f"{variable}={env[variable]} hides it", f"unset {variable}"
    extra, package = ("cuda", "cuda") if kind == "GPU" else ("tpu", "libtpu")
    if not any(package in name for name in installed):
        older = ", or [cuda12] for a driver before CUDA 13" if kind == "GPU" else ""
        return f"JAX is not installed for a {kind}", f"pip install 'nash_mhc[{extra}]'{older}"
    return "JAX does not say why", "another process may hold it; python -c 'import jax; jax.devices()' shows JAX's message"


def check_hidden_devices(
    accelerators: Mapping[str, Any], devices: Mapping[str, Any], installed: list[str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the figures of the checks "accelerators" and "devices" (JAX's): does JAX see every accelerator?"""
    cards, chips = len(accelerators.get("gpus", ())), int(accelerators.get("tpu_chips", 0))
    platform = devices.get("platform")
    for kind, count, platforms in (("GPU", cards, ("gpu", "cuda", "rocm")), ("TPU", chips, ("tpu",))):
        if count and platform == "cpu":
            why, remedy = _why_hidden(kind, platforms, installed, env)
            yield Finding("devices", WARNING, f"this machine has a {kind}, but a run would train on the CPU: {why}", remedy)
    if platform == "gpu" and devices.get("local", 0) < cards:
        text = f"JAX sees {devices['local']} of {cards} GPUs"
        remedy = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')} selects; unset it to use all of them"
        yield Finding("devices", WARNING, text, remedy)
    if platform == "cpu" and not cards and any("cuda" in name for name in installed):
        text = "JAX is installed for CUDA, but there is no GPU"
        yield Finding("devices", WARNING, text, "on a machine with a GPU, check its driver: nvidia-smi must list it")
