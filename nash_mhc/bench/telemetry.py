"""`bench telemetry`: what is seen of a run, and what it costs: rows, pictures and samples, as shares of the step."""

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

MOST = 0.01  # of the time of a run at its own intervals: what is promised
_EVALUATIONS = 4  # the first of which compiles


def bench_telemetry(cfg: RunConfig, *, steps: int) -> dict[str, Any]:
    """A real run of so many steps in a folder of its own, with everything on that its configuration asks for."""
    if steps < 2 * _EVALUATIONS:
        raise ConfigError(f"--steps must be at least {2 * _EVALUATIONS}, not {steps}")
    train, optim = cfg.train, cfg.optim
    often = steps // _EVALUATIONS
    with tempfile.TemporaryDirectory() as folder, _timed() as seconds:
        run(
            dataclasses.replace(
                cfg,
                train=dataclasses.replace(
                    train, checkpoint_dir=folder, total_steps=steps, epochs=None, log_interval=max(1, often // 4),
                    eval_interval=often, checkpoint_interval=0,
                ),
                optim=dataclasses.replace(optim, warmup_steps=min(optim.warmup_steps, steps)),
            ),
            quiet=True,
        )  # fmt: skip
        rows = [row for row in RunFolder(folder).rows() if "step_ms" in row]
    step = statistics.median(row["step_ms"] for row in rows) / 1e3
    # Rows are written while the devices work on the next step, and count all the same; compiling is counted elsewhere.
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
    """Seconds of each call, while this lasts."""
    seconds: dict[str, list[float]] = {"row": [], "evaluation": [], "sample": []}
    inner = StepLog.write_row, Telemetry.write, Samples.write

    def timing(name: Callable[..., str | None], call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(self: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            made = call(self, *args, **options)
            if (what := name(**options)) is not None:
                seconds[what].append(time.perf_counter() - began)
            return made

        return timed

    StepLog.write_row = timing(lambda **_: "row", inner[0])  # type: ignore[method-assign]
    # The row of metrics is written through it, too, and is counted above.
    Telemetry.write = timing(lambda **options: "evaluation" if "file" in options else None, inner[1])  # type: ignore[method-assign]
    Samples.write = timing(lambda **_: "sample", inner[2])  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        StepLog.write_row, Telemetry.write, Samples.write = inner  # type: ignore[method-assign]
