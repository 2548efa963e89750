"""Score tokens on a mesh: requests of any length, text files, the synthetic stories, a run's own held-out data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nash_mhc.config.humanize import duration
from nash_mhc.config.schema import ConfigError, DataConfig, ObjectiveConfig, RunConfig, TrainConfig
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import loss_floor, open_held_out
from nash_mhc.data.tokenizer import prefix_of
from nash_mhc.evaluate.tasks import HELD_OUT, STORIES
from nash_mhc.loading.load import Loaded
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.registry import named_objective
from nash_mhc.objectives.vocabulary import sharded_log_probs
from nash_mhc.ops.xent import TokenScores
from nash_mhc.parallel.sharding import RULES, named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.device_batches import own_rows, to_device
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.state import ProgramKey

log = logging.getLogger(__name__)
_SHORTEST = 64  # tokens; each length is compiled, and shorter ones save little
_MAX_IMPORTED_LENGTH = 2048  # of stories for imported models, which may have much longer contexts
_REPORT_INTERVAL = 10.0  # seconds

Advance = Callable[[int], object]  # called with the number of newly finished requests


@contextlib.contextmanager
def track(name: str, total: int) -> Iterator[Advance]:
    """Yield a function that advances the progress on stderr: a bar on a terminal, else a log line now and then."""
    console = Console(file=sys.stderr, quiet=jax.process_index() > 0)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
        return
    start = reported = time.monotonic()
    done, first, first_end = 0, 0, start  # the estimate excludes the first items, which include compilation

    def advance(count: int) -> None:
        nonlocal done, reported, first, first_end
        done += count
        now = time.monotonic()
        if not first:
            first, first_end = done, now
        elif now - reported > _REPORT_INTERVAL and done < total:
            reported = now
            left = (now - first_end) / max(done - first, 1) * (total - done)
            log.info(f"{name}: {done:,} of {total:,}, about {duration(left)} left")

    yield advance
    log.info(f"{name}: {total:,} in {duration(time.monotonic() - start)}")


class Request(NamedTuple):
    """Tokens to score, and the tokens before them, at least one."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    log_prob: float  # sum over the continuation, in nats
    is_greedy: bool  # whether greedy decoding gives the continuation


def windows(tokens: Sequence[int], prefix: int, longest: int, context: int = 1) -> Iterator[Request]:
    """Yield windows of up to `longest` inputs that score every token once, with at least `context` tokens before it.

    At the beginning of the text a token has everything before it. The last window starts as early as possible.
    """
    tokens = list(tokens)
    first = min(longest, len(tokens))
    if first:
        yield Request([prefix], tokens[:first])
    stride = longest - context + 1  # tokens scored by every later window
    for start in range(first, len(tokens), stride):
        stop = min(start + stride, len(tokens))
        yield Request(tokens[stop - longest - 1 : start], tokens[start:stop])


def length_multiple(alignment: int, mesh: Mesh) -> int:
    """Return the number that sequence lengths must be a multiple of, for the model's blocks and the mesh."""
    return math.lcm(alignment, *(mesh.shape[axis] for axis in RULES["time_split"]))


