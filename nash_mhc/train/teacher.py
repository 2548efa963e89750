"""A teacher that reads rows: once for a cache, or on the student's own mesh, every batch before the student does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from nash_mhc.config.schema import ConfigError, RunConfig, TrainConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.data.tokenizer import Tokenizer
from nash_mhc.hub import stored
from nash_mhc.hub.load import Loaded, config_of, load
from nash_mhc.model.architectures import for_platform
from nash_mhc.model.protocol import Execution, LanguageModel
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.vocabulary import sharded_likeliest
from nash_mhc.ops.distill import Teacher
from nash_mhc.parallel.mesh import check_fit
from nash_mhc.parallel.sharding import named_sharding
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.storage.files import digest_of
from nash_mhc.train.step import padded_attention_length

Say = Callable[[str], None]


class Found(NamedTuple):
    """Of a teacher, in a part of a batch."""

    ids: Array
    logits: Array  # less the largest
    sums: Array  # for every temperature, the log-sum-exp over the model's whole vocabulary, less the largest logit
    layers: Array | None


Find = Callable[[LanguageModel, Batch], Found]


def finder(
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
) -> Find:
    """(model, a part of a batch) -> what is found of it; `layers`: with the stream after each of them."""
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

    def find(model: LanguageModel, batch: Batch) -> Found:
        x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
        how = {"vocab_size": model.cfg.vocab_size, "tokens": vocabulary, "k": top_k, "random": random}
        each = [
            sharded_likeliest(x_BTD, model.unembed_VD, batch.inputs, temperature=t, **how)  # the sums differ, no more
            for t in temperatures
        ]
        largest_BT = each[0].logits[..., 0]
        sums = [found.lse - largest_BT / t for found, t in zip(each, temperatures, strict=True)]
        left = model.after_layers(report) if layers else None  # type: ignore[attr-defined]
        return Found(each[0].ids, each[0].logits - largest_BT[..., None], jnp.stack(sums, axis=-1), left)

    return find


def check_drawn(who: str, random: int, drawn_from: int, cfg: RunConfig, *, without: str) -> None:
    """Raise ConfigError if random tokens were drawn from a vocabulary of another size than the student's."""
    if random and drawn_from != cfg.model.vocab_size:
        is_given = cfg.train.init_from is not None  # with the weights
        raise ConfigError(
            f"{who}: its random tokens are of a vocabulary of {drawn_from}, and the model has {cfg.model.vocab_size}; "
            + (without if is_given else f"set --model-vocab-size {drawn_from}, or {without}")
        )


class OnlineTeacher:
    """A frozen model, in its own dtype, that reads batches. What it says of one is what a cache would hold."""

    def __init__(
        self,
        flag: str,
        name: str,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        say: Say,
        *,
        temperature: float,
        layers: bool,
        step: int | None = None,
    ) -> None:
        """`step`: its checkpoint; None: the one that the run ends with."""
        own = config_of(name, flag).model
        if cfg.model.alignment % own.alignment:
            raise ConfigError(
                f"{flag} {name}: its documents start at multiples of {own.alignment}, and the student's at multiples of "
                f"{cfg.model.alignment}; let them read the same rows from a cache (python -m nash_mhc.distill cache)"
            )
        there, here = ([getattr(model, key, None) for key in ("layers", "width")] for model in (own, cfg.model))
        if layers and (None in there or there != here):
            raise ConfigError(
                f"--distill-layers: {name} has {there[0]} layers of width {there[1]}, and the student {here[0]} of {here[1]}; "
                "they can be compared where they are alike"
            )
        check_drawn(f"{flag} {name}", cfg.distill.random, own.vocab_size, cfg, without="leave out --distill-random")
        check_fit(dataclasses.replace(cfg, model=own), mesh.shape, model_is_given=True)
        record = stored.find(flag, name, step, hashed=True, say=say)
        # Wherever it lies: its hash says which one it is.
        self.identity = digest_of({k: v for k, v in record.items() if k != "folder"})
        self._loaded = load(name, step, mesh=mesh, say=say)
        if self._loaded.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"{flag} {name}: has another tokenizer than {cfg.data.tokenizer}; it would read other tokens")
        if cfg.distill.random and cfg.distill.top_k >= tokenizer.vocab_size:
            raise ConfigError(
                f"--distill-random {cfg.distill.random}: --distill-top-k {cfg.distill.top_k} names all {tokenizer.vocab_size} "
                "tokens; there are no others"
            )
        self._mesh, self._layers = mesh, layers
        self._asked: dict[str, Any] = {
            "seq_len": cfg.data.seq_len, "vocabulary": tokenizer.vocab_size, "temperatures": (temperature,),
            "top_k": min(cfg.distill.top_k, tokenizer.vocab_size), "layers": layers,
            "random": cfg.distill.random,
        }  # fmt: skip

    def _every_part(self, source: RowSource) -> Callable[[LanguageModel, Batch], Teacher]:
        find = finder(self._loaded, source, self._mesh, **self._asked)

        def every_part(model: LanguageModel, batch: Batch) -> Teacher:
            found = jax.lax.map(lambda part: find(model, part), batch)
            # As a cache has them, where a logit that float16 cannot say is no less impossible one step above.
            logits = jnp.maximum(found.logits, jnp.finfo(jnp.float16).min).astype(jnp.float16)
            return Teacher(found.ids, logits, found.sums[..., 0], found.layers)

        return every_part

    @property
    def _places(self) -> Teacher:
        tokens = ("parts", "batch", "time")
        candidates = named_sharding(self._mesh, *tokens, "candidates")
        layers = named_sharding(self._mesh, "parts", "layers", "batch", "time", "width") if self._layers else None
        return Teacher(candidates, candidates, named_sharding(self._mesh, *tokens), layers)  # type: ignore[arg-type]

    def abstract(self, source: RowSource, batch: Batch) -> Teacher:
        """Shapes and shardings of what it will say of batches like this one."""
        with jax.set_mesh(self._mesh):
            shapes = jax.eval_shape(self._every_part(source), self._loaded.model, batch)
        place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        return jax.tree.map(place, shapes, self._places)

    def program(self, source: RowSource) -> CompiledStep:
        return CompiledStep(self._every_part(source), self._mesh, out_shardings=self._places, warn=lambda text: None)

    def reader(self, source: RowSource) -> Callable[[Batch], Teacher]:
        program = self.program(source)
        return lambda batch: program(self._loaded.model, batch)


