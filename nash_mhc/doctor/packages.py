"""What is installed, and whether it fits together: by the packages' own metadata, without importing one of them."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from nash_mhc import __version__
from nash_mhc.doctor.findings import OK, PROBLEM, WARNING, Finding, told

_OURS = "nash_mhc"
# Packages whose module has another name.
_MODULES = {
    "orbax-checkpoint": "orbax.checkpoint",
    "pyyaml": "yaml",
    "pillow": "PIL",
}
_SHOWN = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
_OF_DEVICES = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)|libtpu(-nightly)?|jaxlib")


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def requirements() -> list[str]:
    """What this package asks for: by the project file beside it, where there is one, else by what was installed.

    A folder that is installed to be edited (`pip install -e`) changes its file, and keeps the metadata of that day.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if _name(project["name"]) == _name(_OURS):
            return list(project["dependencies"])
    return metadata.requires(_OURS) or []


def needed_modules() -> dict[str, str]:
    """Module -> package, of all that a run needs."""
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements() if "extra ==" not in text]
    return {_MODULES.get(_name(name), name.replace("-", "_")): name for name in names}


def _installed() -> dict[str, str]:
    """Package -> version; of two copies of one, the one that is imported."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:  # a folder that pip has left half removed has none
            found.setdefault(_name(name), one.version)
    return found


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package that it lies in is not there, or is broken
        return False


def _unmet(package: str, there: dict[str, str], extra: str = "") -> Iterator[tuple[Any, str | None]]:
    """(what it asks for, the version that is there instead) of each requirement of a package that is not met."""
    from packaging.requirements import Requirement

    try:
        asked = requirements() if package == _OURS else metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for text in asked:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        version = there.get(_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            yield wanted, version


def _ours(there: dict[str, str]) -> Iterator[Finding]:
    for module, name in needed_modules().items():
        if _name(name) not in there or not is_there(module):
            yield Finding("packages", PROBLEM, f"{name} is not installed", f"pip install {name}, or this package again")
    missing = {_name(name) for module, name in needed_modules().items() if not is_there(module)}
    for wanted, version in _unmet(_OURS, there):
        if version is not None and _name(wanted.name) not in missing:
            text = f"{wanted.name} is {version}, and this package needs {wanted.specifier}"
            yield Finding("versions", PROBLEM, text, f"pip install '{wanted.name}{wanted.specifier}'")


def _of_each_other(there: dict[str, str]) -> Iterator[Finding]:
    """What the packages that a run needs ask of others, whose versions follow theirs; JAX of its parts first of all."""
    parts = [name for name in there if _OF_DEVICES.fullmatch(name)]
    extras = metadata.metadata("jax").get_all("Provides-Extra") or [] if "jax" in there else []
    wrong: dict[str, str] = {}
    for extra in ["", *extras]:
        for wanted, version in _unmet("jax", there, extra):
            # Of jaxlib, some extras name the oldest that would do, for tests of JAX's own.
            if version is not None and _name(wanted.name) in parts and (not extra or wanted.name != "jaxlib"):
                wrong[wanted.name] = f"{wanted.name} is {version}, and jax {there['jax']} needs {wanted.specifier}"
    for name, text in wrong.items():
        yield Finding("versions", PROBLEM, text, f"pip install --upgrade jax {name}: they come as one version")
    for package in [*(_name(name) for name in needed_modules().values()), *parts]:
        for wanted, version in _unmet(package, there):
            if wanted.name not in wrong:
                has = "is not installed" if version is None else f"is {version}"
                text = f"{wanted.name} {has}, and {package} {there.get(package, '')} needs {wanted.specifier or 'it'}"
                yield Finding("versions", WARNING, text, f"pip install '{wanted.name}{wanted.specifier}'")
    kinds = sorted({found[1] for name in parts if (found := re.match(r"jax-(\w+)-plugin", name))})
    if len(kinds) > 1:
        text = f"JAX is installed for {' and '.join(kinds)} at once"
        yield Finding("versions", WARNING, text, f"pip uninstall jax-{kinds[0]}-plugin jax-{kinds[0]}-pjrt")


def device_packages() -> list[str]:
    """The packages through which JAX would use an accelerator."""
    return sorted(name for name in _installed() if _OF_DEVICES.fullmatch(name) and name != "jaxlib")


def check_packages() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("python", OK, f"{version}, {platform.system()} {platform.machine()}", figures={"version": version})
    there = _installed()
    wrong = list(_ours_or_nothing(there))
    yield from wrong
    if not any(finding.check == "packages" for finding in wrong):
        shown = ", ".join(f"{name} {there[name]}" for name in (*_SHOWN, *device_packages()) if name in there)
        text = f"nash_mhc {__version__}, {shown}; all {len(needed_modules())} that a run needs"
        versions = {_name(name): there.get(_name(name)) for name in needed_modules().values()}
        yield Finding("packages", OK, text, figures={"versions": versions})
    if not any(finding.check == "versions" for finding in wrong):
        yield Finding("versions", OK, "they fit together, as far as their own metadata says")


def _ours_or_nothing(there: dict[str, str]) -> Iterator[Finding]:
    """Without the library that knows how versions compare, what is missing is still told."""
    try:
        yield from _ours(there)
        yield from _of_each_other(there)
    except ImportError as error:
        yield Finding("versions", WARNING, f"cannot be compared ({told(error)})", "pip install packaging")
