"""Batch and learning rate that suit a kind of device: `--profile-for tpu`. Whatever the user sets goes before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.fields import Settings

# Rows for each one of the preset, whose batch is what a CPU can wait for (`tiny`) or one small accelerator holds. An
# accelerator is not filled by those; a TPU's matrix unit works on rows in eights.
_ROWS = {"cpu": 1, "gpu": 4, "tpu": 8}


def of_profile(platform: str, values: Mapping[str, Any]) -> Settings:
    """Adam's steps may grow with the root of the batch: the noise of a mean falls with it."""
    more = _ROWS[platform]
    found = {
        "data.batch_size": values["data.batch_size"] * more,
        "optim.learning_rate": float(f"{values['optim.learning_rate'] * math.sqrt(more):.3g}"),
    }
    return {path: (value, f"--profile-for {platform}") for path, value in found.items()}