class Teachers:
    """Those of a run that read every batch: whom it learns from, where no cache has that, and what it began with."""

    def __init__(self, cfg: RunConfig, tokenizer: Tokenizer, mesh: Mesh, say: Say) -> None:
        d, self._each = cfg.distill, dict[str, OnlineTeacher]()
        for name in ("teacher", "layers", "anchor"):
            if getattr(d, name) and cfg.objective.name != "distill":
                raise ConfigError(f"--distill-{name}: nothing is learned from it without --objective distill")
        if d.layers and d.teacher is None:
            raise ConfigError("--distill-layers: a cache has no layers; name a model with --distill-teacher")
        if d.anchor and cfg.train.init_from is None:
            raise ConfigError("--distill-anchor: holds a run to the model that it begins with; name one with --init-from")
        make = functools.partial(OnlineTeacher, cfg=cfg, tokenizer=tokenizer, mesh=mesh, say=say)
        if d.teacher is not None:
            self._each["teacher"] = make("--distill-teacher", d.teacher, temperature=d.temperature, layers=d.layers > 0)
        if d.anchor:
            began = str(cfg.train.init_from)
            self._each["anchor"] = make("--init-from", began, temperature=1.0, layers=False, step=cfg.train.init_step)

    def identity(self, source: RowSource) -> str:
        """Of all that the run reads."""
        own = {name: teacher.identity for name, teacher in self._each.items()}
        return digest_of([source.identity, own]) if own else source.identity

    def abstract(self, source: RowSource, batch: Batch) -> Batch:
        """Return shapes and shardings of what `reader` will return for batches like this one."""
        bare = batch._replace(extras={})
        online: dict[str, Any] = {name: teacher.abstract(source, bare) for name, teacher in self._each.items()}
        return batch._replace(extras=_from_cache(batch) | online)

    def reader(self, source: RowSource) -> Callable[[Batch], Batch]:
        """Return the function that adds to a batch of that source what each teacher knows of it."""
        readers = {name: teacher.reader(source) for name, teacher in self._each.items()}

        def read(batch: Batch) -> Batch:
            bare = batch._replace(extras={})
            online: dict[str, Any] = {name: reader(bare) for name, reader in readers.items()}
            return batch._replace(extras=_from_cache(batch) | online)

        return read


def _from_cache(batch: Batch) -> dict[str, Any]:
    """Return the fields of `TaughtRows` as one extra, where the rows are such; all others stay as they are."""
    known = batch.extras
    return {"teacher": Teacher(**known)} if set(known) == {"ids", "logits", "lse"} else known
