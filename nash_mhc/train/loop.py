"""The training loop: dispatch a step, then read the metrics of the one before. The host never waits for the newest step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from nash_mhc.config.schema import RunConfig
from nash_mhc.train.compiled import CompiledStep
from nash_mhc.train.objective import Batch
from nash_mhc.train.state import TrainState
from nash_mhc.train.telemetry import Reporter, Telemetry


class Meter:
    """Turns the metrics of finished steps into rows. Times are between completions seen, so they are the device's own."""

    def __init__(self, cfg: RunConfig, flops_per_token: float, peak_flops: float, tokens_seen: int) -> None:
        self._cfg, self._flops_per_token, self._peak = cfg, flops_per_token, peak_flops
        self.tokens_seen = tokens_seen
        self.reset()

    def reset(self) -> None:
        self._since, self._steps, self._tokens, self.data_wait = time.perf_counter(), 0, 0, 0.0

    def leave_out(self, seconds: float) -> None:
        """Time that belongs to no step: an evaluation, a save."""
        self._since += seconds

    def add(self, metrics: dict[str, Any]) -> None:
        self._steps += 1
        self._tokens += int(metrics["tokens"])
        self.tokens_seen += int(metrics["tokens"])

    def row(self, metrics: dict[str, Any]) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        # MFU counts every slot of the batch: padding costs as much as text.
        slots = self._steps * self._cfg.train.grad_accum * self._cfg.data.batch_size * self._cfg.data.seq_len
        # Numbers, and for what is measured layer by layer, lists of them.
        row = {k: v.tolist() for k, v in metrics.items() if k != "tokens"} | {
            "tokens_per_s": self._tokens / seconds,
            "mfu": slots * self._flops_per_token / seconds / self._peak,
            "tokens_seen": self.tokens_seen,
            "step_ms": seconds / max(self._steps, 1) * 1e3,
            "data_wait_ms": self.data_wait / max(self._steps, 1) * 1e3,
        }
        self.reset()
        return row


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
    epochs: Callable[[int], dict[str, float]],
) -> TrainState:
    """Runs from `start_step` to the end. `evaluate` and `save` are called at their intervals and after the last step.

    `epochs` says how often each dataset has been read after a step.
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
        if step % cfg.train.log_interval == 0 or step == total:
            row = meter.row(metrics) | {f"epochs/{name}": count for name, count in epochs(step).items()}
            telemetry.write(step, row)
            reporter.row(step, row)

    def due(step: int, interval: int) -> bool:
        return step == total or (interval > 0 and step % interval == 0)

    meter.reset()
    # Every transfer in here is asked for by name; an accidental one (a stray float(), a numpy argument) is an error.
    with jax.transfer_guard("disallow"):
        for step in range(start_step + 1, total + 1):
            asked = time.perf_counter()
            batch = next(feed)
            meter.data_wait += time.perf_counter() - asked
            state, metrics = step_fn(state, batch)
            settle()
            pending = (step, metrics)
            if due(step, cfg.train.eval_interval) or due(step, cfg.train.checkpoint_interval):
                settle()
                paused = time.perf_counter()
                if due(step, cfg.train.eval_interval):
                    evaluate(state, step)
                if due(step, cfg.train.checkpoint_interval):  # afterwards: a checkpoint holds its own evaluation
                    save(state, step)
                meter.leave_out(time.perf_counter() - paused)
    return state
