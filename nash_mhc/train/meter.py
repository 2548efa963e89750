"""What the finished steps amount to: tokens, times, MFU, skipped updates."""

from __future__ import annotations

import math
import time
from typing import Any

from nash_mhc.config.schema import RunConfig


class Meter:
    """Turns the metrics of finished steps into rows. Times are between completions seen, so they are the device's own."""

    def __init__(self, cfg: RunConfig, flops_per_token: float, peak_flops: float, tokens_seen: int, skipped: int = 0) -> None:
        self._cfg, self._flops_per_token, self._peak = cfg, flops_per_token, peak_flops
        self.tokens_seen, self.skipped, self.skipped_in_a_row = tokens_seen, skipped, 0
        self.last: dict[str, Any] = {}  # metrics of the step that was added last
        self.reset()

    def reset(self) -> None:
        self._since, self._steps, self._tokens = time.perf_counter(), 0, 0
        self.data_wait = self.saving = 0.0  # seconds that they have held up the loop

    def leave_out(self, seconds: float) -> None:
        """Time that belongs to no step: an evaluation, a save."""
        self._since += seconds

    def add(self, metrics: dict[str, Any]) -> None:
        self._steps += 1
        self.last = metrics
        tokens = int(metrics["tokens"]) if math.isfinite(metrics["tokens"]) else 0
        self._tokens += tokens
        self.tokens_seen += tokens
        self.skipped += int(metrics["skipped"])
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics["skipped"] else 0

    def row(self, metrics: dict[str, Any]) -> dict[str, Any]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        # MFU counts every slot of the batch: padding costs as much as text.
        slots = self._steps * self._cfg.train.grad_accum * self._cfg.data.batch_size * self._cfg.data.seq_len
        # Numbers, and for what is measured layer by layer, lists of them.
        row = {k: v.tolist() for k, v in metrics.items() if k not in ("tokens", "spike")} | {
            "tokens_per_s": self._tokens / seconds,
            "mfu": slots * self._flops_per_token / seconds / self._peak,
            "tokens_seen": self.tokens_seen,
            "skipped": self.skipped,
            "step_ms": seconds / max(self._steps, 1) * 1e3,
            "data_wait_ms": self.data_wait / max(self._steps, 1) * 1e3,
            "save_ms": self.saving / max(self._steps, 1) * 1e3,
        }
        self.reset()
        return row
