"""The output of a run while it trains: first lines, a row of metrics per log interval, spikes and bad steps."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import with_current_names
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, MeshConfig, TelemetryConfig
from nash_mhc.data.inspection import rows_of_step, summarize_epochs
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.model.weights import count_by_storage
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import describe
from nash_mhc.parallel.processes import unread_variables
from nash_mhc.runtime.hardware import peak_memory
from nash_mhc.telemetry.sinks import Telemetry, without_nan
from nash_mhc.telemetry.terminal import JsonReporter, LivePanel, Reporter, is_terminal
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train import spikes
from nash_mhc.train.callbacks import Callback, TrainingRun
from nash_mhc.train.inputs import Inputs
from nash_mhc.train.state import abstract_state

log = logging.getLogger(__name__)
_MAX_PLAUSIBLE_RATE = 0.1  # ten times the largest learning rate of any preset or recipe

# --- a row of metrics ------------------------------------------------------------------------------------------------

_WEIGHT = "weight/"  # prefix: the weight of the mean with the rest of the name
_LATEST = ("lr", "param_norm", "spikes")  # logged as the latest value, not as a mean
_MINIMUM = ("health/scales_unused",)  # logged as the minimum of the interval
_NOT_AVERAGED = ("tokens", "spike", "skipped", "empty", "health/res")
_PICTURES = ("health/res", "health/scale_weight")  # drawn as pictures of a single step
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
        slots: int,
        flops_per_token: float,
        peak_flops: float | None,
        step: int,
        updates: int,
        saved: dict[str, Any],
    ) -> None:
        """`slots` is the number of tokens of a step, including padding. Without `peak_flops`, rows have no MFU.

        `saved` are the values of the checkpoint that the run resumes from, at `step` with this number of `updates`.
        """
        self._slots, self._flops_per_token, self._peak = slots, flops_per_token, peak_flops
        self.tokens_seen: int = saved.get("tokens_seen", 0)
        self.empty: int = saved.get("empty_steps", 0)
        self.skipped: int = step - updates - self.empty
        self.skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)  # missing in old checkpoints
        self.last: dict[str, Any] = {}  # metrics of the latest step
        self.pictures: dict[str, Any] = {k: v for k, v in saved.get("metrics", {}).items() if k in _PICTURES}
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
        self.pictures = {k: without_nan(metrics[k].tolist()) for k in _PICTURES if k in metrics}
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
        # MFU counts every slot of the batch: padding costs as much as text.
        slots = self._steps * self._slots
        row = self._interval.means(self.last) | {
            "steps": self._interval.steps,
            "tokens_per_s": self._tokens / seconds,
            **({} if self._peak is None else {"mfu": slots * self._flops_per_token / seconds / self._peak}),
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
        spiky = " or were spikes" if train.on_spike == "skip" else ""
        earlier = [step for step in self.inputs.folder.steps() if step < first]
        checkpoint = f"last checkpoint before them: step {earlier[-1]}" if earlier else "no checkpoint before them"
        return ConfigError(
            f"steps {first} to {last} had no finite loss and gradients{spiky} and were skipped (--max-bad-steps "
            f"{train.max_bad_steps}); {checkpoint}; step {first} read "
            f"{rows_of_step(inputs.source, first, inputs.sequences_per_step, train.seed)}; look at its data with "
            f"{module_command('nash_mhc.data', 'inspect', str(inputs.folder), '--step', str(first))}"
        )


# --- the first lines -------------------------------------------------------------------------------------------------


def make_reporter(cfg: TelemetryConfig, total_steps: int, *, shown: bool) -> Reporter:
    if cfg.log_format == "json":
        return JsonReporter(total_steps, None)
    has_panel = shown and is_terminal() and cfg.log_level in ("debug", "info")
    return (LivePanel if has_panel else Reporter)(total_steps, None)


def describe_devices(requested: MeshConfig, mesh: MeshConfig, batch_size: int, learning_rate: float) -> None:
    """Log which settings were resolved for the devices: `requested` became `mesh`."""
    if mesh.profile_for is not None:
        log.info(f"--profile-for {mesh.profile_for}: --batch-size {batch_size} --learning-rate {learning_rate:g}")
    for line in unread_variables(requested, os.environ):
        log.warning(line)
    if "," in requested.platform:
        log.info(f"--platform {requested.platform}: using {mesh.platform}")


def describe_run(inputs: Inputs, mesh: Mesh) -> None:
    """Log what the run trains: devices, parameters, directory, data, batch, and held-out data."""
    cfg = inputs.cfg
    parameters = _parameters(cfg.model, abstract_state(cfg).model, Training.of(cfg), has_adapters=cfg.lora.rank > 0)
    log.info(f"{describe(mesh)}, {cfg.train.dtype}; {parameters}; run in {inputs.folder}")
    if cfg.optim.optimizer in ("adamw", "adam_atan2", "muon") and cfg.optim.learning_rate > _MAX_PLAUSIBLE_RATE:
        rate = f"--learning-rate {cfg.optim.learning_rate:g}"
        log.warning(f"warning: {rate} is far above the usual 1e-4 to 1e-2; the loss will rise")
    for line in inputs.summary(mesh):
        log.info(line)
    if inputs.evaluator is None:
        log.info(f"no evaluation: {cfg.data.dataset} has no held-out data")
    elif inputs.source.held_out:
        log.info(inputs.source.held_out)


def describe_epochs(inputs: Inputs) -> None:
    """Log how often the run reads its data, if that is known."""
    if reads := summarize_epochs(inputs.source.epochs(inputs.cfg.train.total_steps * inputs.sequences_per_step)):
        log.info(f"the run {reads}")


def _parameters(cfg: ArchitectureConfig, model: Any, training: Training, *, has_adapters: bool) -> str:
    text = f"{count_parameters(cfg):,} parameters"
    if (drawn := architecture_of(cfg).random_weights(cfg)) is not None:
        text += f", and {drawn.numbers:,} frozen random weights from seed {drawn.seed}"
    text += "".join(f", {count:,} with {storage}" for storage, count in sorted(count_by_storage(model).items()))
    trained, frozen = training.split(model)
    if not jax.tree.leaves(frozen):
        return text
    count = f"{sum(leaf.size for leaf in jax.tree.leaves(trained)):,}"
    return f"{text}, and {count} trained adapter parameters" if has_adapters else f"{text}; {count} are trained"
