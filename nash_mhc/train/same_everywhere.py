"""What all processes of a run must have in common: settings, packages, and the files that they read."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import nash_mhc
from nash_mhc.config import key_names
from nash_mhc.config.fields import weighted_parts
from nash_mhc.config.schema import RunConfig
from nash_mhc.data.prepared.manifest import FILE
from nash_mhc.parallel.processes import start
from nash_mhc.parallel.same_settings import check_same
from nash_mhc.storage.digests import digest_of, digest_of_file
from nash_mhc.storage.paths import is_remote

# Each process has its own, or only the first one uses it.
_OWN = {"mesh.coordinator_address", "mesh.num_processes", "mesh.process_id", "telemetry.log_format", "train.wait_for_lock"}
_ENDS = 2**20  # bytes that are read at the beginning and at the end of a file


def join(cfg: RunConfig, **more: Any) -> None:
    """Finds the other processes, if there are any, before a device is used.
    ConfigError in all of them where one was started with something else; `more` are flags beside the configuration."""
    if start(cfg.mesh) > 1:
        check_same(settings_of_run(cfg) | {f"--{name.replace('_', '-')}": value for name, value in more.items()})


def settings_of_run(cfg: RunConfig) -> dict[str, Any]:
    """Flag -> value; then packages and data."""
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
