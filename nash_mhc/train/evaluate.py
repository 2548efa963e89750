"""Evaluation: the held-out loss of a model, and the evaluations of a run from the first to its final result."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import EVALUATIONS, RESULT, RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.data.loader import check_weights, count_bytes
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import RowSource, fixed_sample
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.model.lora import adapters_of, base_of, on_base
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.objectives.base import Batch, OpenFeed, Sums
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep, Program
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.telemetry.sinks import Telemetry
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train.device_batches import own_rows, to_device
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import CACHED, ProgramKey, TrainState
from nash_mhc.train.step import objective_for, padded_attention_length

log = logging.getLogger(__name__)
_QUESTIONS = 3  # held-out prompts that are answered before and after training
_SHOWN = 70  # characters of a prompt or answer in the terminal


class Stopped(Exception):
    """A signal stopped the run during an evaluation, which therefore has no result."""


class Question(NamedTuple):
    """A held-out prompt and its response, in tokens."""

    prompt: list[int]
    response: list[int]


@functools.lru_cache(CACHED)
def _evaluation(key: ProgramKey, mesh: Mesh, length: int | None) -> CompiledStep:
    """Return the compiled function (model, batch) -> sums of the objective over the batch."""
    objective = objective_for(key, None, length, evaluates=True)

    def sums(model: LanguageModel, batch: Batch) -> Sums:
        return objective(model, jax.tree.map(lambda a: a[0], batch))[1].sums

    return CompiledStep(sums, mesh, out_shardings=named_sharding(mesh))  # replicated: every process reads them


class Evaluator:
    """Evaluates models on a fixed random sample of a held-out source.

    The sample does not depend on the run's seed, and on its batch size only in the length of the last batch, so runs
    can be compared. `eval/loss` is the cross-entropy, as `loss` is in training, without auxiliary losses.
    """

    def __init__(
        self,
        key: ProgramKey,
        held_out: RowSource,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        batch_size: int,
        batches: int,
        feed: OpenFeed | None = None,
        all_rows: bool = False,
    ) -> None:
        """Read a sample of this many batches, or with `all_rows` all of a finite source."""
        self.held_out = held_out
        self._mesh, self._read = mesh, (feed or OpenFeed()).reader(held_out)
        B = batch_size
        count = len(held_out) if all_rows and not held_out.endless else batches * B
        numbers = fixed_sample(held_out, count)
        rows = [held_out[int(i)] for i in numbers]
        check_weights(np.stack([row.weights for row in rows]), held_out.name, numbers)
        # Fill the last batch with copies of zero weight.
        rows += [rows[0]._replace(weights=np.zeros_like(rows[0].weights))] * (-len(rows) % B)
        stacked = lambda some: type(some[0])(*(np.stack(a)[None] for a in zip(*some, strict=True)))
        self._rows = [stacked(rows[i : i + B]) for i in range(0, len(rows), B)]
        self._bytes = sum(count_bytes(r, tokenizer.byte_lengths) for r in self._rows)
        length = padded_attention_length(key.cfg.model.alignment, held_out)
        self._sums = _evaluation(key, mesh, length).with_constants()
        self.program: Program | None = None  # of `_sums`, once `compile` has started

    def compile(self, model: Any, batch: Batch, *, after: Program) -> None:
        """Start to compile for these shapes once the program `after` is compiled; the first steps do not wait for it.

        With several processes, wait here: one that compiles later would hold up the others' training.
        """
        alone = jax.process_count() == 1
        self.program = self._sums.compile_in_background(model, batch, after=after if alone else None)
        if not alone:
            self.program.result()

    @property
    def batches(self) -> int:
        return len(self._rows)

    def _batch(self, model: LanguageModel, rows: Rows) -> Batch:
        return self._read(model, to_device(own_rows(rows, self._mesh), self._mesh))

    def questions(self, count: int) -> list[Question]:
        """Return the first prompts of the sample with their responses; none if the data has no prompts.

        A prompt is text with weight 0 at the start of a document; its response is the weighted text that follows.
        """
        found: list[Question] = []
        for rows in self._rows:
            for inputs, targets, segments, weights in zip(*(a.reshape(-1, a.shape[-1]) for a in rows[:4]), strict=True):
                for segment in range(1, int(segments.max(initial=0)) + 1):
                    (positions,) = np.nonzero(segments == segment)
                    is_weighted = weights[positions] > 0
                    if is_weighted.any() and not is_weighted[0]:
                        first = int(is_weighted.argmax())
                        response = positions[first:][np.cumprod(is_weighted[first:]).astype(bool)]
                        found.append(Question(inputs[positions[: first + 1]].tolist(), targets[response].tolist()))
                    if len(found) == count:
                        return found
        return found

    def evaluate(
        self,
        model: LanguageModel,
        should_stop: Callable[[], bool] = lambda: False,
        only: Callable[[Rows], np.ndarray] | None = None,
    ) -> dict[str, float]:
        """Return the means over all batches, NaN if no target has weight; `only` selects targets.

        Raise Stopped if `should_stop`, which is called before every batch, returns True.
        """
        # Summed on the host in double precision: the sums of many batches exceed the precision of float32.
        total: dict[str, tuple[float, float]] = {}
        running: deque[Sums] = deque()
        for rows in [*self._rows, None]:
            if should_stop():
                raise Stopped
            if rows is not None:
                scored = rows if only is None else rows._replace(weights=rows.weights * only(rows))
                running.append(self._sums(model, self._batch(model, scored)))
            if len(running) > (rows is not None):  # read a batch while the next one runs
                for name, part in jax.device_get(running.popleft()).items():
                    before, weight = total.get(name, (0.0, 0.0))
                    total[name] = before + float(part.total), weight + float(part.weight)
        means = {name: value / weight if weight else math.nan for name, (value, weight) in total.items()}
        values = {"eval/loss": means.get("loss/ce", means["loss"])}
        if "loss/ce" in means:
            values["eval/perplexity"] = math.exp(min(means["loss/ce"], 700.0))
            values["eval/bits_per_byte"] = total["loss/ce"][0] / math.log(2) / max(self._bytes, 1)
        return values | {f"eval/{name}": mean for name, mean in means.items() if not name.startswith("loss")}


# --- the evaluations of a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The best evaluation so far; saved in checkpoints, so that --patience counts across restarts."""

    loss: float | None = None  # held-out loss; None before the first evaluation
    step: int | None = None
    since: int = 0  # evaluations after it

    @staticmethod
    def of(saved: dict[str, Any] | None) -> Best:
        return Best(**saved) if saved else Best()

    def after(self, step: int, loss: float) -> Best:
        """Return the best after one more evaluation; an evaluation that a resumed run repeats counts once."""
        if self.loss is None or (math.isfinite(loss) and loss < self.loss):
            return Best(loss, step) if math.isfinite(loss) else self
        return self if step == self.step else Best(self.loss, self.step, self.since + 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Evaluations:
    """The evaluations of a run: held-out loss and a sample at intervals; at the end the test score and result.json."""

    evaluator: Evaluator | None  # None: only write samples
    test: Evaluator | None  # None: no test score
    last_step: int  # of the run
    samples: Samples
    best: Best
    folder: RunFolder
    floor: tuple[float, float] | None
    watch: Watch
    clock: WallClock
    reporter: Reporter
    telemetry: Telemetry
    values: dict[str, float] = field(default_factory=dict)  # of the latest evaluation
    step: int | None = None  # of the latest evaluation
    sample: str | None = None  # the latest one

    def evaluate(self, state: TrainState, step: int, arrays: dict[str, Any], *, write_row: bool = True) -> bool:
        """Evaluate the state and write a row; return False if there is no evaluator, or a signal stops the run.

        Without an evaluator, only write a sample after the last step.
        `arrays` are measurements of the last step that the report draws as pictures.
        """
        if self.evaluator is None:
            if step >= self.last_step:
                self.sample = self.samples.write(state.averaged_model)
            return False
        try:
            with self.clock.during("compile"):
                self._wait_for_program(self.evaluator.program)
            values = self._score(self.evaluator, state.model, step)
            if state.ema is not None:
                # In the dtype of the weights, for which the program was compiled.
                averaged = jax.tree.map(lambda mean, weight: mean.astype(weight.dtype), state.averaged_model, state.model)
                values["eval/loss_ema"] = self._score(self.evaluator, averaged, step)["eval/loss"]
            with self.clock.during("evaluation"):
                self.sample = self.samples.write(state.averaged_model)
        except Stopped:
            log.info(f"the evaluation at step {step} was interrupted; the resumed run repeats it")
            return False
        self.values.update(values)
        self.step = step
        self.best = self.best.after(step, values["eval/loss"])
        if write_row:
            sample = {} if self.sample is None else {"sample": self.sample}
            self.telemetry.write(step, self.values | arrays | sample, file=EVALUATIONS)
        self.reporter.evaluation(step, self.values, self.floor, self.sample)
        return True

    def _score(self, evaluator: Evaluator, model: LanguageModel, step: int) -> dict[str, float]:
        def should_stop() -> bool:
            self.watch.set_phase(f"evaluation at step {step}", working=True)
            return self.watch.should_stop()

        with self.clock.during("evaluation"):
            return evaluator.evaluate(model, should_stop)

    def _wait_for_program(self, program: Program | None) -> None:
        while program is not None and not program.done():
            self.watch.set_phase("compiling the evaluation")
            if self.watch.should_stop():
                raise Stopped
            futures.wait([program], timeout=0.1)

    def record_answers(self, state: TrainState, tokenizer: Tokenizer) -> None:
        """Write the untrained model's answers to held-out prompts into result.json, if the data has prompts."""
        questions, answers = self._answers(state)
        if not answers:
            return
        decode = lambda tokens: tokenizer.decode(np.asarray(tokens))
        rows = [
            {"prompt": decode(question.prompt), "response": decode(question.response), "before": answer}
            for question, answer in zip(questions, answers, strict=True)
        ]
        self.folder.write({RESULT: json.dumps({"answers": rows}, indent=2) + "\n"})

    def _answers(self, state: TrainState) -> tuple[list[Question], list[str]]:
        questions = [] if self.evaluator is None else self.evaluator.questions(_QUESTIONS)
        return questions, self.samples.answer(state.averaged_model, [question.prompt for question in questions]) or []

    def load_best(
        self, store: Store, like: TrainState, state: TrainState, step: int, *, has_adapters: bool
    ) -> tuple[TrainState, int]:
        """Return the state with the weights of the best checkpoint, and its step; `like` has the state's shapes."""
        best = self.best
        if self.evaluator is None or best.step is None or best.step == step or best.step not in store.steps():
            return state, step
        loss = f"held-out loss {best.loss:.4f} instead of {self.values['eval/loss']:.4f}"
        log.info(f"the run ends with its best checkpoint, step {best.step} ({loss})")
        if has_adapters:
            model = on_base(store.restore_part(best.step, adapters_of(like.model), "model"), base_of(state.model))
        else:
            model = store.restore_part(best.step, like.model, "model")
        state = eqx.tree_at(lambda s: s.model, state, model)
        if state.ema is not None:
            state = eqx.tree_at(lambda s: s.ema, state, store.restore_part(best.step, like.ema, "ema"))
        self.sample = self.samples.write(state.averaged_model)  # replaces the sample of the last step's model
        return state, best.step

    def finish(self, state: TrainState, step: int) -> dict[str, float]:
        """Return the score on the test split, and write result.json; {} if it already holds the result of this step."""
        written = from_leader(self.folder.result)
        if written.get("step") == step:
            return {}
        rows = [row for row in self.folder.rows(EVALUATIONS) if row["step"] == step][-1:]
        evaluation = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
        result: dict[str, Any] = {"step": step, "evaluation": evaluation}
        if self.test is not None:
            try:
                values = self._score(self.test, state.averaged_model, step)
            except Stopped:
                return {}
            result["test"] = {name.replace("eval/", "test/"): value for name, value in values.items()}
            scores = ", ".join(f"{name.removeprefix('test/')} {value:.4f}" for name, value in result["test"].items())
            log.info(f"test split at step {step}: {scores}")
        if before := written.get("answers", []):
            _, answers = self._answers(state)
            result["answers"] = [row | {"after": answer} for row, answer in zip(before, answers, strict=False)]
            for row in result["answers"]:
                log.info(f"prompt: {_shortened(row['prompt'])}\n  expected: {_shortened(row['response'])}")
                log.info(f"  before: {_shortened(row['before'])}\n  after: {_shortened(row['after'])}")
        if jax.process_index() == 0 and len(result) > 2:
            self.folder.write({RESULT: json.dumps(result, indent=2) + "\n"})
        return result.get("test", {})


def _shortened(text: str) -> str:
    """Return the text in one line, shortened in its first half: a question is at the end."""
    line = " ".join(text.split()) or "(nothing)"
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 4]} ... {line[5 + _SHOWN // 4 - _SHOWN :]}"
