"""The objectives that there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from nash_mhc.config.commands import what_there_is
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Objective
from nash_mhc.objectives.distill import make_distill
from nash_mhc.objectives.next_token import make_next_token, make_smoothed

Make = Callable[[RunConfig, Execution], Objective]  # of the settings that shape a program (`shaping` in train/state.py)

OBJECTIVES: dict[str, Make] = {"next_token": make_next_token, "smoothed": make_smoothed, "distill": make_distill}


def register(name: str, make: Make) -> None:
    """Makes an objective known as `--objective NAME`."""
    OBJECTIVES[name] = make


def objective_of(cfg: RunConfig, execution: Execution) -> Objective:
    """The one that the run names; ConfigError."""
    if (name := cfg.objective.name) not in OBJECTIVES:
        raise ConfigError(f"--objective {name}: there is no such objective{what_there_is(name, OBJECTIVES)}")
    return OBJECTIVES[name](cfg, execution)
