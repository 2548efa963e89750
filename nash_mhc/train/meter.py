"""Means over a log interval, and counts over a run: tokens, step times, MFU, skipped updates."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from nash_mhc.checkpoint.run_folder import with_current_names
from nash_mhc.telemetry.sinks import without_nan

_WEIGHT = "weight/"  # prefix: the weight of the mean with the rest of the name
_NEWEST = ("lr", "param_norm", "spikes")  # logged as the latest value, not as a mean
_LEAST = ("health/scales_unused",)  # logged as the minimum of the interval
_OF_A_STEP = ("tokens", "spike", "skipped", "empty", "health/res")
_INSIDE = ("health/res", "health/scale_weight")  # shown as pictures of a single step
_MOST_NAMED = 100  # steps of an interval that are listed by number


class Interval:
    """Sums over the steps since the last row, without values that are not finite and steps without targets.

    Checkpoints hold them, so that a resumed run writes the same row as an unbroken one.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.steps: int = saved.get("steps", 0)
        self._sums = {
            name: (np.array(total), weight) for name, (total, weight) in with_current_names(saved.get("sums", {})).items()
        }
        self._most: dict[str, float] = dict(saved.get("most", {}))
        self._least = {name: np.array(value) for name, value in saved.get("least", {}).items()}
        self._newest: dict[str, float] = dict(saved.get("newest", {}))
        self._named: dict[str, list[int]] = {name: list(steps) for name, steps in saved.get("named", {}).items()}

    def name_step(self, step: int, what: str) -> None:
        """List the number of a step in the row, so that its data can be inspected."""
        steps = self._named.setdefault(f"{what}_steps", [])
        if len(steps) < _MOST_NAMED:
            steps.append(step)

    def add(self, metrics: dict[str, Any], weights: dict[str, float]) -> None:
        """Add a step; `weights` are those of means over a varying number of tokens, other metrics weigh the same."""
        self.steps += 1
        for name, value in metrics.items():
            if name in _OF_A_STEP or metrics["empty"]:
                continue
            if name in _NEWEST:
                self._newest[name] = float(value)
            elif name.startswith("spike_score/"):
                self._most[name] = max(float(value), self._most.get(name, 0.0))
            elif name in _LEAST:
                before = self._least.get(name)
                self._least[name] = np.asarray(value) if before is None else np.minimum(before, value)
            elif np.isfinite(value).all():
                weight = float(weights.get(name, 1.0))
                total, before = self._sums.get(name, (np.zeros(np.shape(value)), 0.0))
                self._sums[name] = total + weight * np.asarray(value, np.float64), before + weight

    def means(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return name -> mean, in the order of a step's metrics; lists for metrics with a value per layer."""
        row: dict[str, Any] = {}
        for name, value in last.items():
            if name in _NEWEST:
                row[name] = self._newest.get(name, math.nan)
            elif name.startswith("spike_score/"):
                row[name] = self._most.get(name, 0.0)
            elif name in _LEAST:
                row[name] = np.asarray(self._least.get(name, np.zeros_like(value))).tolist()
            elif name not in _OF_A_STEP:
                total, weight = self._sums.get(name, (np.full(np.shape(value), math.nan), 1.0))
                row[name] = (total / weight).tolist() if weight else np.full(np.shape(value), math.nan).tolist()
        return row | self._named

    def to_json(self) -> dict[str, Any]:
        sums = {name: [total.tolist(), weight] for name, (total, weight) in self._sums.items()}
        least = {name: value.tolist() for name, value in self._least.items()}
        return {"steps": self.steps, "sums": sums, "most": self._most, "least": least, "newest": self._newest} | (
            {"named": self._named} if self._named else {}
        )


class Meter:
    """Turns the metrics of finished steps into rows. Step times are between completions, so they are the device's."""

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
        """`slots`: tokens of a step, padding included. Without a peak there is no MFU.

        `saved` holds the plain values of the checkpoint that is resumed, at `step` with so many `updates` made.
        """
        self._slots, self._flops_per_token, self._peak = slots, flops_per_token, peak_flops
        self.tokens_seen: int = saved.get("tokens_seen", 0)
        self.empty: int = saved.get("empty_steps", 0)
        self.skipped: int = step - updates - self.empty
        self.skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)  # missing in old checkpoints
        self.last: dict[str, Any] = {}  # metrics of the latest step
        self._inside: dict[str, Any] = {k: v for k, v in saved.get("metrics", {}).items() if k in _INSIDE}
        self._interval = Interval(saved.get("interval"))
        self.reset()

    def reset(self) -> None:
        """Start to measure time."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, 0
        self.data_wait = self.saving = 0.0  # seconds that they held up the loop

    def exclude(self, seconds: float) -> None:
        """Leave out time that belongs to no step: an evaluation, a save."""
        self._since += seconds

    @property
    def inside(self) -> dict[str, Any]:
        """Measurements of the last step that are shown as pictures: H_res and scale weights per layer."""
        return self._inside

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        self._steps += 1
        weights = {name.removeprefix(_WEIGHT): float(value) for name, value in metrics.items() if name.startswith(_WEIGHT)}
        self.last = metrics = {name: value for name, value in metrics.items() if not name.startswith(_WEIGHT)}
        self._inside = {k: without_nan(metrics[k].tolist()) for k in _INSIDE if k in metrics}
        self._interval.add(metrics, weights)
        for what in ("spike", "skipped"):
            if metrics[what] and not metrics["empty"]:
                self._interval.name_step(step, what)
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
        """Return the row of the steps since the last one, and start the next."""
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
