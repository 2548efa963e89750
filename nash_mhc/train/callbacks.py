"""Callbacks of a run, passed as `run(cfg, callbacks=[...])`: the events they receive and what they may request.

Two callbacks belong to every run: `StepLog` writes rows of metrics, and `ProfileSteps` profiles (`--profile`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import RunFolder, with_current_names
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ConfigError, RunConfig, TelemetryConfig, TrainConfig
from nash_mhc.data.inspection import rows_of_step
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.hardware import peak_memory
from nash_mhc.runtime.profile import Profile
from nash_mhc.storage.files import is_remote
from nash_mhc.telemetry.sinks import Telemetry, without_nan
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train import spikes
from nash_mhc.train.inputs import Inputs
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
        """Called once at the end of the run, after its rows are written, even if a step fails."""


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
        log.warning(f"--profile {first}:{last}: nothing to profile, because this run trains steps {step + 1} to {total}")
        return []
    if (every := train.eval_interval) and (first - 1) // every != (last - 1) // every:
        log.warning(f"--profile {first}:{last}: the profile will include an evaluation")
    folder = run_folder.path / "profile" if not is_remote(run_folder.path) else Path("runs") / "profile"
    return [ProfileSteps(Profile(first, min(last, total), folder, step_fn.text), exclude)]


# --- a row of metrics ------------------------------------------------------------------------------------------------

_WEIGHT = "weight/"  # prefix: the weight of the mean with the rest of the name
_LATEST = ("lr", "param_norm", "spikes")  # logged as the latest value, not as a mean
_MINIMUM = ("health/scales_unused",)  # logged as the minimum of the interval
_NOT_AVERAGED = ("tokens", "spike", "skipped", "empty", "health/res")
_ARRAYS = ("health/res", "health/scale_weight")  # drawn as pictures of a single step
_MAX_LISTED = 100  # numbers of spikes or skipped steps in a row


class Interval:
    """Sums over the steps since the last row, without non-finite values and steps without targets.

    Checkpoints hold them, so that a resumed run writes the same row as an uninterrupted one.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.steps: int = saved.get("steps", 0)
        self._sums = {
            name: (np.array(total), weight) for name, (total, weight) in with_current_names(saved.get("sums", {})).items()
        }
        self._maximum: dict[str, float] = dict(saved.get("most", {}))
        self._minimum = {name: np.array(value) for name, value in saved.get("least", {}).items()}
        self._latest: dict[str, float] = dict(saved.get("newest", {}))
        self._listed: dict[str, list[int]] = {name: list(steps) for name, steps in saved.get("named", {}).items()}

    def list_step(self, step: int, what: str) -> None:
        """List the number of a step in the row, so that its data can be inspected."""
        steps = self._listed.setdefault(f"{what}_steps", [])
        if len(steps) < _MAX_LISTED:
            steps.append(step)

    def add(self, metrics: dict[str, Any], weights: dict[str, float]) -> None:
        """Add a step; `weights` are token counts of means over some of the tokens, all other metrics have weight 1."""
        self.steps += 1
        for name, value in metrics.items():
            if name in _NOT_AVERAGED or metrics["empty"]:
                continue
            if name in _LATEST:
                self._latest[name] = float(value)
            elif name.startswith("spike_score/"):
                self._maximum[name] = max(float(value), self._maximum.get(name, 0.0))
            elif name in _MINIMUM:
                before = self._minimum.get(name)
                self._minimum[name] = np.asarray(value) if before is None else np.minimum(before, value)
            elif np.isfinite(value).all():
                weight = float(weights.get(name, 1.0))
                total, before = self._sums.get(name, (np.zeros(np.shape(value)), 0.0))
                self._sums[name] = total + weight * np.asarray(value, np.float64), before + weight

    def means(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return name -> mean, in the order of a step's metrics; lists for metrics with a value per layer."""
        row: dict[str, Any] = {}
        for name, value in last.items():
            if name in _LATEST:
                row[name] = self._latest.get(name, math.nan)
            elif name.startswith("spike_score/"):
                row[name] = self._maximum.get(name, 0.0)
            elif name in _MINIMUM:
                row[name] = np.asarray(self._minimum.get(name, np.zeros_like(value))).tolist()
            elif name not in _NOT_AVERAGED:
                total, weight = self._sums.get(name, (np.full(np.shape(value), math.nan), 1.0))
                row[name] = (total / weight).tolist() if weight else np.full(np.shape(value), math.nan).tolist()
        return row | self._listed

    def to_json(self) -> dict[str, Any]:
        sums = {name: [total.tolist(), weight] for name, (total, weight) in self._sums.items()}
        least = {name: value.tolist() for name, value in self._minimum.items()}
        return {"steps": self.steps, "sums": sums, "most": self._maximum, "least": least, "newest": self._latest} | (
            {"named": self._listed} if self._listed else {}
        )


class Meter:
    """Turns the metrics of finished steps into rows.

    Step times are measured between the completions of steps, so they are the device's times.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        step: int,
        updates: int,
        saved: dict[str, Any],
    ) -> None:
        """`tokens_per_step` includes padding. Without `peak_flops`, rows have no MFU.

        `saved` are the values of the checkpoint that the run resumes from, at `step` with this number of `updates`.
        """
        self._tokens_per_step, self._flops_per_token, self._peak = tokens_per_step, flops_per_token, peak_flops
        self.tokens_seen: int = saved.get("tokens_seen", 0)
        self.empty: int = saved.get("empty_steps", 0)
        self.skipped: int = step - updates - self.empty
        self.skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)  # missing in old checkpoints
        self.last: dict[str, Any] = {}  # metrics of the latest step
        self.arrays: dict[str, Any] = {k: v for k, v in saved.get("metrics", {}).items() if k in _ARRAYS}
        self._interval = Interval(saved.get("interval"))
        self.reset()

    def reset(self) -> None:
        """Start to measure time."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, 0
        self.data_wait = self.saving = 0.0  # seconds that the loop waited for data and for saves

    def exclude(self, seconds: float) -> None:
        """Do not count this time as part of a step: an evaluation or a save."""
        self._since += seconds

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of a finished step."""
        self._steps += 1
        weights = {name.removeprefix(_WEIGHT): float(value) for name, value in metrics.items() if name.startswith(_WEIGHT)}
        self.last = metrics = {name: value for name, value in metrics.items() if not name.startswith(_WEIGHT)}
        self.arrays = {k: without_nan(metrics[k].tolist()) for k in _ARRAYS if k in metrics}
        self._interval.add(metrics, weights)
        for what in ("spike", "skipped"):
            if metrics[what] and not metrics["empty"]:
                self._interval.list_step(step, what)
        tokens = int(metrics["tokens"]) if math.isfinite(metrics["tokens"]) else 0
        self._tokens += tokens
        self.tokens_seen += tokens
        self.empty += int(metrics["empty"])
        self.skipped += int(metrics["skipped"])
        if not metrics["empty"]:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics["skipped"] else 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts that a resumed run continues from."""
        counts = {"tokens_seen": self.tokens_seen, "empty_steps": self.empty, "skipped_in_a_row": self.skipped_in_a_row}
        return counts | {"interval": self._interval.to_json()}

    def row(self) -> dict[str, Any]:
        """Return the row of the steps since the last one, and start the next interval."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        # MFU counts padding, too: it costs as much as text.
        tokens = self._steps * self._tokens_per_step
        row = self._interval.means(self.last) | {
            "steps": self._interval.steps,
            "tokens_per_s": self._tokens / seconds,
            **({} if self._peak is None else {"mfu": tokens * self._flops_per_token / seconds / self._peak}),
            "tokens_seen": self.tokens_seen,
            "skipped": self.skipped,
            "step_ms": seconds / max(self._steps, 1) * 1e3,
            "data_wait_ms": self.data_wait / max(self._steps, 1) * 1e3,
            "save_ms": self.saving / max(self._steps, 1) * 1e3,
        }
        self._interval = Interval()
        self.reset()
        return row


# --- rows and warnings during training -------------------------------------------------------------------------------


@dataclass
class StepLog(Callback):
    """Writes a row of metrics per log interval; ends the run after --max-bad-steps consecutive skipped steps."""

    inputs: Inputs
    mesh: Mesh
    meter: Meter
    reporter: Reporter
    telemetry: Telemetry
    clock: WallClock
    saver: Saver

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        train, skipped = self.inputs.cfg.train, self.meter.skipped_in_a_row
        if message := spikes.message(step, metrics, skipped):
            log.warning(message)
        if metrics["skipped"] and skipped >= train.max_bad_steps > 0:
            self.saver.wait_quietly()
            raise self._bad_steps_error(step - skipped + 1, step)
        if step % train.log_interval == 0 or step == train.total_steps:
            self.write_row(step)

    def write_row(self, step: int) -> None:
        """Write the means of the interval, and memory, time, epochs and the last checkpoint."""
        row = self.meter.row() | self.clock.row()
        if (peak := peak_memory(self.mesh)) is not None:
            row["memory_gib"] = peak / 2**30
        if self.saver.last is not None:
            row["last_checkpoint"] = self.saver.last
        epochs = self.inputs.source.epochs(step * self.inputs.sequences_per_step)
        row |= {f"epochs/{name}": count for name, count in epochs.items()}
        self.telemetry.write(step, row)
        self.reporter.row(step, row)

    def _bad_steps_error(self, first: int, last: int) -> ConfigError:
        inputs, train = self.inputs, self.inputs.cfg.train
        spiky = ", or were spikes" if train.on_spike == "skip" else ""
        earlier = [step for step in self.inputs.folder.steps() if step < first]
        checkpoint = f"last checkpoint before them: step {earlier[-1]}" if earlier else "no checkpoint before them"
        return ConfigError(
            f"steps {first} to {last} were skipped: their loss or gradients were not finite{spiky} (--max-bad-steps "
            f"{train.max_bad_steps}); {checkpoint}; step {first} read "
            f"{rows_of_step(inputs.source, first, inputs.sequences_per_step, train.seed)}; look at its data with "
            f"{module_command('nash_mhc.data', 'inspect', str(inputs.folder), '--step', str(first))}"
        )
