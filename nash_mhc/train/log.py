"""What a run prints and writes while it trains: its first lines, a row per log interval, spikes and bad steps."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, MeshConfig
from nash_mhc.data.inspection import rows_of_step
from nash_mhc.data.mixture import passes
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.model.weights import count_by_storage
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import describe
from nash_mhc.parallel.place import unread_variables
from nash_mhc.runtime.hardware import peak_memory
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.telemetry.terminal import JsonReporter, LivePanel, Reporter, is_terminal
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train import spikes
from nash_mhc.train.callbacks import Callback, TrainingRun
from nash_mhc.train.inputs import Inputs
from nash_mhc.train.meter import Meter
from nash_mhc.train.state import abstract_state

_LARGEST_RATE = 0.1  # ten times the largest learning rate of any preset or recipe


class BadSteps(Exception):
    """Too many steps in a row whose updates were skipped."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.first, self.last = first, last


def bad_steps_error(bad: BadSteps, inputs: Inputs, store: Store) -> ConfigError:
    """Return what to tell the user about a run that too many skipped steps have stopped."""
    train = inputs.cfg.train
    spiky = " or were spikes" if train.on_spike == "skip" else ""
    good = [f"the last checkpoint before them is step {step}" for step in store.steps() if step < bad.first]
    rows = rows_of_step(inputs.source, bad.first, inputs.rows_a_step, train.seed)
    return ConfigError(
        f"steps {bad.first} to {bad.last} had no finite loss and gradients{spiky}, and were skipped; "
        f"the run stops here; {(good or ['there is no checkpoint before them'])[-1]}; step {bad.first} read {rows}; "
        f"look at them with {module_command('nash_mhc.data', 'inspect', str(inputs.folder), '--step', str(bad.first))}"
    )


class StepLog(Callback):
    """Counts finished steps and writes a row of metrics per log interval; raises BadSteps after too many in a row."""

    def __init__(
        self,
        inputs: Inputs,
        mesh: Mesh,
        meter: Meter,
        *,
        reporter: Reporter,
        telemetry: Telemetry,
        clock: WallClock,
        saver: Saver,
    ) -> None:
        self._inputs, self._mesh, self._meter, self._saver = inputs, mesh, meter, saver
        self._reporter, self._telemetry, self._clock = reporter, telemetry, clock

    def on_step(self, run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
        train, bad = self._inputs.cfg.train, self._meter.skipped_in_a_row
        if line := spikes.line(step, metrics, bad):
            self._reporter.say(line)
        if metrics["skipped"] and bad >= train.max_bad_steps > 0:
            raise BadSteps(step - bad + 1, step)
        if step % train.log_interval == 0 or step == train.total_steps:
            self.write_row(step)

    def write_row(self, step: int) -> None:
        """Write what the steps since the last row amount to, and what is not measured per step."""
        row = self._meter.row() | self._clock.row()
        if (peak := peak_memory(self._mesh)) is not None:
            row["memory_gib"] = peak / 2**30
        if self._saver.last is not None:
            row["last_checkpoint"] = self._saver.last
        epochs = self._inputs.source.epochs(step * self._inputs.rows_a_step)
        row |= {f"epochs/{name}": count for name, count in epochs.items()}
        self._telemetry.write(step, row)
        self._reporter.row(step, row)


def make_reporter(log_format: str, total_steps: int, *, quiet: bool) -> Reporter:
    if log_format == "json":
        return JsonReporter(quiet=quiet)
    return (LivePanel if is_terminal() and not quiet else Reporter)(total_steps, None, quiet=quiet)


def device_lines(asked: MeshConfig, mesh: MeshConfig, batch_size: int, learning_rate: float) -> list[str]:
    """Lines about settings that depend on the devices: the mesh as `asked` for and as resolved."""
    lines = list(unread_variables(asked, os.environ))
    if mesh.profile_for is not None:
        lines.insert(0, f"--profile-for {mesh.profile_for}: --batch-size {batch_size} --learning-rate {learning_rate:g}")
    if "," in asked.platform:
        lines.append(f"--platform {asked.platform}: {mesh.platform} is taken")
    return lines


def first_lines(inputs: Inputs, mesh: Mesh) -> list[str]:
    """Describe the run: devices, parameters, directory, data, batch, and what is held out."""
    cfg = inputs.cfg
    parameters = _parameters(cfg.model, abstract_state(cfg).model, Training.of(cfg), has_adapters=cfg.lora.rank > 0)
    lines = [f"{describe(mesh)}, {cfg.train.dtype}; {parameters}; run in {inputs.folder}"]
    if cfg.optim.optimizer in ("adamw", "adam_atan2", "muon") and cfg.optim.learning_rate > _LARGEST_RATE:
        rate = f"--learning-rate {cfg.optim.learning_rate:g}"
        lines.append(f"warning: {rate} is far above what trains (1e-4 to 1e-2): the loss will rise")
    lines += inputs.summary(mesh)
    if inputs.evaluator is None:
        lines.append(f"no text is held out of {cfg.data.dataset}: nothing is evaluated")
    elif inputs.source.held_out:
        lines.append(inputs.source.held_out)
    return lines


def data_lines(inputs: Inputs) -> list[str]:
    """Say how many passes over the data the run takes, if that is known."""
    read = passes(inputs.source.epochs(inputs.cfg.train.total_steps * inputs.rows_a_step))
    return [f"the run {read}"] if read else []


def _parameters(cfg: ArchitectureConfig, model: Any, training: Training, *, has_adapters: bool) -> str:
    text = f"{count_parameters(cfg):,} parameters"
    if (drawn := architecture_of(cfg).drawn(cfg)) is not None:
        text += f", and {drawn.numbers:,} numbers from seed {drawn.seed} that nobody trains"
    text += "".join(f", {count:,} with {storage}" for storage, count in sorted(count_by_storage(model).items()))
    trained, frozen = training.split(model)
    if not jax.tree.leaves(frozen):
        return text
    count = f"{sum(leaf.size for leaf in jax.tree.leaves(trained)):,}"
    return f"{text}, and {count} of adapters, which are trained" if has_adapters else f"{text}; {count} are trained"
