"""Held-out loss: the same objective, no gradient, a fixed set of batches; and the evaluations of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import EVALUATIONS
from nash_mhc.config.schema import RunConfig
from nash_mhc.data.loader import check_weights, count_bytes
from nash_mhc.data.pack import AnyRows, Rows
from nash_mhc.data.sources import RowSource, fixed_sample
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.objectives.base import Batch, Sums
from nash_mhc.runtime.compiled import Program
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train.device_batches import own_rows, to_device
from nash_mhc.train.programs import compile_evaluation
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import TrainState


class Stopped(Exception):
    """The run was asked to stop during an evaluation, which has no result."""


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
        self.program: Program | None = None  # of `step`, once `compile` has begun it

    def compile(self, model: Any, batch: Batch, *, after: Program) -> None:
        """Begin to compile for these shapes, behind the program `after`: the first steps need no evaluation.

        Of several processes, none may wait for its compiler while the others train: there, wait here.
        """
        alone = jax.process_count() == 1
        self.program = self.step.compile_in_background(model, batch, after=after if alone else None)
        if not alone:
            self.program.result()

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
        """Return the means over all batches, NaN where no target counts; `only` selects targets.

        `should_stop` is asked before every batch; Stopped if it says so.
        """
        # Added up on the host in double precision: the sums of many batches outgrow float32.
        total: dict[str, tuple[float, float]] = {}
        running: deque[Sums] = deque()
        for rows in [*self._rows, None]:
            if should_stop():
                raise Stopped
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


@dataclass(frozen=True)
class Best:
    """The best evaluation so far. Checkpoints hold it, so that a resumed run stops where an unbroken one does."""

    loss: float | None = None  # held-out loss; None: nothing was evaluated yet
    step: int | None = None  # of that evaluation
    since: int = 0  # evaluations after it

    @staticmethod
    def of(saved: dict[str, Any] | None) -> Best:
        return Best(**saved) if saved else Best()

    def after(self, step: int, loss: float) -> Best:
        """Return the best after one more evaluation; one repeated by a resumed run counts once."""
        if self.loss is None or (math.isfinite(loss) and loss < self.loss):
            return Best(loss, step) if math.isfinite(loss) else self
        return self if step == self.step else Best(self.loss, self.step, self.since + 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Evaluations:
    """The evaluations of a run, each with a sample of what the model writes; a signal stops one between two batches."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        samples: Samples,
        best: Best,
        *,
        floor: tuple[float, float] | None,
        watch: Watch,
        clock: WallClock,
        reporter: Reporter,
        telemetry: Telemetry,
    ) -> None:
        """Without an `evaluator`, only samples are written."""
        self.evaluator, self.samples, self.best = evaluator, samples, best
        self.values: dict[str, float] = {}  # of the latest evaluation
        self.step: int | None = None  # of the latest evaluation
        self.sample: str | None = None  # the latest
        self._floor = floor
        self._watch, self._clock, self._reporter, self._telemetry = watch, clock, reporter, telemetry

    def evaluate(self, state: TrainState, step: int, pictures: dict[str, Any], *, write_row: bool = True) -> bool:
        """Evaluate the state and write a row; False if there was nothing to evaluate, or a signal came.

        `pictures` are measurements of the last step that are shown as pictures.
        """
        if self.evaluator is None:
            return False
        try:
            with self._clock.during("compile"):
                self._wait_for_program(self.evaluator.program)
            values = self.score(self.evaluator, state.model, step)
            if state.ema is not None:
                values["eval/loss_ema"] = self.score(self.evaluator, state.best_model, step)["eval/loss"]
            with self._clock.during("evaluation"):
                self.sample = self.samples.write(state.best_model)
        except Stopped:
            self._reporter.say(f"the evaluation at step {step} is broken off; the run that goes on from here begins with it")
            return False
        self.values.update(values)
        self.step = step
        self.best = self.best.after(step, values["eval/loss"])
        if write_row:
            written = {} if self.sample is None else {"sample": self.sample}
            self._telemetry.write(step, self.values | pictures | written, file=EVALUATIONS)
        self._reporter.evaluation(step, self.values, self._floor, self.sample)
        return True

    def score(self, evaluator: Evaluator, model: LanguageModel, step: int) -> dict[str, float]:
        """Return the evaluator's means for a model; Stopped if a signal comes."""

        def should_stop() -> bool:
            self._watch.set_phase(f"evaluation at step {step}", working=True)
            return self._watch.should_stop()

        with self._clock.during("evaluation"):
            return evaluator.evaluate(model, should_stop)

    def _wait_for_program(self, program: Program | None) -> None:
        while program is not None and not program.done():
            self._watch.set_phase("compiling the evaluation")
            if self._watch.should_stop():
                raise Stopped
            futures.wait([program], timeout=0.1)
