"""What a run writes down about itself when it begins: run.json and parameters.txt."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc import __version__
from nash_mhc.checkpoint.run_folder import PARAMETERS, RUN
from nash_mhc.config.schema import RunConfig
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.parallel.params import named_leaves
from nash_mhc.train.state import flops_per_token

_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")


def _describe_run(cfg: RunConfig, mesh: Mesh, floor: tuple[float, float] | None, rows: str) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "config": cfg.to_dict(),
        "rows": rows,
        "parameters": count_parameters(cfg.model),
        "drawn": None if (drawn := architecture_of(cfg.model).drawn(cfg.model)) is None else drawn._asdict(),
        "remembers": architecture_of(cfg.model).remembers(cfg.model),
        "flops_per_token": flops_per_token(cfg),
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


def described(
    cfg: RunConfig, mesh: Mesh, floor: tuple[float, float] | None, rows: str, model: LanguageModel, known: dict[str, Any]
) -> dict[str, str]:
    """File name -> text. `rows` is the identity of the data, `known` what is known of the run besides."""
    run = json.dumps(_describe_run(cfg, mesh, floor, rows) | known, indent=2) + "\n"
    return {RUN: run, PARAMETERS: _parameter_table(model)}
