"""The training loop: dispatch a step, then read the metrics of the one before.
The host never waits for the newest step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax

from nash_mhc.objectives.base import Batch
from nash_mhc.train import spikes
from nash_mhc.train.session import BadSteps, Session
from nash_mhc.train.state import TrainState


def train_loop(session: Session, state: TrainState, feed: Iterator[Batch]) -> tuple[TrainState, int]:
    """From the session's start to its last step, or to where its watch or its patience says stop: (state, its step).

    Evaluates and saves at their intervals and after the last step; a save that failed is tried again between two steps.
    """
    cfg, meter, watch, clock = session.cfg.train, session.meter, session.watch, session.clock
    pending: tuple[int, Any] | None = None  # the newest step, and its metrics on the device

    def read_pending() -> None:
        nonlocal pending
        if pending is not None:
            (step, metrics), pending = pending, None
            _read(session, step, jax.device_get(metrics))

    def due(step: int, interval: int) -> bool:
        return step == cfg.total_steps or (interval > 0 and step % interval == 0)

    meter.reset()
    # Every transfer in here is asked for by name; an accidental one (a stray float(), a numpy argument) is an error.
    with jax.transfer_guard("disallow"):
        for step in range(session.start.step + 1, cfg.total_steps + 1):
            watch.doing(f"reading the rows of step {step}", working=True)
            if watch.should_stop():
                read_pending()
                return state, step - 1
            asked = time.perf_counter()
            clock.enter("input")
            batch = next(feed)
            clock.enter("step")
            meter.data_wait += time.perf_counter() - asked
            watch.doing(f"step {step}", working=True)
            if session.profile is not None:
                meter.leave_out(session.profile.before(step, state))
            state, metrics = session.step_fn(state, batch)
            if session.profile is not None:
                meter.leave_out(session.profile.after(step, state))
            read_pending()
            pending = (step, metrics)
            to_save = session.saver.due() or due(step, cfg.checkpoint_interval)
            to_evaluate = due(step, cfg.eval_interval)
            if to_evaluate or to_save:
                read_pending()
                paused = time.perf_counter()
                if to_evaluate:
                    session.evaluate(state, step)
                    to_save |= session.cfg.ends_with_best and session.best.step == step
                if to_save:  # afterwards: a checkpoint holds its own evaluation
                    began = time.perf_counter()
                    session.save(state, step)
                    meter.saving += time.perf_counter() - began
                meter.leave_out(time.perf_counter() - paused)
                if to_evaluate and session.has_waited_enough:
                    return state, step
    return state, cfg.total_steps


def _read(session: Session, step: int, metrics: dict[str, Any]) -> None:
    """Takes in the metrics of a finished step; BadSteps where too many in a row were skipped."""
    cfg, meter = session.cfg.train, session.meter
    meter.add(step, metrics)
    session.reporter.advance(step)
    bad = meter.skipped_in_a_row
    if line := spikes.line(step, metrics, bad):
        session.reporter.say(line)
    if metrics["skipped"] and bad >= cfg.max_bad_steps > 0:
        raise BadSteps(step - bad + 1, step)
    if step % cfg.log_interval == 0 or step == cfg.total_steps:
        session.write_row(step)
