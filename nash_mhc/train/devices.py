"""Join the processes of a run, compare their settings and files, and resolve what depends on the devices."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import nash_mhc
from nash_mhc.config import key_names
from nash_mhc.config.fields import weighted_parts
from nash_mhc.config.schema import RunConfig
from nash_mhc.data.prepared.manifest import FILE
from nash_mhc.model.device_settings import for_platform
from nash_mhc.parallel.mesh import check_fit, make_mesh, misfits
from nash_mhc.parallel.processes import check_same, start
from nash_mhc.storage.files import digest_of, digest_of_file, is_remote
from nash_mhc.train.programs import make_objective
from nash_mhc.train.state import abstract_state

# Settings that each process has for itself, or that only the first one uses.
_OWN = {
    "mesh.coordinator_address", "mesh.num_processes", "mesh.process_id", "mesh.connect_timeout", "telemetry.log_format",
    "train.wait_for_lock",
}  # fmt: skip
_ENDS = 2**20  # bytes that are read at the beginning and at the end of a file


def join(cfg: RunConfig, **more: Any) -> None:
    """Join the other processes of the run, if there are any, before a device is used.

    ConfigError in all of them if one was started with other settings; `more` are flags beside the configuration.
    """
    if start(cfg.mesh) > 1:
        check_same(settings_of_run(cfg) | {f"--{name.replace('_', '-')}": value for name, value in more.items()})


def settings_of_run(cfg: RunConfig) -> dict[str, Any]:
    """Return what all processes must have in common: flag -> value, then packages and data."""
    values = cfg.to_dict()
    found = {"--model-kind": cfg.model_kind}
    found |= {key.flag: key.of(values) for path, key in key_names.keys(cfg.model_kind).items() if path not in _OWN}
    found |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    found["nash_mhc"] = f"{nash_mhc.__version__} (its files {_code()})"
    names = [name for name, _ in weighted_parts(cfg.data.dataset)] or [cfg.data.dataset]
    return found | {f"the files of {name}": _fingerprint(name) for name in [*names, cfg.data.tokenizer]}


def _code() -> str:
    """Two checkouts may call themselves the same version."""
    root = Path(nash_mhc.__file__).parent
    return digest_of([[str(file.relative_to(root)), digest_of_file(file)] for file in sorted(root.rglob("*.py"))])[:8]


def _fingerprint(name: str) -> str | None:
    """Hash what is on disk under this name, reading little of it; None where nothing is there."""
    if is_remote(name):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        whole = path / FILE
        if whole.exists():
            return digest_of_file(whole)[:16]
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True))
    return digest_of([_of_file(file) for file in files])[:16] if files else None


def _of_file(file: Path) -> list[Any]:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for place in (0, max(0, size - _ENDS)):
            opened.seek(place)
            digest.update(opened.read(_ENDS))
    return [file.name, size, digest.hexdigest()]


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Start the devices and fill in what depends on them; ConfigError for what does not fit them."""
    mesh = make_mesh(cfg.mesh, lambda shape: not misfits(cfg, shape))
    check_fit(cfg, mesh.shape)
    platform = mesh.devices.flat[0].platform
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **mesh.shape))
    cfg = for_platform(cfg, platform)
    make_objective(cfg)  # check the objective, then the optimizer and the parameters that are named
    abstract_state(cfg)
    return cfg, mesh
