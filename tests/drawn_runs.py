"""A folder like that of a run, with weights that numpy has drawn: neither a step nor an initialisation is compiled."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import small

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import RunConfig


class _Weights(eqx.Module):
    model: Any


def drawn_run(folder: Path, cfg: RunConfig) -> Path:
    """Its one checkpoint holds `small.generic_model` and nothing else."""
    with Store(folder) as store:
        store.save(0, _Weights(jax.device_put(small.generic_model(cfg.model))), {})
    RunFolder(folder).write({"run.json": json.dumps({"config": cfg.to_dict(), "rows": "none", "parameters": 0})})
    return folder
