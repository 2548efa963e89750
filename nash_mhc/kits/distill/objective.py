"""The objective `distill`, the divergence from a teacher, and its feed, from a cache or from online teachers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from nash_mhc.config.schema import ArchitectureConfig, ConfigError, DataConfig, RunConfig, TrainConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.data.sources import Opener, OpenRequest, check_recipe
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.kits.distill.cache import CachedRows, read_teacher_json
from nash_mhc.kits.distill.loss import LossWeights, TeacherLogits, layer_difference, sharded_distill
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.kits.distill.teacher import OnlineTeacher, check_random_vocab
from nash_mhc.loading.load import shape_of
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Aux, Batch, Feed, FeedMemory, Objective, OpenFeed, Sum
from nash_mhc.objectives.registry import TEXT, ObjectiveKind
from nash_mhc.ops.xent import chunk_length
from nash_mhc.parallel.params import map_declared
from nash_mhc.parallel.sharding import RULES
from nash_mhc.storage.files import digest_of


def distilled(
    model: LanguageModel, batch: Batch, *, execution: Execution, parts: LossWeights, layers: float = 0.0, anchor: float = 0.0
) -> tuple[Float[Array, ""], Aux]:
    """Return the loss and its parts.

    layers: share of the loss that is the distance of the layers' outputs from the teacher's. anchor: weight of the
    divergence from the initial model, which is added.
    """
    teacher, initial = (batch.extras.get(name) for name in ("teacher", "anchor"))
    if teacher is None:
        raise ConfigError("--objective distill: the batches contain no teacher logits; give a cache with --dataset")
    x_BTD, report = model.hidden(batch.inputs, batch.segments, replace(execution, captures=("layer_output",) if layers else ()))
    targets = (batch.targets, batch.weights)
    out = sharded_distill(x_BTD, model.unembed_VD, *targets, teacher._replace(layers=None), model.cfg.vocab_size, parts)
    loss = (1 - layers) * out.loss
    totals = {"loss": loss, "loss/ce": out.ce, "kl": out.kl, "agreement": out.agree}
    if parts.hard:
        totals["loss/hard"] = out.hard
    if layers and teacher.layers is not None:
        after_LBTD = model.after_layers(report)  # type: ignore[attr-defined]  # the feed checks that the model has it
        totals["loss/layers"] = jnp.sum(batch.weights * layer_difference(after_LBTD, teacher.layers))
        loss += layers * totals["loss/layers"]
    if anchor and initial is not None:
        only_kl = LossWeights(random=parts.random)
        kept = sharded_distill(x_BTD, model.unembed_VD, *targets, initial, model.cfg.vocab_size, only_kl)
        totals["loss/anchor"] = kept.loss
        loss += anchor * kept.loss
    totals |= {"loss": loss, "accuracy": out.correct}
    return loss, Aux({name: Sum(total, out.weight) for name, total in totals.items()}, model.health(report))


def make_distill(cfg: RunConfig, execution: Execution) -> Objective:
    d = cfg.section(DistillConfig)
    parts = LossWeights(d.text, d.hard, d.temperature, d.renormalised, d.random)
    return functools.partial(distilled, execution=execution, parts=parts, layers=d.layers, anchor=d.anchor)


_TOKEN_BYTES = 6  # of one of the K tokens: its id as int32, its logit as float16


class Teachers(OpenFeed):
    """The online teachers of a run: `teacher`, unless a cache has its logits, and `anchor`, the initial model."""

    def __init__(
        self,
        d: DistillConfig,
        student: ArchitectureConfig,
        data: DataConfig,
        train: TrainConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
    ) -> None:
        self._online: dict[str, OnlineTeacher] = {}
        self.described = f"the model in --distill-teacher {d.teacher}" if d.teacher else ""
        if d.layers and d.teacher is None:
            raise ConfigError(
                "--distill-layers: a cache contains no layer outputs; set an online teacher with --distill-teacher"
            )
        if d.anchor and train.init_from is None:
            raise ConfigError("--distill-anchor: needs an initial model; set one with --init-from")
        make = functools.partial(
            OnlineTeacher, d=d, student=student, data=data, tokenizer=tokenizer, mesh=mesh,
            student_is_fixed=train.init_from is not None,
        )  # fmt: skip
        if d.teacher is not None:
            self._online["teacher"] = make("--distill-teacher", d.teacher, temperature=d.temperature, layers=d.layers > 0)
        if d.anchor:
            initial = str(train.init_from)
            self._online["anchor"] = make("--init-from", initial, temperature=1.0, layers=False, step=train.init_step)

    def identity(self, source: RowSource) -> str:
        teachers = {name: teacher.identity for name, teacher in self._online.items()}
        return digest_of([source.identity, teachers]) if teachers else source.identity

    def abstract(self, source: RowSource, batch: Batch) -> Batch:
        bare = batch._replace(extras={})
        online: dict[str, Any] = {name: teacher.abstract(source, bare) for name, teacher in self._online.items()}
        return batch._replace(extras=_cached(batch) | online)

    def reader(self, source: RowSource) -> Callable[[Any, Batch], Batch]:
        readers = {name: teacher.reader(source) for name, teacher in self._online.items()}

        def read(model: Any, batch: Batch) -> Batch:
            bare = batch._replace(extras={})
            online: dict[str, Any] = {name: reader(bare) for name, reader in readers.items()}
            return batch._replace(extras=_cached(batch) | online)

        return read


def _cached(batch: Batch) -> dict[str, Any]:
    """Return the batch's extras, with the fields of `CachedRows` as one."""
    extras = batch.extras
    return {"teacher": TeacherLogits(**extras)} if set(extras) == {"ids", "logits", "lse"} else extras


