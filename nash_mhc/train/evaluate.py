"""Held-out loss: the same objective, no gradient, a fixed set of batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.loader import check_weights, count_bytes
from nash_mhc.data.pack import AnyRows, Rows
from nash_mhc.data.sources import RowSource, fixed_sample
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.objectives.base import Batch, Sums
from nash_mhc.train.device_batches import own_rows, to_device
from nash_mhc.train.programs import compile_evaluation


class BrokenOff(Exception):
    """The run is to stop; there is no evaluation."""


class Question(NamedTuple):
    """Of a held-out document of prompts and responses, in tokens."""

    prompt: list[int]
    response: list[int]


class Evaluator:
    """`evaluate(model)` -> loss and whatever else the objective measures,
    on a fixed random sample of the held-out rows.

    `eval/loss` is the cross-entropy, as `loss` is in training (see `objectives.base.means`), without the terms that are
    there for training only.

    The rows do not depend on the run's seed or batch size (up to where the last batch ends),
    so that runs can be compared.
    """

    def __init__(
        self,
        cfg: RunConfig,
        held_out: RowSource,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        teach: Callable[[Batch], Batch] = lambda batch: batch,
        all_rows: bool = False,
    ) -> None:
        """`teach` is done to every batch first; `all_rows`: not a sample, of what has an end."""
        self.held_out = held_out
        self._mesh, self._teach = mesh, teach
        B = cfg.data.batch_size
        count = len(held_out) if all_rows and not held_out.endless else cfg.train.eval_batches * B
        numbers = fixed_sample(held_out, count)
        rows = [held_out[int(i)] for i in numbers]
        check_weights(np.stack([row.weights for row in rows]), held_out.name, numbers)
        # A small split ends within a batch: rows of no weight fill it up.
        rows += [rows[0]._replace(weights=np.zeros_like(rows[0].weights))] * (-len(rows) % B)
        stacked = lambda some: type(some[0])(*(np.stack(a)[None] for a in zip(*some, strict=True)))
        self._rows = [stacked(rows[i : i + B]) for i in range(0, len(rows), B)]
        self._bytes = sum(count_bytes(r, tokenizer.byte_lengths) for r in self._rows)
        self.step = compile_evaluation(cfg, mesh, held_out)

    @property
    def batches(self) -> int:
        return len(self._rows)

    def _batch(self, rows: AnyRows) -> Batch:
        return self._teach(to_device(own_rows(rows, self._mesh), self._mesh))

    def questions(self, count: int) -> list[Question]:
        """The first documents of the sample that have something to answer: text that is given, then text that counts.

        Empty where everything counts.
        """
        found: list[Question] = []
        for rows in self._rows:
            for inputs, targets, segments, weights in zip(*(a.reshape(-1, a.shape[-1]) for a in rows[:4]), strict=True):
                for segment in range(1, int(segments.max(initial=0)) + 1):
                    (places,) = np.nonzero(segments == segment)
                    counts = weights[places] > 0
                    if counts.any() and not counts[0]:
                        first = int(counts.argmax())
                        answer = places[first:][np.cumprod(counts[first:]).astype(bool)]
                        found.append(Question(inputs[places[: first + 1]].tolist(), targets[answer].tolist()))
                    if len(found) == count:
                        return found
        return found

    def evaluate(
        self,
        model: LanguageModel,
        should_stop: Callable[[], bool] = lambda: False,
        only: Callable[[Rows], np.ndarray] | None = None,
    ) -> dict[str, float]:
        """BrokenOff as soon as `should_stop`, which is asked before every batch, says so;
        `only` says which targets count.

        Where none does, all is NaN.
        """
        # Added up on the host in double precision: the sums of many batches outgrow float32.
        total: dict[str, tuple[float, float]] = {}
        running: deque[Sums] = deque()
        for rows in [*self._rows, None]:
            if should_stop():
                raise BrokenOff
            if rows is not None:
                scored = rows if only is None else rows._replace(weights=rows.weights * only(rows))
                running.append(self.step(model, self._batch(scored)))
            if len(running) > (rows is not None):  # while one batch runs, the one before it is read
                done = jax.device_get(running.popleft())
                for name, part in done.items():
                    before, weight = total.get(name, (0.0, 0.0))
                    total[name] = before + float(part.total), weight + float(part.weight)
        means = {name: value / weight if weight else math.nan for name, (value, weight) in total.items()}
        found = {"eval/loss": means.get("loss/ce", means["loss"])}
        if "loss/ce" in means:
            found["eval/perplexity"] = math.exp(min(means["loss/ce"], 700.0))
            found["eval/bits_per_byte"] = total["loss/ce"][0] / math.log(2) / max(self._bytes, 1)
        return found | {f"eval/{name}": mean for name, mean in means.items() if not name.startswith("loss")}
