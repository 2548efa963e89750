"""The best evaluation of a run so far: which checkpoint it ends with, and when there is nothing more to wait for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """Saved with every checkpoint: a run that goes on stops where an unbroken one does."""

    loss: float | None = None  # held out; None: nothing was evaluated yet
    step: int | None = None  # of that evaluation
    since: int = 0  # evaluations after it

    @staticmethod
    def of(saved: dict[str, Any] | None) -> Best:
        return Best(**saved) if saved else Best()

    def after(self, step: int, loss: float) -> Best:
        """With one more evaluation. One that is made again, because the run was stopped after it, is the same one."""
        if self.loss is None or (math.isfinite(loss) and loss < self.loss):
            return Best(loss, step) if math.isfinite(loss) else self
        return self if step == self.step else Best(self.loss, self.step, self.since + 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