class DistillFeed(Feed):
    def opener(self, cfg: RunConfig) -> Opener | None:
        d = cfg.section(DistillConfig)
        return functools.partial(_open_cache, temperature=d.temperature) if d.teacher is None else None

    def open(self, cfg: RunConfig, source: RowSource, tokenizer: Tokenizer, mesh: Mesh) -> tuple[RunConfig, OpenFeed]:
        if isinstance(source, CachedRows):  # the cache knows its number of random tokens
            if source.random:
                remedy, is_fixed = "make the cache again without --random", cfg.train.init_from is not None
                subject, vocab_size = f"--dataset {cfg.data.dataset}", cfg.model.vocab_size
                check_random_vocab(subject, source.random_vocab, vocab_size, is_fixed=is_fixed, remedy=remedy)
            cfg = cfg.with_section(replace(cfg.section(DistillConfig), random=source.random))
        return cfg, Teachers(cfg.section(DistillConfig), cfg.model, cfg.data, cfg.train, tokenizer, mesh)

    def models(self, cfg: RunConfig) -> list[ArchitectureConfig]:
        return [model for model, _ in _shapes(cfg.section(DistillConfig), cfg.train.init_from)]

    def memory(self, cfg: RunConfig, mesh: Mapping[str, int]) -> FeedMemory:
        rows, d = cfg.data.batch_size // _split(mesh, "batch"), cfg.section(DistillConfig)
        tokens = cfg.train.grad_accum * rows * cfg.data.seq_len
        token_bytes = _TOKEN_BYTES * (min(d.top_k, cfg.model.vocab_size) + d.random) + 4
        logits = float(tokens * token_bytes * (1 + bool(d.anchor)))
        width = next(length.size for length in cfg.model.divisible_sizes() if length.axis == "embed")
        layers = tokens * cfg.model.depth * width * (2.0 if cfg.train.dtype == "bfloat16" else 4.0) * bool(d.layers)
        teachers = _shapes(d, cfg.train.init_from)
        weights = sum(_weights(tree, mesh) for _, tree in teachers)
        execution = Execution(cfg.train.dtype, "none", cfg.train.attention)
        reading = [_reading(teacher, execution, cfg.data.seq_len, mesh, rows) for teacher, _ in teachers]
        return FeedMemory(weights, logits + layers, layers, max(reading, default=0.0))


def _open_cache(request: OpenRequest, *, temperature: float) -> RowSource:
    cfg, tokenizer, split, _, align = request
    folder = Path(cfg.dataset)
    read_teacher_json(folder)  # a folder without a cache is a clear error
    check_recipe(folder, cfg, tokenizer, align)
    return CachedRows(folder, split, temperature, vocab_size=tokenizer.vocab_size, name=cfg.dataset)


_cached_shape = functools.lru_cache(8)(shape_of)


def _shapes(d: DistillConfig, init_from: str | None) -> list[tuple[ArchitectureConfig, Any]]:
    """Return (configuration, tree of shapes) of each online teacher.

    Raise ConfigError for a folder that holds no model.
    """
    named = [("--distill-teacher", d.teacher), ("--init-from", init_from if d.anchor else None)]
    found = [_cached_shape(name, flag) for flag, name in named if name is not None]
    return [(run.model, tree) for run, tree in found]


def _split(mesh: Mapping[str, int], axis: str) -> int:
    return math.prod(mesh[a] for a in RULES[axis])


def _weights(model: Any, mesh: Mapping[str, int]) -> float:
    local = lambda declared, a: a.size * a.dtype.itemsize / math.prod(_split(mesh, axis) for axis in declared.axes)
    return sum(jax.tree.leaves(map_declared(model, local)))


def _reading(teacher: ArchitectureConfig, execution: Execution, seq_len: int, mesh: Mapping[str, int], sequences: int) -> float:
    """Return the bytes of one layer's activations or of a chunk of logits: without gradients, nothing is saved."""
    count = architecture_of(teacher).activations
    if count is None:
        return 0.0
    held = count(teacher, execution, sequences, seq_len, _split(mesh, "time_split"))
    columns = teacher.padded_vocab // _split(mesh, "vocab")
    chunk = sequences * chunk_length(sequences, seq_len, columns) * columns * 8.0
    layer = 2 * held.streams / teacher.depth + held.forward
    return max(layer, chunk) + held.gathered


DISTILL = ObjectiveKind(make_distill, examples=TEXT, feed=DistillFeed())
