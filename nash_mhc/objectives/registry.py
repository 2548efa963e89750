"""Objectives by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nash_mhc.config.commands import name_hint
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.protocol import Execution
from nash_mhc.objectives.base import Feed, Objective
from nash_mhc.objectives.next_token import make_next_token

# Makes an objective from the settings that shape programs (`ProgramKey` in train/state.py).
Make = Callable[[RunConfig, Execution], Objective]
Begin = Callable[[RunConfig], Any]  # makes the carry of the first step: arrays [microbatches, batch, ...]
TEXT = "text"  # the examples of a data source that names none


class ObjectiveKind(NamedTuple):
    """A registered objective.

    `carries`: makes the carry of the first step, for an objective that passes values from step to step. Each batch then
    has the carry of the step before as `carry`, and so must the Aux that the objective returns.
    """

    make: Make
    carries: Begin | None = None
    examples: str | None = None  # the kind of examples that it needs (see `RowSource`); None: any
    feed: Feed | None = None  # adds fields to batches; None: they stay as they are


OBJECTIVES: Registry[ObjectiveKind] = Registry("objectives", {"next_token": ObjectiveKind(make_next_token, examples=TEXT)})


def register(
    name: str, make: Make, carries: Begin | None = None, examples: str | None = None, feed: Feed | None = None
) -> None:
    """Register an objective as `--objective NAME`."""
    OBJECTIVES[name] = ObjectiveKind(make, carries, examples, feed)


def named_objective(name: str) -> ObjectiveKind:
    """Return the objective of this name; raise ConfigError if there is none."""
    if name not in OBJECTIVES:
        raise ConfigError(f"--objective {name}: unknown objective{name_hint(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def carries(name: str) -> bool:
    """Return whether the objective passes values from step to step."""
    kind = OBJECTIVES.get(name)
    return kind is not None and kind.carries is not None


def fresh_carry_of(cfg: RunConfig) -> Any:
    """Return the carry of the first step; None for an objective without one."""
    kind = OBJECTIVES.get(cfg.objective.name)
    return None if kind is None or kind.carries is None else kind.carries(cfg)


def feed_of(name: str) -> Feed:
    """Return the feed of the objective of this name."""
    kind = OBJECTIVES.get(name)
    return (None if kind is None else kind.feed) or Feed()
