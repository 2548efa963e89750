"""Join the processes of a run, check that they agree, and resolve the settings that depend on the devices."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import nash_mhc
from nash_mhc.config import keys
from nash_mhc.config.fields import weighted_parts
from nash_mhc.config.schema import RunConfig
from nash_mhc.data.prepared.folder import FILE
from nash_mhc.model.architectures import for_platform
from nash_mhc.parallel.board import check_same
from nash_mhc.parallel.mesh import check_fit, make_mesh, misfits
from nash_mhc.parallel.processes import start
from nash_mhc.runtime.profile import disable_command_buffers
from nash_mhc.storage.files import digest_of, digest_of_file, is_remote
from nash_mhc.train.state import abstract_state
from nash_mhc.train.step import make_objective

# Settings that may differ between processes, or that only process 0 uses.
_PER_PROCESS = {
    "mesh.coordinator_address", "mesh.num_processes", "mesh.process_id", "mesh.connect_timeout", "telemetry.log_format",
    "train.wait_for_lock",
}  # fmt: skip
_SAMPLED_BYTES = 2**20  # read at the beginning and at the end of a file, to compare it between processes


def join(cfg: RunConfig, **flags: Any) -> None:
    """Join the other processes of the run, if there are any; call this before a device is used.

    Raise ConfigError in every process if their settings, or these other `flags`, differ.
    """
    if cfg.telemetry.profiled is not None:
        disable_command_buffers()
    if start(cfg.mesh) > 1:
        check_same(settings_of_run(cfg) | {f"--{name.replace('_', '-')}": value for name, value in flags.items()})


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Start the devices and resolve the settings that depend on them; raise ConfigError if they do not fit."""
    mesh = make_mesh(cfg.mesh, lambda shape: not misfits(cfg.data, cfg.model, shape))
    check_fit(cfg, mesh.shape)
    platform = mesh.devices.flat[0].platform
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **mesh.shape))
    cfg = for_platform(cfg, platform)
    make_objective(cfg)  # raises for an unknown objective
    abstract_state(cfg)  # raises for an unknown optimizer, and for --freeze and --train-only that match no parameter
    return cfg, mesh


def settings_of_run(cfg: RunConfig) -> dict[str, Any]:
    """Return what all processes must have in common: settings by flag, versions, and digests of the code and data."""
    values = cfg.to_dict()
    common: dict[str, Any] = {"--model-kind": cfg.model_kind}
    common |= {key.flag: key.of(values) for path, key in keys.keys(cfg.model_kind).items() if path not in _PER_PROCESS}
    common |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    common["nash_mhc"] = f"{nash_mhc.__version__} (its files {_code_digest()})"
    names = [name for name, _ in weighted_parts(cfg.data.dataset)] or [cfg.data.dataset]
    return common | {f"the files of {name}": _data_digest(name) for name in [*names, cfg.data.tokenizer]}


def _code_digest() -> str:
    """Return a digest of the package's files: two checkouts may have the same version."""
    root = Path(nash_mhc.__file__).parent
    return digest_of([[str(file.relative_to(root)), digest_of_file(file)] for file in sorted(root.rglob("*.py"))])[:8]


def _data_digest(name: str) -> str | None:
    """Return a digest of the files under this name, from their sizes and ends; None if there are none here."""
    if is_remote(name):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        manifest = path / FILE
        if manifest.exists():
            return digest_of_file(manifest)[:16]
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
    return digest_of([_file_digest(file) for file in files])[:16] if files else None


def _file_digest(file: Path) -> list[Any]:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for offset in (0, max(0, size - _SAMPLED_BYTES)):
            opened.seek(offset)
            digest.update(opened.read(_SAMPLED_BYTES))
    return [file.name, size, digest.hexdigest()]
