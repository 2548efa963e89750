"""Callbacks of a run: what `run(cfg, callbacks=[...])` calls, and what a callback may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import RunConfig
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.profile import Profile
from nash_mhc.storage.files import is_remote
from nash_mhc.train.inputs import Inputs
from nash_mhc.train.state import TrainState


class TrainingRun(Protocol):
    """A run in progress, as its callbacks see it."""

    cfg: RunConfig
    mesh: Mesh
    folder: RunFolder
    state: TrainState  # after step `step`; the next step donates its buffers, so copy what is needed later
    step: int  # the last step dispatched
    say: Callable[[str], None]  # prints a line where the run prints its own

    @property
    def model(self) -> Any:
        """Return the current model, with averaged weights if the run keeps them."""

    def request_save(self) -> None:
        """Save a checkpoint as soon as the newest step is dispatched."""

    def request_stop(self, reason: str) -> None:
        """End the run after the newest step: it is saved, and `run` returns its result."""


class Callback:
    """Base class of callbacks; override the events of interest.

    Every process calls them in the same order, and must request saves and stops alike.
    An exception ends the run. Events of the loop hold up the next step, except `on_step`.
    """

    def on_begin(self, run: TrainingRun) -> None:
        """Called before the first step of this start; `run.step` steps are done."""

    def before_step(self, run: TrainingRun) -> None:
        """Called before step `run.step + 1` is dispatched on `run.state`."""

    def after_step(self, run: TrainingRun) -> None:
        """Called when step `run.step` is dispatched; `run.state` is its result, and reading it waits for the device."""

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of a finished step, on the host; the step after it may be running already."""

    def on_evaluation(self, run: TrainingRun, step: int, metrics: dict[str, float]) -> None:
        """Called after a held-out evaluation of `run.state`."""

    def on_save(self, run: TrainingRun, step: int) -> None:
        """Called when a checkpoint is handed to the saver, which writes it in the background."""

    def on_end(self, run: TrainingRun) -> None:
        """Called once, however the run ends, after its rows are written."""


class EachStep(Callback):
    """Calls a function with the number of each finished step."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        self._call(step)


class ProfileSteps(Callback):
    """Profiles some steps (`--profile`); `exclude` takes the seconds that tracing adds to the loop."""

    def __init__(self, profile: Profile, exclude: Callable[[float], None]) -> None:
        self._profile, self._exclude = profile, exclude

    def before_step(self, run: TrainingRun) -> None:
        self._exclude(self._profile.before(run.step + 1, run.state))

    def after_step(self, run: TrainingRun) -> None:
        self._exclude(self._profile.after(run.step, run.state))

    def on_end(self, run: TrainingRun) -> None:
        self._profile.close()


def profile_callback(
    inputs: Inputs, step: int, step_fn: CompiledStep, exclude: Callable[[float], None], say: Callable[[str], None]
) -> list[Callback]:
    """Return the callback of `--profile`, in the first process, if this start from `step` takes the steps to profile.

    Traces of a run in an object store go to the directory where this machine keeps its runs.
    """
    cfg = inputs.cfg
    if (steps := cfg.telemetry.profiled) is None or jax.process_index() > 0:
        return []
    first, last, total = *steps, cfg.train.total_steps
    if not step < first <= total:
        say(f"--profile {first}:{last}: this start takes steps {step + 1} to {total}; nothing is profiled")
        return []
    if (every := cfg.train.eval_interval) and (first - 1) // every != (last - 1) // every:
        say(f"--profile {first}:{last}: an evaluation lies within these steps, and is counted with them")
    folder = inputs.folder.path / "profile" if not is_remote(inputs.folder.path) else Path("runs") / "profile"
    return [ProfileSteps(Profile(first, min(last, total), folder, step_fn.text, say), exclude)]
