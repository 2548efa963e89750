"""Log-likelihoods of tokens on a mesh: requests of any length are batched in a few shapes."""

from __future__ import annotations

import logging
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
from nash_mhc.ops.xent import TokenScores
from nash_mhc.parallel.sharding import RULES, named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.device_batches import own_rows, to_device

log = logging.getLogger(__name__)
_SHORTEST = 64  # tokens; each length is compiled, and shorter ones save little

Advance = Callable[[int], None]  # called with the number of newly finished requests


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

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        *,
        longest: int,
        batch_size: int,
        dtype: str,
    ) -> None:
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
                f"a text to score has {max(too_long):,} tokens, but the context is {self.longest:,}; leave out that task"
            )
        found: list[Score | None] = [None] * len(requests)
        running: deque[tuple[list[int], TokenScores]] = deque()
        for numbers in [*self._batches(requests), None]:
            if numbers is not None:
                running.append((numbers, self._start([requests[i] for i in numbers])))
            if running and len(running) > (numbers is not None):  # read a batch while the next one runs
                done, scores = running.popleft()
                log_prob_BT, is_best_BT = (np.asarray(a) for a in jax.device_get(scores))
                for row, i in enumerate(done):
                    stop = len(self._inputs(requests[i]))
                    part = (row, slice(stop - len(requests[i].continuation), stop))
                    found[i] = Score(float(log_prob_BT[part].sum(dtype=np.float64)), bool(is_best_BT[part].all()))
                advance(len(done))
        return [score for score in found if score is not None]

    def _tokens(self, request: Request) -> list[int]:
        """Truncate on the left."""
        return (request.context + request.continuation)[-(self.longest + 1) :]

    def _inputs(self, request: Request) -> list[int]:
        return self._tokens(request)[:-1]

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Group the indices of requests by padded length.

        The longest come first, so that running out of memory happens early and the time left is not underestimated.
        """
        by_length: dict[int, list[int]] = {}
        sizes = [len(self._inputs(request)) for request in requests]
        for i in sorted(range(len(requests)), key=lambda i: -sizes[i]):
            by_length.setdefault(self.padded_length(sizes[i]), []).append(i)
        B = self.batch_size
        return [same[at : at + B] for same in by_length.values() for at in range(0, len(same), B)]

    def _start(self, requests: Sequence[Request]) -> TokenScores:
        """Dispatch one batch, filled up with empty sequences to the compiled shape."""
        T = self.padded_length(max(len(self._inputs(request)) for request in requests))
        tokens_BT = np.zeros((self.batch_size, T + 1), np.int32)
        for row, request in enumerate(requests):
            tokens = self._tokens(request)
            tokens_BT[row, : len(tokens)] = tokens
        inputs_ABT, targets_ABT = tokens_BT[None, :, :-1], tokens_BT[None, :, 1:]
        same = np.ones_like(inputs_ABT)
        batch = to_device(own_rows(Rows(inputs_ABT, targets_ABT, same, same.astype(np.float32)), self._mesh), self._mesh)
        if T not in self._compiled:
            self._compiled.add(T)
            log.info(f"compiling for sequences of {T:,} tokens ...")
        return self._program(self._model, batch)
