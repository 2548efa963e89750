"""What lies in a run's folder beside its checkpoints, and where compiled programs are kept."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc import __version__
from nash_mhc.checkpoint.faults import as_os_errors, reason
from nash_mhc.checkpoint.ownership import Owner
from nash_mhc.config.places import Folder, is_remote, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.parallel.params import named_leaves
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.stream import Telemetry
from nash_mhc.train.saving import write_files

_LEFT_BEHIND_S = 3600.0  # who has written nothing to a part of a file for so long is dead
_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")


def make_folder(cfg: RunConfig) -> Folder:
    """The run's folder, writable. One that the user did not name is new: two runs never meet by accident."""
    named, stamp = cfg.train.checkpoint_dir, f"runs/{cfg.model_size}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [named] if named else [stamp, *(f"{stamp}-{n}" for n in range(2, 100))]
    for folder in map(place, candidates):
        try:
            with as_os_errors():
                if not is_remote(folder):
                    folder.mkdir(parents=True, exist_ok=bool(named))
                (folder / ".writable").write_text("")
                (folder / ".writable").unlink()
            return folder
        except OSError as error:
            if isinstance(error, FileExistsError) and not named:
                continue  # another run has begun in the same second
            raise ConfigError(
                f"--checkpoint-dir {folder}: cannot be written ({reason(error)}); choose another folder"
            ) from error
    raise ConfigError(f"--checkpoint-dir {stamp}: a hundred runs have begun in this second; name a folder")


def _describe_run(cfg: RunConfig, mesh: Mesh, floor: tuple[float, float] | None, rows: str) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "config": cfg.to_dict(),
        "rows": rows,
        "parameters": count_parameters(cfg.model),
        "mesh": {axis: mesh.shape[axis] for axis in mesh.axis_names},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": mesh.size,
            "there": jax.device_count(device.platform),
        },
        "versions": {"nash_mhc": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "floor": None if floor is None else {"nats_per_token": floor[0], "bits_per_byte": floor[1]},
    }


def _parameter_table(model: LanguageModel) -> str:
    """Name, shape and size of every parameter, for whoever wants to see what the model is made of."""
    from clu import parameter_overview  # brings flax along, which takes a second to import

    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in named_leaves(model).items()}
    return parameter_overview.get_parameter_overview(shapes, include_stats=False) + "\n"


def run_files(
    cfg: RunConfig, mesh: Mesh, floor: tuple[float, float] | None, rows: str, model: LanguageModel, known: dict[str, Any]
) -> dict[str, str]:
    """Name -> content of what tells about a run; `known` is what is known of it besides."""
    told = json.dumps(_describe_run(cfg, mesh, floor, rows) | known, indent=2) + "\n"
    return {"run.json": told, "parameters.txt": _parameter_table(model)}


def begin_files(
    folder: Folder,
    files: dict[str, str],
    start_step: int,
    made_up: bool,
    say: Callable[[str], None],
    owner: Owner,
    others: Sequence[Sink] = (),
) -> Telemetry:
    """`made_up`: the evaluation of the step that it starts from comes now. `others`: where rows go besides."""
    try:
        write_files(folder, files)
        return Telemetry(folder, start_step=start_step, made_up=made_up, say=say, owner=owner, others=others)
    except OSError as error:
        remedy = "make room there or choose another folder"
        raise ConfigError(f"--checkpoint-dir {folder}: cannot be written ({reason(error)}); {remedy}") from error


def write_programs_whole() -> None:
    """JAX writes a compiled program in place. A kill in that moment leaves one that every later start stumbles over, and a
    process beside this one may read half of it: here it is written beside its place, and then put there."""
    from jax._src import lru_cache

    in_place = getattr(getattr(lru_cache, "LRUCache", None), "put", None)
    if in_place is None or getattr(in_place, "is_whole", False):
        return  # another JAX than those we know: as it likes

    def put(self: Any, key: str, value: bytes) -> None:
        target = f"{self.path}/{key}-cache"
        if getattr(self, "eviction_enabled", True) or "://" in target:
            in_place(self, key, value)
        elif not os.path.exists(target):
            part = f"{self.path}/.{key}.{os.getpid()}.{threading.get_ident()}.part"
            try:
                Path(part).write_bytes(value)
                os.replace(part, target)
            except OSError:
                Path(part).unlink(missing_ok=True)
                raise

    put.is_whole = True  # type: ignore[attr-defined]
    lru_cache.LRUCache.put = put  # type: ignore[method-assign]


def use_compilation_cache(folder: Folder) -> None:
    """A restarted run starts in seconds: compiled programs are kept beside the runs, unless the user keeps them elsewhere.

    Those of a run in an object store lie where the runs of this machine have theirs: they are of no use to another machine.
    """
    write_programs_whole()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        beside = Path("runs") if is_remote(folder) else folder.parent
        cache = (beside / ".jax_cache").absolute()
        for part in cache.glob(".*.part"):  # of processes that were killed while they wrote it
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _LEFT_BEHIND_S:
                    part.unlink()
        jax.config.update("jax_compilation_cache_dir", str(cache))
