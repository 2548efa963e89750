"""Batch size and learning rate for a kind of device (`--profile-for tpu`). The user's own settings override them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.fields import Settings

# Factor on the preset's batch size, which is small enough for a CPU (`tiny`) or a small accelerator. A TPU's matrix
# unit works on multiples of eight sequences.
_BATCH_FACTOR = {"cpu": 1, "gpu": 4, "tpu": 8}


def of_profile(platform: str, values: Mapping[str, Any]) -> Settings:
    """Scale the batch by a factor and Adam's learning rate by its square root, as gradient noise falls."""
    factor = _BATCH_FACTOR[platform]
    found = {
        "data.batch_size": values["data.batch_size"] * factor,
        "optim.learning_rate": float(f"{values['optim.learning_rate'] * math.sqrt(factor):.3g}"),
    }
    return {path: (value, f"--profile-for {platform}") for path, value in found.items()}
