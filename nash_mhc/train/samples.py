"""Samples: text that the model generates at an evaluation, always from the same prompt and random numbers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ArchitectureConfig, TelemetryConfig
from nash_mhc.data.tokenizer import Tokenizer, stream_text, with_begin
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.sampling import MANY, Sampling, generate_rows, generate_tokens
from nash_mhc.parallel.sharding import for_compute, named_sharding
from nash_mhc.runtime.hardware import device_memory

log = logging.getLogger(__name__)
T = TypeVar("T")
TEMPERATURE = 0.8
_MAX_CONTEXT = 2048  # tokens
_MEMORY_SHARE = 0.25  # of a device's memory that a copy of the weights may take
_MAX_PARAMETERS = 1_000_000_000  # if a device does not report its memory


class Samples:
    """Generates text in process 0, on one device, from a copy of all weights in the compute dtype.

    The other devices wait, so no token crosses the mesh. A model that is too large for such a copy generates nothing.
    """

    def __init__(
        self,
        telemetry: TelemetryConfig,
        model: ArchitectureConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        seq_len: int,
        dtype: str,
    ) -> None:
        self._tokenizer, self._mesh = tokenizer, mesh
        platform = mesh.devices.flat[0].platform
        self._dtype = "float32" if platform == "cpu" else dtype
        self._count, self._seq_len = telemetry.sample_tokens, min(seq_len, _MAX_CONTEXT)
        prompt = telemetry.sample_prompt or ""
        self._prompt = with_begin(tokenizer, tokenizer.encode(prompt).tolist())
        if self._count and not _fits(count_parameters(model), mesh, self._dtype):
            log.warning("no samples: a second copy of the model does not fit on one device")
            self._count = 0

    def write(self, model: LanguageModel) -> str | None:
        """Return a sample; None if samples are off, the model is too large, or this is not process 0."""

        def text(local: LanguageModel) -> str:
            tokens = generate_tokens(
                local, self._prompt, Sampling(TEMPERATURE), seq_len=self._seq_len, end=self._tokenizer.end,
                max_tokens=self._count, dtype=self._dtype, at_once=MANY,
            )  # fmt: skip
            return "".join(stream_text(tokens, self._tokenizer))

        return self._generated(model, text)

    def answer(self, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[str] | None:
        """Return the greedy answer to each prompt; None as in `write`, or without prompts."""

        def texts(local: LanguageModel) -> list[str]:
            answers: list[list[int]] = [[] for _ in prompts]
            generated = generate_rows(
                local, prompts, Sampling(temperature=0.0), seq_len=self._seq_len, ends=[self._tokenizer.end],
                max_tokens=self._count, dtype=self._dtype, at_once=MANY,
            )  # fmt: skip
            for row, token in generated:
                answers[row].append(token)
            return [self._tokenizer.decode(np.asarray(answer)) for answer in answers]

        return self._generated(model, texts) if prompts else None

    def _generated(self, model: LanguageModel, generate: Callable[[LanguageModel], T]) -> T | None:
        if not self._count:
            return None
        try:
            with jax.transfer_guard("allow"):  # tokens cross between host and device
                local = on_one_device(model, self._mesh, self._dtype)
                return None if jax.process_index() > 0 else generate(local)
        except Exception as error:  # a failed sample must not stop the run
            self._count = 0
            reason = (str(error).splitlines() or [""])[0]
            log.warning(f"sampling failed ({type(error).__name__}: {reason}); training continues without samples")
            return None


def on_one_device(model: LanguageModel, mesh: Mesh, dtype: str) -> LanguageModel:
    """Return all weights on the first device of this process; those of a larger mesh in the compute dtype."""
    replicated = model if mesh.size == 1 else _replicate(mesh, dtype)(model)
    # Also on a mesh of one device: the decoding cache is not on a mesh, and with weights that are, its program would be
    # compiled twice.
    return jax.tree.map(lambda a: a.addressable_data(0), replicated)


@functools.lru_cache(4)
def _replicate(mesh: Mesh, dtype: str) -> Callable[[Any], Any]:
    return jax.jit(lambda model: for_compute(model, jnp.dtype(dtype)), out_shardings=named_sharding(mesh))


def _fits(parameters: int, mesh: Mesh, dtype: str) -> bool:
    local = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    memory = device_memory(local)
    if memory is None:
        return parameters <= _MAX_PARAMETERS
    return parameters * jnp.dtype(dtype).itemsize <= _MEMORY_SHARE * memory