class Scorer:
    """Scores requests in batches of similar lengths, padded at the end, where causal attention ignores it."""

    def __init__(self, model: LanguageModel, mesh: Mesh, *, longest: int, batch_size: int, dtype: str) -> None:
        self.longest, self.batch_size = longest, batch_size
        self._model, self._mesh = model, mesh
        self._multiple = length_multiple(model.cfg.alignment, mesh)
        execution = Execution(dtype)

        def scores(model: LanguageModel, batch: Batch) -> TokenScores:
            x_BTD, _ = model.hidden(batch.inputs[0], None, execution)
            return sharded_log_probs(x_BTD, model.unembed_VD, batch.targets[0], model.cfg.vocab_size)

        # Recompilation for several shapes is expected, so no warnings. All processes get all results.
        self._program = CompiledStep(scores, mesh, out_shardings=named_sharding(mesh), several_shapes=True)
        self._compiled: set[int] = set()  # lengths

    def padded_length(self, count: int) -> int:
        """Return one of a few lengths, so that few programs are compiled."""
        length = self._multiple
        while length < max(count, _SHORTEST):
            length *= 2
        return min(length, -(-self.longest // self._multiple) * self._multiple)

    def score(self, requests: Sequence[Request], advance: Advance = lambda count: None) -> list[Score]:
        if too_long := [len(r.continuation) for r in requests if len(r.continuation) > self.longest]:
            raise ConfigError(
                f"a text of a task has {max(too_long):,} tokens, but the context is {self.longest:,}; leave out that task"
            )
        tokens = [(request.context + request.continuation)[-(self.longest + 1) :] for request in requests]
        found: list[Score | None] = [None] * len(requests)
        running: deque[tuple[list[int], TokenScores]] = deque()
        for numbers in [*self._batches([len(each) - 1 for each in tokens]), None]:
            if numbers is not None:
                running.append((numbers, self._start([tokens[i] for i in numbers])))
            if running and len(running) > (numbers is not None):  # read a batch while the next one runs
                done, scores = running.popleft()
                log_prob_BT, is_best_BT = (np.asarray(a) for a in jax.device_get(scores))
                for row, i in enumerate(done):
                    stop = len(tokens[i]) - 1
                    part = (row, slice(stop - len(requests[i].continuation), stop))
                    found[i] = Score(float(log_prob_BT[part].sum(dtype=np.float64)), bool(is_best_BT[part].all()))
                advance(len(done))
        return [score for score in found if score is not None]

    def _batches(self, sizes: Sequence[int]) -> list[list[int]]:
        """Group the indices of requests with these numbers of inputs by padded length.

        The longest come first, so that running out of memory happens early and the time left is not underestimated.
        """
        by_length: dict[int, list[int]] = {}
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            by_length.setdefault(self.padded_length(sizes[i]), []).append(i)
        B = self.batch_size
        return [same[at : at + B] for same in by_length.values() for at in range(0, len(same), B)]

    def _start(self, sequences: Sequence[Sequence[int]]) -> TokenScores:
        """Dispatch one batch, filled up with empty sequences to the compiled shape."""
        T = self.padded_length(max(map(len, sequences)) - 1)
        tokens_BT = np.zeros((self.batch_size, T + 1), np.int32)
        for row, tokens in enumerate(sequences):
            tokens_BT[row, : len(tokens)] = tokens
        inputs_ABT, targets_ABT = tokens_BT[None, :, :-1], tokens_BT[None, :, 1:]
        same = np.ones_like(inputs_ABT)
        batch = to_device(own_rows(Rows(inputs_ABT, targets_ABT, same, same.astype(np.float32)), self._mesh), self._mesh)
        if T not in self._compiled:
            self._compiled.add(T)
            log.info(f"compiling for sequences of {T:,} tokens ...")
        return self._program(self._model, batch)


# --- built-in evaluations ------------------------------------------------------------------------------------------


def stories(loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None) -> dict[str, float]:
    """Evaluate on the held-out stories that training reports, or on the first `limit` sequences.

    `floor` is the lowest possible loss, `ratio` the loss divided by it.
    """
    cfg, multiple = loaded.config, length_multiple(loaded.config.model.alignment, mesh)
    longest = cfg.data.seq_len if loaded.step else min(cfg.data.seq_len, _MAX_IMPORTED_LENGTH)
    data = dataclasses.replace(
        cfg.data, dataset=STORIES, dataset_name=None, eval_split="validation", streaming=False, batch_size=batch_size,
        seq_len=max(longest // multiple * multiple, multiple),
    )  # fmt: skip
    return _evaluate(STORIES, RunConfig().objective, data, loaded, mesh, limit)


def held_out(loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None) -> dict[str, float]:
    """Evaluate on a run's own held-out data, by its own objective.

    The number of sequences is that of an evaluation during training, or `limit`.
    """
    cfg = loaded.config
    if not loaded.step:
        raise ConfigError(f"--tasks {HELD_OUT}: the model is not a run, so its data is unknown; use stories or bytes:FILE")
    if named_objective(cfg.objective.name).feed is not None:
        raise ConfigError(
            f"--tasks {HELD_OUT}: the run's objective {cfg.objective.name} needs batches that only training creates; use "
            "stories or bytes:FILE"
        )
    data = dataclasses.replace(cfg.data, batch_size=batch_size)
    return _evaluate(HELD_OUT, cfg.objective, data, loaded, mesh, limit)


def _evaluate(
    name: str, objective: ObjectiveConfig, data: DataConfig, loaded: Loaded, mesh: Mesh, limit: int | None
) -> dict[str, float]:
    run = loaded.config
    source = open_held_out(data, loaded.tokenizer, align=run.model.alignment)
    if source is None:
        raise ConfigError(f"--tasks {name}: the run held out no part of {data.dataset} (--validation-fraction 0)")
    count = limit or run.train.eval_batches * run.data.batch_size
    train = TrainConfig(dtype=loaded.dtype)
    sections = tuple(section for section in run.of_kits if section.of_objective == objective.name)
    cfg = RunConfig(model=run.model, data=data, train=train, objective=objective, of_kits=sections)
    evaluator = Evaluator(
        ProgramKey.of(cfg), source, loaded.tokenizer, mesh, batch_size=data.batch_size, batches=-(-count // data.batch_size)
    )
    log.info(f"compiling for sequences of {data.seq_len:,} tokens ...")
    with track(name, evaluator.batches) as advance:
        calls = itertools.count()  # one before every batch, and one at the end
        found = evaluator.evaluate(loaded.model, lambda: bool(advance(min(next(calls), 1))))
    figures = {name.removeprefix("eval/"): value for name, value in found.items()}
    if (floor := loss_floor(data, loaded.tokenizer)) is not None:
        figures |= {"floor": floor[0], "ratio": figures["loss"] / floor[0]}
    return figures


def text_file(name: str, text: str, loaded: Loaded, scorer: Scorer, *, limit: int | None = None) -> dict[str, float]:
    """Return the bits per byte of a text, each token scored once, or of its first `limit` windows.

    Windows overlap by half, so each token has at least half a context, or everything before it.
    """
    tokens = loaded.tokenizer.encode(text)
    requests = list(windows(tokens.tolist(), prefix_of(loaded.tokenizer), scorer.longest, max(scorer.longest // 2, 1)))
    selected = requests[:limit]
    with track(name, len(selected)) as advance:
        nats = -math.fsum(score.log_prob for score in scorer.score(selected, advance))
    count = sum(len(request.continuation) for request in selected)
    if len(selected) == len(requests):
        size = len(text.encode("utf-8"))  # exact, even if the tokenizer normalizes text
    else:
        size = int(np.sum(loaded.tokenizer.byte_lengths[tokens[:count]]))
    return {"bits_per_byte": nats / math.log(2) / max(size, 1), "loss": nats / count, "tokens": count}
