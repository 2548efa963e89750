"""The model interface of lm-evaluation-harness. Only imported where that package is installed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from nash_mhc.data.tokenizer import prefix_of
from nash_mhc.evaluate.scoring import Request, Score, Scorer, track, windows
from nash_mhc.loading.load import Loaded
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import MANY, Sampling, generate_tokens
from nash_mhc.train.samples import on_one_device

log = logging.getLogger(__name__)
_MAX_NEW_TOKENS = 256  # for tasks that do not say, as in lm-eval's own backends
_SMALLEST_CACHE = 64  # tokens


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


class HarnessModel(TemplateLM):
    """Give the same results as lm-eval's `hf` backend, including begin token, truncation and stop strings.

    `is_running` while a method of this class runs: errors raised then are not the task's fault.
    """

    def __init__(self, loaded: Loaded, scorer: Scorer) -> None:
        super().__init__()
        self.loaded, self._scorer = loaded, scorer
        self.task = ""  # for the progress display
        self.is_running = False
        self._local: LanguageModel | None = None  # on one device, for generation

    @property
    def eot_token_id(self) -> int:
        return self.loaded.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without context."""
        return prefix_of(self.loaded.tokenizer)

    @property
    def max_length(self) -> int:
        return self._scorer.longest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode with the begin token, if documents have one and the text does not already begin with it."""
        tokenizer = self.loaded.tokenizer
        tokens: list[int] = []
        for unit in tokenizer.split_special(string):  # chat prompts contain special tokens as text
            tokens += [unit] if isinstance(unit, int) else tokenizer.encode(unit).tolist()
        if tokenizer.begin is None or add_special_tokens is False or tokens[:1] == [tokenizer.begin]:
            return tokens
        return [tokenizer.begin, *tokens]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return [
            (score.log_prob, score.is_greedy) for score in self._scores([Request(list(c), list(t)) for _, c, t in requests])
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, in windows that overlap by one token as in lm-eval."""
        texts = [list(windows(self.tok_encode(r.args[0]), self.prefix_token_id, self.max_length)) for r in requests]
        scores = iter(self._scores([window for text in texts for window in text]))
        return [sum(next(scores).log_prob for _ in text) for text in texts]

    def _scores(self, requests: list[Request]) -> list[Score]:
        if truncated := sum(len(r.context) + len(r.continuation) > self.max_length + 1 for r in requests):
            log.warning(
                f"{self.task}: {truncated:,} of {len(requests):,} prompts are longer than {self.max_length:,} tokens; "
                "truncating them on the left"
            )
        self.is_running = True
        with track(self.task, len(requests)) as advance:
            scores = self._scorer.score(requests, advance)
        self.is_running = False
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate one text at a time on one device."""
        self.is_running = True
        texts = []
        with track(f"{self.task}: generating", len(requests)) as advance:
            for request in requests:
                texts.append(self._generate(*request.args))
                advance(1)
        self.is_running = False
        return texts

    def _generate(self, prompt: str, settings: dict[str, Any]) -> str:
        options: Any = normalize_gen_kwargs(settings, _MAX_NEW_TOKENS)
        stops = [stop for stop in options["until"] if stop]
        count, longest = options["max_gen_toks"], self.max_length
        if count >= longest:
            _warn_once(
                f"{self.task}: max_gen_toks is {count:,}, but the model's context is {longest:,} tokens; dropping the oldest "
                "tokens of longer texts"
            )
        context = longest - count if count < longest else max(longest // 2, 1)
        tokens = self.tok_encode(prompt)[-context:] or [self.prefix_token_id]
        capacity = max(_SMALLEST_CACHE, 1 << (len(tokens) + count - 1).bit_length())  # a power of 2: few programs
        generated: list[int] = []
        if self._local is None:
            log.info("compiling ...")
            mesh = jax.tree.leaves(self.loaded.model)[0].sharding.mesh
            self._local = on_one_device(self.loaded.model, mesh, self.loaded.dtype)
        temperature = float(options["temperature"]) if options["do_sample"] else 0.0
        how = Sampling(temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0))
        for token in generate_tokens(
            self._local, tokens, how, seq_len=min(capacity, max(longest, 2)), end=self.loaded.tokenizer.end, max_tokens=count,
            dtype=self.loaded.dtype, at_once=MANY,
        ):  # fmt: skip
            if token in self.loaded.stops:
                break
            generated.append(token)
            if stops and self._has_stop(generated, stops):
                break
        text = self.loaded.tokenizer.decode(np.array(generated, np.int32))
        for stop in stops:
            text = text.split(stop)[0]
        return text

    def _has_stop(self, generated: list[int], stops: list[str]) -> bool:
        """Search only the last tokens: each is at least one byte, and the first may be a partial character."""
        longest = max(len(stop.encode("utf-8")) for stop in stops)
        tail = self.loaded.tokenizer.decode(np.array(generated[-longest - 4 :], np.int32))
        return any(stop in tail for stop in stops)
