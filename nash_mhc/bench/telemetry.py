"""`bench telemetry`: the cost of metrics, pictures and samples of a run, as a share of the step."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.train.log import StepLog
from nash_mhc.train.samples import Samples
from nash_mhc.train.trainer import run

MOST = 0.01  # target: largest share of a run's time, at its own intervals
_EVALUATIONS = 4  # the first one compiles


def bench_telemetry(cfg: RunConfig, *, steps: int) -> dict[str, Any]:
    """Train for `steps` steps in a temporary directory, with the telemetry of the configuration."""
    if steps < 2 * _EVALUATIONS:
        raise ConfigError(f"--steps must be at least {2 * _EVALUATIONS}, not {steps}")
    train, optim = cfg.train, cfg.optim
    interval = steps // _EVALUATIONS
    with tempfile.TemporaryDirectory() as folder, _timed() as seconds:
        run(
            dataclasses.replace(
                cfg,
                train=dataclasses.replace(
                    train, checkpoint_dir=folder, total_steps=steps, epochs=None, log_interval=max(1, interval // 4),
                    eval_interval=interval, checkpoint_interval=0,
                ),
                optim=dataclasses.replace(optim, warmup_steps=min(optim.warmup_steps, steps)),
            ),
            quiet=True,
        )  # fmt: skip
        rows = [row for row in RunFolder(folder).rows() if "step_ms" in row]
    step = statistics.median(row["step_ms"] for row in rows) / 1e3
    # Rows count although the devices compute meanwhile. The first call of each kind is skipped, as it compiles.
    row, picture, sample = (statistics.median(seconds[name][1:] or [0.0]) for name in ("row", "evaluation", "sample"))
    share = row / (train.log_interval * step)
    if train.eval_interval:
        share += (picture + sample) / (train.eval_interval * step)
    return {
        "step_ms": 1e3 * step,
        "row_ms": 1e3 * row,
        "evaluation_row_and_pictures_ms": 1e3 * picture,
        "sample_ms": 1e3 * sample,
        "sample_tokens": cfg.telemetry.sample_tokens,
        "log_interval": train.log_interval,
        "eval_interval": train.eval_interval,
        "share_of_the_step": share,
        "promised": MOST,
        "kept": share <= MOST,
    }


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, list[float]]]:
    """Record the seconds of each call that writes rows, evaluations or samples."""
    seconds: dict[str, list[float]] = {"row": [], "evaluation": [], "sample": []}
    inner = StepLog.write_row, Telemetry.write, Samples.write

    def timing(name: Callable[..., str | None], call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(self: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(self, *args, **options)
            if (kind := name(**options)) is not None:
                seconds[kind].append(time.perf_counter() - start)
            return result

        return timed

    StepLog.write_row = timing(lambda **_: "row", inner[0])  # type: ignore[method-assign]
    # It also writes the rows of metrics, which are counted above.
    Telemetry.write = timing(lambda **options: "evaluation" if "file" in options else None, inner[1])  # type: ignore[method-assign]
    Samples.write = timing(lambda **_: "sample", inner[2])  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        StepLog.write_row, Telemetry.write, Samples.write = inner  # type: ignore[method-assign]
