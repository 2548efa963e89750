"""Samples: what the model writes at an evaluation, from the same prompt and random numbers every time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ArchitectureConfig, TelemetryConfig
from nash_mhc.data.begin_token import begun
from nash_mhc.data.tokenizer import Tokenizer, stream_text
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import MANY, Drawn, generate_rows, generate_tokens
from nash_mhc.parallel.sharding import for_compute, named_sharding
from nash_mhc.runtime.hardware import device_memory

T = TypeVar("T")
TEMPERATURE = 0.8
_LONGEST = 2048  # tokens of context at most
_SHARE = 0.25  # of a device's memory that a copy of the weights may take
_LARGEST = 1_000_000_000  # parameters, if a device does not report its memory


class Samples:
    """Writes samples in the first process; the others help to gather the weights.

    One device writes, with a copy of all weights in the compute dtype: the others wait, and no token crosses the mesh.
    A model that is too large for such a copy writes nothing.
    """

    def __init__(
        self,
        telemetry: TelemetryConfig,
        model: ArchitectureConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        say: Callable[[str], None],
        seq_len: int,
        dtype: str,
    ) -> None:
        self._tokenizer, self._mesh, self._say = tokenizer, mesh, say
        platform = mesh.devices.flat[0].platform
        self._dtype = "float32" if platform == "cpu" else dtype
        self._count, self._seq_len = telemetry.sample_tokens, min(seq_len, _LONGEST)
        prompt = telemetry.sample_prompt or ""
        self._prompt = begun(tokenizer, tokenizer.encode(prompt).tolist())
        if self._count and not _fits(count_parameters(model), mesh, self._dtype):
            say("no samples are written: a copy of the model is too large for one device beside the run")
            self._count = 0

    def write(self, model: LanguageModel) -> str | None:
        """Return a sample; None if none is wanted, the model is too large, or in other processes than the first."""

        def text(local: LanguageModel) -> str:
            tokens = generate_tokens(
                local, self._prompt, seq_len=self._seq_len, end=self._tokenizer.end, max_tokens=self._count,
                temperature=TEMPERATURE, seed=0, dtype=self._dtype, at_once=MANY,
            )  # fmt: skip
            return "".join(stream_text(tokens, self._tokenizer))

        return self._written(model, text)

    def answer(self, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[str] | None:
        """Return the greedy answer to each prompt; None as in `write`."""

        def texts(local: LanguageModel) -> list[str]:
            answers: list[list[int]] = [[] for _ in prompts]
            room, ends = self._seq_len, [self._tokenizer.end]
            how = Drawn(temperature=0.0)
            for row, token in generate_rows(
                local, prompts, how, seq_len=room, ends=ends, max_tokens=self._count, dtype=self._dtype, at_once=MANY
            ):
                answers[row].append(token)
            return [self._tokenizer.decode(np.asarray(answer)) for answer in answers]

        return self._written(model, texts) if prompts else None

    def _written(self, model: LanguageModel, write: Callable[[LanguageModel], T]) -> T | None:
        if not self._count:
            return None
        try:
            with jax.transfer_guard("allow"):  # tokens cross between host and device
                local = self._on_one_device(model)
                return None if jax.process_index() > 0 else write(local)
        except Exception as error:  # a sample is no reason to stop a run
            self._count = 0
            reason = (str(error).splitlines() or [""])[0]
            self._say(f"no more samples are written ({type(error).__name__}: {reason}); training goes on")
            return None

    def _on_one_device(self, model: LanguageModel) -> LanguageModel:
        everywhere = model if self._mesh.size == 1 else _copied(model, self._mesh, self._dtype)
        # On a mesh of one device, too: next to a cache that is on a device and not on a mesh, the program would be
        # compiled once for that cache and again for the one that it returns.
        return jax.tree.map(lambda a: a.addressable_data(0), everywhere)


def _copied(model: Any, mesh: Mesh, dtype: str) -> Any:
    return _program(mesh, dtype)(model)


@functools.lru_cache(4)
def _program(mesh: Mesh, dtype: str) -> Callable[[Any], Any]:
    return jax.jit(lambda model: for_compute(model, jnp.dtype(dtype)), out_shardings=named_sharding(mesh))


def _fits(parameters: int, mesh: Mesh, dtype: str) -> bool:
    local = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    memory = device_memory(local)
    if memory is None:
        return parameters <= _LARGEST
    return parameters * jnp.dtype(dtype).itemsize <= _SHARE * memory
