"""A model of ours as lm-evaluation-harness knows models. The one file that is imported only where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from nash_mhc.data.tokenizer import prefix_of
from nash_mhc.evaluate.progress import Progress
from nash_mhc.evaluate.scoring import Request, Scorer, windows
from nash_mhc.hub.load import Loaded
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import MANY, generate_tokens
from nash_mhc.parallel.sharding import for_compute, named_sharding

_NEW_TOKENS = 256  # that a task asks for when it says nothing, as with lm-eval's own backends
_SHORTEST = 64  # tokens that the smallest cache has room for


class HarnessModel(TemplateLM):
    """Gives what lm-eval's `hf` backend gives for the same model, begin token, truncation and stop strings included.

    `is_at_work` while a method of this class runs: what is raised then is no fault of a task.
    """

    def __init__(self, loaded: Loaded, scorer: Scorer, progress: Progress) -> None:
        super().__init__()
        self.loaded, self._scorer, self._progress = loaded, scorer, progress
        self.task = ""  # what the progress is shown under
        self.is_at_work = False
        self._whole: LanguageModel | None = None  # on one device, for writing

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.loaded.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        return prefix_of(self.loaded.tokenizer)

    @property
    def max_length(self) -> int:
        return self._scorer.longest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With the begin token, where documents have one and the text does not begin with it already."""
        tokenizer = self.loaded.tokenizer
        tokens: list[int] = []
        for unit in tokenizer.split_special(string):  # prompts of chat models spell special tokens
            tokens += [unit] if isinstance(unit, int) else tokenizer.encode(unit).tolist()
        if tokenizer.begin is None or add_special_tokens is False or tokens[:1] == [tokenizer.begin]:
            return tokens
        return [tokenizer.begin, *tokens]

    # --- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # whose bar is about making tokens, not about the model

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return [tuple(score) for score in self._scores([Request(list(c), list(t)) for _, c, t in requests])]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Of each text as a whole, in rows that share one token, as lm-eval has it."""
        texts = [list(windows(self.tok_encode(r.args[0]), self.prefix_token_id, self.max_length)) for r in requests]
        scores = iter(self._scores([row for text in texts for row in text]))
        return [sum(next(scores).log_prob for _ in text) for text in texts]

    def _scores(self, requests: list[Request]) -> list[Any]:
        cut = sum(len(r.context) + len(r.continuation) > self.max_length + 1 for r in requests)
        if cut:
            self._progress.say(f"{self.task}: {cut:,} of {len(requests):,} prompts are longer than {self.max_length:,} tokens,"
                               " and lose their beginning")  # fmt: skip
        self.is_at_work = True
        with self._progress.part(self.task, len(requests)) as tick:
            found = self._scorer.score(requests, tick)
        self.is_at_work = False
        return found

    # --- text --------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """One text after the other, on one device."""
        self.is_at_work = True
        with self._progress.part(f"{self.task}: writing", len(requests)) as tick:
            found = []
            for request in requests:
                found.append(self._write(*request.args))
                tick(1)
        self.is_at_work = False
        return found

    def _write(self, prompt: str, settings: dict[str, Any]) -> str:
        options: Any = normalize_gen_kwargs(settings, _NEW_TOKENS)
        stops = [stop for stop in options["until"] if stop]
        count, longest = options["max_gen_toks"], self.max_length
        if count >= longest:
            self._say_once(f"{self.task} asks for {count:,} new tokens, and the model sees {longest:,} in all: "
                           "as a text grows, its beginning is forgotten")  # fmt: skip
        kept = longest - count if count < longest else max(longest // 2, 1)
        tokens = self.tok_encode(prompt)[-kept:] or [self.prefix_token_id]
        is_drawn = options["do_sample"]
        made: list[int] = []
        for token in generate_tokens(
            self._on_one_device(), tokens, seq_len=self._room(len(tokens) + count), end=self.loaded.tokenizer.end,
            max_tokens=count, temperature=float(options["temperature"]) if is_drawn else 0.0,
            top_k=int(options.get("top_k") or 0), top_p=float(options.get("top_p") or 1.0), dtype=self.loaded.dtype,
            at_once=MANY, say=self._say_once,
        ):  # fmt: skip
            if token in self.loaded.stops:
                break
            made.append(token)
            if stops and self._has_ended(made, stops):
                break
        text = self.loaded.tokenizer.decode(np.array(made, np.int32))
        for stop in stops:
            text = text.split(stop)[0]
        return text

    def _has_ended(self, made: list[int], stops: list[str]) -> bool:
        """Looked for in the last tokens alone, each of which is a byte at least (and the first maybe half a word)."""
        longest = max(len(stop.encode("utf-8")) for stop in stops)
        tail = self.loaded.tokenizer.decode(np.array(made[-longest - 4 :], np.int32))
        return any(stop in tail for stop in stops)

    def _room(self, count: int) -> int:
        """Tokens of the cache: few sizes, so that there are few programs."""
        room = _SHORTEST
        while room < count:
            room *= 2
        return min(room, max(self.max_length, 2))

    def _on_one_device(self) -> LanguageModel:
        if self._whole is None:
            self._whole = whole_model(self.loaded.model, self.loaded.dtype)
        return self._whole

    _said: frozenset[str] = frozenset()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said |= {text}
            self._progress.say(text)


def whole_model(model: LanguageModel, dtype: str) -> LanguageModel:
    """All weights in the compute dtype on the first device of this process, wherever they lie."""
    mesh = jax.tree.leaves(model)[0].sharding.mesh
    if mesh.size == 1:
        return model
    everywhere: Callable[[LanguageModel], LanguageModel] = jax.jit(
        lambda model: for_compute(model, jnp.dtype(dtype)), out_shardings=named_sharding(mesh)
    )
    return jax.tree.map(lambda a: a.addressable_data(0), everywhere(model))
