"""The training loop: dispatch a step, then read the metrics of the one before. The host never waits for the newest step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from nash_mhc.config.schema import RunConfig
from nash_mhc.objectives.base import Batch
from nash_mhc.telemetry.stream import Telemetry
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.train import spikes
from nash_mhc.train.compiled import CompiledStep
from nash_mhc.train.meter import Meter
from nash_mhc.train.state import TrainState
from nash_mhc.train.watch import Watch


class BadSteps(Exception):
    """Too many steps in a row whose updates were skipped."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.first, self.last = first, last


def train_loop(
    cfg: RunConfig,
    state: TrainState,
    step_fn: CompiledStep,
    feed: Iterator[Batch],
    *,
    start_step: int,
    meter: Meter,
    telemetry: Telemetry,
    reporter: Reporter,
    evaluate: Callable[[TrainState, int], None],
    save: Callable[[TrainState, int], None],
    save_again: Callable[[], bool],
    besides: Callable[[int], dict[str, Any]],
    watch: Watch,
) -> tuple[TrainState, int]:
    """Runs from `start_step` to the end, or to where `watch` says stop: (state, its step).

    `evaluate` and `save` are called at their intervals and after the last step. `save_again` says after each step whether a
    save that failed is due again, `besides` what a row of metrics holds that no step has measured.
    """
    total = cfg.train.total_steps
    pending: tuple[int, Any] | None = None

    def settle() -> None:
        """Reads the metrics of the step before the newest one, which is still running."""
        nonlocal pending
        if pending is None:
            return
        step, device_metrics = pending
        pending = None
        metrics = jax.device_get(device_metrics)
        meter.add(metrics)
        reporter.advance(step)
        bad = meter.skipped_in_a_row
        if line := spikes.told(step, metrics, bad):
            reporter.say(line)
        if bad and bad == cfg.train.max_bad_steps:
            raise BadSteps(step - bad + 1, step)
        if step % cfg.train.log_interval == 0 or step == total:
            row = meter.row() | besides(step)
            telemetry.write(step, row)
            reporter.row(step, row)

    def due(step: int, interval: int) -> bool:
        return step == total or (interval > 0 and step % interval == 0)

    meter.reset()
    # Every transfer in here is asked for by name; an accidental one (a stray float(), a numpy argument) is an error.
    with jax.transfer_guard("disallow"):
        for step in range(start_step + 1, total + 1):
            watch.doing(f"reading the rows of step {step}", working=True)
            if watch.should_stop():
                settle()
                return state, step - 1
            asked = time.perf_counter()
            batch = next(feed)
            meter.data_wait += time.perf_counter() - asked
            watch.doing(f"step {step}", working=True)
            state, metrics = step_fn(state, batch)
            settle()
            pending = (step, metrics)
            to_save = save_again() or due(step, cfg.train.checkpoint_interval)
            if due(step, cfg.train.eval_interval) or to_save:
                settle()
                paused = time.perf_counter()
                if due(step, cfg.train.eval_interval):
                    evaluate(state, step)
                if to_save:  # afterwards: a checkpoint holds its own evaluation
                    began = time.perf_counter()
                    save(state, step)
                    meter.saving += time.perf_counter() - began
                meter.leave_out(time.perf_counter() - paused)
    return state, total
