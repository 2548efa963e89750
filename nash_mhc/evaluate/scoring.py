"""Log-likelihoods of tokens on a mesh: requests of any length -> a few shapes of batches -> one number each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.vocabulary import sharded_log_probs
from nash_mhc.ops.log_probs import TokenScores
from nash_mhc.parallel.sharding import RULES, named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.device_batches import own_rows, to_device

_SHORTEST = 64  # tokens of the shortest rows: each length is a program, and the smaller ones save little

Tick = Callable[[int], None]  # hears how many more requests are done


class Request(NamedTuple):
    """Tokens to score, and those before them, at least one."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    log_prob: float  # nats, of the whole continuation
    is_greedy: bool  # whether greedy decoding would have written it


def windows(tokens: Sequence[int], prefix: int, longest: int, context: int = 1) -> Iterator[Request]:
    """Every token once: rows of `longest` inputs, in which each token sees at least `context` others, but for the
    beginning of the text, which sees all there is. The last row begins as early as it can."""
    tokens = list(tokens)
    first = min(longest, len(tokens))
    if first:
        yield Request([prefix], tokens[:first])
    fresh = longest - context + 1  # tokens that every later row scores
    for start in range(first, len(tokens), fresh):
        stop = min(start + fresh, len(tokens))
        yield Request(tokens[stop - longest - 1 : start], tokens[start:stop])


def row_unit(alignment: int, mesh: Mesh) -> int:
    """Rows have a multiple of this many tokens: whole blocks of the model, and equal parts for the mesh."""
    return math.lcm(alignment, *(mesh.shape[axis] for axis in RULES["time_split"]))


class Scorer:
    """`score(requests)` -> a Score each, in their order, whatever order and company they were computed in.

    A row is padded at its end, where strictly causal attention cannot see it. `say` hears of what takes long.
    """

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        *,
        longest: int,
        batch_size: int,
        dtype: str,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.longest, self.batch_size = longest, batch_size
        self._model, self._mesh, self._say = model, mesh, say
        self._unit = row_unit(model.cfg.alignment, mesh)
        execution = Execution(dtype)

        def scores(model: LanguageModel, batch: Batch) -> TokenScores:
            x_BTD, _ = model.hidden(batch.inputs[0], None, execution)
            return sharded_log_probs(x_BTD, model.unembed_VD, batch.targets[0], model.cfg.vocab_size)

        # Several shapes are what is meant here: no word about each. Every process reads all of it.
        self._program = CompiledStep(scores, mesh, out_shardings=named_sharding(mesh), warn=lambda text: None)
        self._lengths: set[int] = set()  # that there are programs for

    def row_length(self, count: int) -> int:
        """Of the row that so many tokens are put into: few lengths, so that there are few programs."""
        length = self._unit
        while length < max(count, _SHORTEST):
            length *= 2
        return min(length, -(-self.longest // self._unit) * self._unit)

    def score(self, requests: Sequence[Request], tick: Tick = lambda count: None) -> list[Score]:
        if too_long := [len(r.continuation) for r in requests if len(r.continuation) > self.longest]:
            raise ConfigError(
                f"a text to score has {max(too_long):,} tokens, and the model sees {self.longest:,}; leave that task out"
            )
        found: list[Score | None] = [None] * len(requests)
        running: deque[tuple[list[int], TokenScores]] = deque()
        for numbers in [*self._batches(requests), None]:
            if numbers is not None:
                running.append((numbers, self._start([requests[i] for i in numbers])))
            if running and len(running) > (numbers is not None):  # while one batch runs, the one before it is read
                done, scores = running.popleft()
                log_prob_BT, is_best_BT = (np.asarray(a) for a in jax.device_get(scores))
                for row, i in enumerate(done):
                    stop = len(self._inputs(requests[i]))
                    part = (row, slice(stop - len(requests[i].continuation), stop))
                    found[i] = Score(float(log_prob_BT[part].sum(dtype=np.float64)), bool(is_best_BT[part].all()))
                tick(len(done))
        return [score for score in found if score is not None]

    def _tokens(self, request: Request) -> list[int]:
        """What does not fit is cut off on the left."""
        return (request.context + request.continuation)[-(self.longest + 1) :]

    def _inputs(self, request: Request) -> list[int]:
        return self._tokens(request)[:-1]

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Numbers of requests whose rows have the same length, the longest first: what does not fit into memory fails
        at once, and the time that is left is not underestimated."""
        by_length: dict[int, list[int]] = {}
        sizes = [len(self._inputs(request)) for request in requests]
        for i in sorted(range(len(requests)), key=lambda i: -sizes[i]):
            by_length.setdefault(self.row_length(sizes[i]), []).append(i)
        B = self.batch_size
        return [same[at : at + B] for same in by_length.values() for at in range(0, len(same), B)]

    def _start(self, requests: Sequence[Request]) -> TokenScores:
        """Rows that no request fills are empty, so that it is the same program."""
        T = self.row_length(max(len(self._inputs(request)) for request in requests))
        tokens_BT = np.zeros((self.batch_size, T + 1), np.int32)
        for row, request in enumerate(requests):
            tokens = self._tokens(request)
            tokens_BT[row, : len(tokens)] = tokens
        inputs_ABT, targets_ABT = tokens_BT[None, :, :-1], tokens_BT[None, :, 1:]
        same = np.ones_like(inputs_ABT)
        batch = to_device(own_rows(Rows(inputs_ABT, targets_ABT, same, same.astype(np.float32)), self._mesh), self._mesh)
        if T not in self._lengths:
            self._lengths.add(T)
            self._say(f"compiling for rows of {T:,} tokens ...")
        return self._program(self._model, batch)
