"""Read sequences with a teacher: once for a cache, or online, on the student's mesh, batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nash_mhc.config.schema import ArchitectureConfig, ConfigError, DataConfig, RunConfig, TrainConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.kits.distill.loss import TeacherLogits, sharded_teacher_logits
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.loading.load import Loaded, config_of, load
from nash_mhc.loading.weights import find_record
from nash_mhc.model.architectures import for_platform
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.mesh import check_fit
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.storage.files import digest_of
from nash_mhc.train.step import padded_attention_length


def top_k_reader(
    loaded: Loaded,
    source: RowSource,
    mesh: Mesh,
    *,
    seq_len: int,
    vocabulary: int,
    top_k: int,
    temperatures: tuple[float, ...],
    random: int = 0,
    layers: bool = False,
) -> Callable[[LanguageModel, Batch], TeacherLogits]:
    """Return the function (model, microbatch) -> logits relative to the largest; `layers`: with the layers' outputs.

    The last axis of `lse` is the temperature. It is over the whole vocabulary, and relative to the largest logit, too.
    """
    cfg = RunConfig(
        model=loaded.config.model,
        data=dataclasses.replace(loaded.config.data, seq_len=seq_len),
        train=TrainConfig(dtype=loaded.dtype, remat="none"),
    )
    cfg = for_platform(cfg, mesh.devices.flat[0].platform)
    length = padded_attention_length(cfg.model.alignment, source)
    execution = Execution(
        cfg.train.dtype, "none", cfg.train.attention, source.most_documents, length,
        captures=("layer_output",) if layers else (),
        evaluates=True,
    )  # fmt: skip

    def read(model: LanguageModel, batch: Batch) -> TeacherLogits:
        x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
        options = {"vocab_size": model.cfg.vocab_size, "vocabulary": vocabulary, "k": top_k, "random": random}
        found = [
            sharded_teacher_logits(x_BTD, model.unembed_VD, batch.inputs, temperature=t, **options)
            for t in temperatures  # only the log-sum-exps differ
        ]
        largest_BT = found[0].logits[..., 0]
        lse = [each.lse - largest_BT / t for each, t in zip(found, temperatures, strict=True)]
        outputs = model.after_layers(report) if layers else None  # type: ignore[attr-defined]
        return TeacherLogits(found[0].ids, found[0].logits - largest_BT[..., None], jnp.stack(lse, axis=-1), outputs)

    return read


def check_random_vocab(subject: str, random_vocab: int, vocab_size: int, *, is_fixed: bool, remedy: str) -> None:
    """Raise ConfigError if the random tokens are from a vocabulary whose size differs from the student's.

    is_fixed: the student's size comes with its initial weights.
    """
    if random_vocab != vocab_size:
        raise ConfigError(
            f"{subject}: the random tokens are from a vocabulary of {random_vocab}, but the model has {vocab_size}; "
            + (remedy if is_fixed else f"set --model-vocab-size {random_vocab}, or {remedy}")
        )


class OnlineTeacher:
    """A frozen model, in its own dtype, that runs on each batch and returns the logits that its cache would hold."""

    def __init__(
        self,
        flag: str,
        name: str,
        d: DistillConfig,
        student: ArchitectureConfig,
        data: DataConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        student_is_fixed: bool,
        temperature: float,
        layers: bool,
        step: int | None = None,
    ) -> None:
        """`step`: the checkpoint; None: the one that the run ends with. `student_is_fixed`: it starts from weights."""
        own = config_of(name, flag).model
        if student.alignment % own.alignment:
            raise ConfigError(
                f"{flag} {name}: documents start at multiples of {own.alignment}, but the student's start at multiples of "
                f"{student.alignment}; use a cache instead (python -m nash_mhc.distill cache)"
            )
        sizes, wanted = ([getattr(model, key, None) for key in ("layers", "width")] for model in (own, student))
        if layers and (None in sizes or sizes != wanted):
            raise ConfigError(
                f"--distill-layers: {name} has {sizes[0]} layers of width {sizes[1]}, but the student has {wanted[0]} of "
                f"width {wanted[1]}; "
                "leave out --distill-layers, or use equal shapes"
            )
        remedy = "leave out --distill-random"
        if d.random:
            subject, fixed = f"{flag} {name}", student_is_fixed
            check_random_vocab(subject, own.vocab_size, student.vocab_size, is_fixed=fixed, remedy=remedy)
        check_fit(data, own, mesh.shape, resizable=())
        record = find_record(flag, name, step, hashed=True)
        self.identity = digest_of({k: v for k, v in record.items() if k != "folder"})  # a moved folder is the same teacher
        self._loaded = load(name, step, mesh=mesh)
        if self._loaded.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"{flag} {name}: the tokenizer is not {data.tokenizer}; use the same tokenizer for both")
        if d.random and d.top_k >= tokenizer.vocab_size:
            raise ConfigError(
                f"--distill-random {d.random}: --distill-top-k {d.top_k} covers all {tokenizer.vocab_size} tokens; {remedy}"
            )
        self._mesh, self._layers = mesh, layers
        self._options: dict[str, Any] = {
            "seq_len": data.seq_len, "vocabulary": tokenizer.vocab_size, "temperatures": (temperature,),
            "top_k": min(d.top_k, tokenizer.vocab_size), "layers": layers,
            "random": d.random,
        }  # fmt: skip

    def _read(self, source: RowSource) -> Callable[[LanguageModel, Batch], TeacherLogits]:
        """Return the function (model, batch of several microbatches) -> logits, rounded as in a cache."""
        read = top_k_reader(self._loaded, source, self._mesh, **self._options)

        def read_all(model: LanguageModel, batch: Batch) -> TeacherLogits:
            found = jax.lax.map(lambda part: read(model, part), batch)
            logits = jnp.maximum(found.logits, jnp.finfo(jnp.float16).min).astype(jnp.float16)
            return TeacherLogits(found.ids, logits, found.lse[..., 0], found.layers)

        return read_all

    @property
    def _shardings(self) -> TeacherLogits:
        tokens = ("parts", "batch", "time")
        candidates = named_sharding(self._mesh, *tokens, "candidates")
        layers = named_sharding(self._mesh, "parts", "layers", "batch", "time", "width") if self._layers else None
        return TeacherLogits(candidates, candidates, named_sharding(self._mesh, *tokens), layers)  # type: ignore[arg-type]

    def abstract(self, source: RowSource, batch: Batch) -> TeacherLogits:
        """Return shapes and shardings of the logits of a batch."""
        with jax.set_mesh(self._mesh):
            shapes = jax.eval_shape(self._read(source), self._loaded.model, batch)
        place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        return jax.tree.map(place, shapes, self._shardings)

    def program(self, source: RowSource) -> CompiledStep:
        return CompiledStep(self._read(source), self._mesh, out_shardings=self._shardings, several_shapes=True)

    def reader(self, source: RowSource) -> Callable[[Batch], TeacherLogits]:
        program = self.program(source)
        return lambda batch: program(self._loaded.model, batch)
