"""The objectives that there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nash_mhc.config.commands import what_there_is
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Objective
from nash_mhc.objectives.distill import make_distill
from nash_mhc.objectives.next_token import make_next_token, make_smoothed
from nash_mhc.objectives.puzzle import fresh_carry, make_puzzle

Make = Callable[[RunConfig, Execution], Objective]  # of the settings that shape a program (`shaping` in train/state.py)

Begin = Callable[[RunConfig], Any]  # what is carried into the first step: arrays [parts, rows, ...]

OBJECTIVES: dict[str, Make] = {
    "next_token": make_next_token,
    "smoothed": make_smoothed,
    "distill": make_distill,
    "puzzle": make_puzzle,
}
OURS = frozenset(OBJECTIVES)  # of which it is known what rows they take
CARRIES: dict[str, Begin] = {"puzzle": fresh_carry}


def register(name: str, make: Make, carries: Begin | None = None) -> None:
    """Makes an objective known as `--objective NAME`.

    `carries`: what it leaves from one step to the next is part of the run's state, and begins with this; batches then
    have it as `carry`, and so must its Aux.
    """
    OBJECTIVES[name] = make
    CARRIES.pop(name, None)
    if carries is not None:
        CARRIES[name] = carries


def fresh_carry_of(cfg: RunConfig) -> Any:
    """None where nothing is carried."""
    return CARRIES[cfg.objective.name](cfg) if cfg.objective.name in CARRIES else None


def objective_of(cfg: RunConfig, execution: Execution) -> Objective:
    """The one that the run names; ConfigError."""
    if (name := cfg.objective.name) not in OBJECTIVES:
        raise ConfigError(f"--objective {name}: there is no such objective{what_there_is(name, OBJECTIVES)}")
    return OBJECTIVES[name](cfg, execution)
