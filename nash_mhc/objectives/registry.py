"""Objectives by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nash_mhc.config.commands import name_hint
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Objective
from nash_mhc.objectives.distill import make_distill
from nash_mhc.objectives.next_token import make_next_token, make_smoothed

Make = Callable[[RunConfig, Execution], Objective]  # of the settings that shape a program (`shaping` in train/state.py)

Begin = Callable[[RunConfig], Any]  # what is carried into the first step: arrays [parts, rows, ...]
TEXT = "text"  # the examples of a data source that names none


class ObjectiveKind(NamedTuple):
    """An objective under its name.

    `carries`: what it leaves from one step to the next is part of the run's state, and begins with this; batches then
    have it as `carry`, and so must its Aux.
    """

    make: Make
    carries: Begin | None = None
    examples: str | None = None  # that it takes, as data sources name theirs (`RowSource`); None: any


OBJECTIVES: Registry[ObjectiveKind] = Registry(
    "objectives",
    {
        "next_token": ObjectiveKind(make_next_token, examples=TEXT),
        "smoothed": ObjectiveKind(make_smoothed, examples=TEXT),
        "distill": ObjectiveKind(make_distill, examples=TEXT),
    },
)


def register(name: str, make: Make, carries: Begin | None = None, examples: str | None = None) -> None:
    """Make an objective known as `--objective NAME`."""
    OBJECTIVES[name] = ObjectiveKind(make, carries, examples)


def named_objective(cfg: RunConfig) -> ObjectiveKind:
    """Return the objective that the run names; ConfigError."""
    if (name := cfg.objective.name) not in OBJECTIVES:
        raise ConfigError(f"--objective {name}: there is no such objective{name_hint(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def carries(cfg: RunConfig) -> bool:
    """Return whether the run's objective carries something from step to step."""
    found = OBJECTIVES.get(cfg.objective.name)
    return found is not None and found.carries is not None


def fresh_carry_of(cfg: RunConfig) -> Any:
    """Return what the objective carries into the first step; None where it carries nothing."""
    found = OBJECTIVES.get(cfg.objective.name)
    return None if found is None or found.carries is None else found.carries(cfg)


def objective_of(cfg: RunConfig, execution: Execution) -> Objective:
    """Make the objective that the run names; ConfigError."""
    return named_objective(cfg).make(cfg, execution)
