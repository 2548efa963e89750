"""Arrays in the dtype that a folder is written in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nash_mhc.config.schema import ConfigError


def narrowed(name: str, array: np.ndarray, dtype: Any, others: str) -> np.ndarray:
    """The array in `dtype`; ConfigError names it where a finite value would become infinite, and `others` to use."""
    with np.errstate(over="ignore"):  # the error says more than numpy's warning
        narrow = array.astype(dtype)
    overflowed = np.isfinite(array) & ~np.isfinite(narrow)
    if not overflowed.any():
        return narrow
    largest, limit = np.abs(array[overflowed].astype(np.float64)).max(), float(ml_dtypes.finfo(narrow.dtype).max)
    raise ConfigError(
        f"--dtype {narrow.dtype}: {name} has a value of {largest:.6g}, and the largest of {narrow.dtype} is {limit:.6g}; "
        f"use --dtype {others}"
    )
