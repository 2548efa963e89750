"""Callbacks of a run, passed as `run(cfg, callbacks=[...])`: the events they receive and what they may request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import RunConfig, TelemetryConfig, TrainConfig
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.profile import Profile
from nash_mhc.storage.files import is_remote
from nash_mhc.train.state import TrainState

log = logging.getLogger(__name__)


class TrainingRun(Protocol):
    """The part of `Trainer` that callbacks may use."""

    cfg: RunConfig
    mesh: Mesh
    folder: RunFolder
    state: TrainState  # after step `step`; the next step overwrites its buffers, so copy what you need later
    step: int  # the last step dispatched
    log: logging.Logger  # of the run, whose progress display shows the messages

    @property
    def model(self) -> Any:
        """Return the current model, with averaged weights if the run has them."""

    def request_save(self) -> None:
        """Save a checkpoint after the latest step."""

    def request_stop(self, reason: str) -> None:
        """End the run after the latest step, which is saved; `run` then returns its result."""


class Callback:
    """Base class of callbacks; override the events of interest.

    Every process calls them in the same order, and all processes must request the same saves and stops.
    An exception ends the run. The next step waits for every event except `on_step`.
    """

    def on_begin(self, run: TrainingRun) -> None:
        """Called before the first step of this start; `run.step` steps are done."""

    def before_step(self, run: TrainingRun) -> None:
        """Called before step `run.step + 1` is dispatched."""

    def after_step(self, run: TrainingRun) -> None:
        """Called after step `run.step` is dispatched; `run.state` is its result (reading it waits for the device)."""

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of a finished step, on the host; the next step may already run."""

    def on_evaluation(self, run: TrainingRun, step: int, metrics: dict[str, float]) -> None:
        """Called after a held-out evaluation of `run.state`."""

    def on_save(self, run: TrainingRun, step: int) -> None:
        """Called when a save starts; the checkpoint is written in the background."""

    def on_end(self, run: TrainingRun) -> None:
        """Called once at the end of the run, after its rows are written, even if it fails."""


class EachStep(Callback):
    """Calls a function with the number of each finished step."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        self._call(step)


class ProfileSteps(Callback):
    """Profiles some steps (`--profile`); `exclude` is called with the seconds that profiling adds to the loop."""

    def __init__(self, profile: Profile, exclude: Callable[[float], None]) -> None:
        self._profile, self._exclude = profile, exclude

    def before_step(self, run: TrainingRun) -> None:
        self._exclude(self._profile.before(run.step + 1, run.state))

    def after_step(self, run: TrainingRun) -> None:
        self._exclude(self._profile.after(run.step, run.state))

    def on_end(self, run: TrainingRun) -> None:
        self._profile.close()


def profile_callback(
    telemetry: TelemetryConfig,
    train: TrainConfig,
    run_folder: RunFolder,
    step: int,
    step_fn: CompiledStep,
    exclude: Callable[[float], None],
) -> list[Callback]:
    """Return the callback for `--profile` in process 0, if the steps to profile come after `step`.

    The traces of a run in an object store are written to the local directory `runs/profile`.
    """
    if (steps := telemetry.profiled) is None or jax.process_index() > 0:
        return []
    first, last, total = *steps, train.total_steps
    if not step < first <= total:
        log.warning(f"--profile {first}:{last}: nothing to profile, because this start takes steps {step + 1} to {total}")
        return []
    if (every := train.eval_interval) and (first - 1) // every != (last - 1) // every:
        log.warning(f"--profile {first}:{last}: the profile will include an evaluation")
    folder = run_folder.path / "profile" if not is_remote(run_folder.path) else Path("runs") / "profile"
    return [ProfileSteps(Profile(first, min(last, total), folder, step_fn.text), exclude)]
